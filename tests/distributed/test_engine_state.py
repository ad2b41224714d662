"""A training's state outlives the runtime that works on it: another runtime of the same plan goes on exactly."""

from __future__ import annotations

import pytest
import torch

from tests import reference
from tests.distributed.training import Case, make_engine, run_case
from tests.distributed.world import World
from tests.models import Block, Description, Segment
from whale.api import Engine
from whale.api.opening import Decided
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState

BLOCKS = (Block("linear"), Block("batch_norm"), Block("linear"), Block("gelu"), Block("linear", tied_to=2))


def rebuilt(engine: Engine) -> Engine:
    """The engine's state under a runtime made anew."""
    old = engine.runtime
    old.close()
    runtime = Runtime(
        roster=old.roster,
        schedules=old.schedules,
        holdings=old.holdings,
        captured=engine.modes.train,
        state=engine.state,
        config=old.config,
    )
    return Engine(engine.modes, engine.state, runtime, engine.opening, Decided(runtime.roster.plan))


def train(rank: int, num_ranks: int, case: Case, rebuilds: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    engine = make_engine(case)
    losses = []
    try:
        for number, batch in enumerate(case.batches):
            if rebuilds and number > 0:
                state = engine.state
                engine = rebuilt(engine)
                assert engine.state is state and engine.step_number == number
            losses.append(float(engine.step(batch)))
            if number == 1:
                losses.append(float(engine.evaluate(batch)))
        whole = engine.state_dict()
        assert whole is not None
        num_hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in engine.parameters.values())
        return losses, reference.copy_of(whole), num_hooks
    finally:
        engine.close()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rebuilt_runtime_goes_on_exactly(world: World, optimizer: str) -> None:
    pipelines = Description(tokens=False, blocks=BLOCKS, segments=(Segment(0), Segment(2)), placement="construction")
    config = (("pipeline.num_micro_batch", 2), ("gradient.clip_norm", 0.1), ("communication.bucket_bytes", 200))
    case = Case(pipelines, (16, 17, 16), (1.0,) * 4, config, optimizer)
    kept, again = run_case(world, train, case, False), run_case(world, train, case, True)
    for (losses, state, num_hooks), (other_losses, other_state, other_num_hooks) in zip(kept, again, strict=True):
        assert losses == other_losses
        assert num_hooks == other_num_hooks > 0
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())


def test_a_state_knows_no_process_group() -> None:
    names = {
        "tensors",
        "kept",
        "optimizer",
        "scheduler",
        "step_number",
        "position",
        "num_advanced",
        "noted_settings",
        "has_moved_statistics",
        "scaling",
        "decay",
        "averages",
        "momenta",
        "keeps_momenta",
        "num_local",
        "is_whole",
    }
    assert {name for name in EngineState.__dataclass_fields__ if not name.startswith("_")} == names
