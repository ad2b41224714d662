"""A run that changes its plan between steps goes on as if it had always had the new one, and as in one process."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

import whale
from tests import reference
from tests.distributed.training import Case, captured_case, largest_of, make_cluster, make_engine, run_case, train_reference
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import Block, Description, Segment, descriptions
from whale.dry_run import LiveBytes
from whale.errors import ConfigError, WhaleError

TOLERANCE = 1e-10
Blocks = tuple[tuple[tuple[str, Any], ...], ...]
"""Replicas as settings have them."""


@st.composite
def replicas(draw: st.DrawFn, num_ranks: int) -> Blocks:
    """Some or all devices, as copies of the model, pipelines and split groups beside each other."""
    found, left = [], num_ranks
    while left and (not found or draw(st.integers(0, 5))):
        size = draw(st.integers(1, left))
        kind = draw(st.sampled_from(("split", "num_stages"))) if size > 1 else "num_stages"
        found.append((("devices", size), (kind, size)))
        left -= size
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, tuple[Blocks, ...]]:
    """A model without scopes, and the replicas of each step."""
    num_ranks = draw(st.integers(2, 4))
    description = replace(draw(descriptions()), segments=(Segment(0),), placement="none", copies=None)
    plans = draw(st.lists(replicas(num_ranks), min_size=3, max_size=3))
    config: dict[str, Any] = {"pipeline.num_micro_batch": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        config["gradient.clip_norm"] = 0.1
    rows = draw(st.lists(st.integers(16, 19), min_size=3, max_size=3))
    optimizer = draw(st.sampled_from(("sgd", "adam")))
    evaluates = draw(st.booleans())
    return Case(description, tuple(rows), (1.0,) * num_ranks, tuple(config.items()), optimizer, evaluates=evaluates), tuple(plans)


def _config(blocks: Blocks) -> dict[str, Any]:
    return {"replicas": [dict(block) for block in blocks]}


def train(rank: int, num_ranks: int, case: Case, plans: tuple[Blocks, ...]) -> tuple[reference.Run, int]:
    """Trains a case, each step under another plan, if there is one with such replicas."""
    engine, losses, gradients, num_plans = make_engine(case), [], {}, 0
    for number, (batch, blocks) in enumerate(zip(case.batches, plans, strict=True)):
        with contextlib.suppress(WhaleError):  # nothing can be cut, or there are fewer ops than stages: then nothing has changed
            engine.replan(config=_config(blocks))
            num_plans += 1
        losses.append(float(engine.step(batch)))
        for name, value in engine.gradients().items() if number == 0 else ():
            gradients[name] = value.clone()
    state = engine.state_dict()
    assert state is not None and engine.step_number == len(losses)
    run = reference.Run(losses, gradients, reference.copy_of(state))
    if case.evaluates:
        batch = case.batches[0]
        run = replace(run, evaluation=float(engine.evaluate(batch)), prediction=reference.tensors_of(engine.predict(batch)))
    engine.close()
    return run, num_plans


@at_most(25, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_the_numbers_are_those_of_one_process(world: World, case: tuple[Case, tuple[Blocks, ...]]) -> None:
    note(f"{case!r}")
    runs, (num_plans, *_) = zip(*run_case(world, train, *case), strict=True)
    event(f"{num_plans} plans of 3")
    whole = [replace(run, gradients={n: v for n, v in run.gradients.items() if v.shape == run.state[n].shape}) for run in runs]
    error, where = largest_of(whole, train_reference(case[0]), all_gradients=False)
    assert error < TOLERANCE, where


CHAIN = Description(tokens=False, blocks=(Block("linear"), Block("gelu"), Block("feed_forward"), Block("linear", tied_to=0)))
PIPELINE: Blocks = ((("devices", 2), ("num_stages", 2)),)
COPIES: Blocks = ((("devices", 1),), (("devices", 1),))
SPLIT: Blocks = ((("devices", 2), ("split", 2)),)
FORTH_AND_BACK = Case(CHAIN, (8,) * 6, (1.0, 1.0), (("planning.search", "off"),), "adam")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of a batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return int(self.batch["x"].shape[0])

    def __getitem__(self, index: int) -> Any:
        return {key: value[index] for key, value in self.batch.items()}


def schedule(rank: int, num_ranks: int, case: Case, plans: tuple[Blocks, ...]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Trains from a loader with a schedule, another plan before each step; losses, learning rates and weights."""
    made = captured_case(case)
    engine = whale.parallelize(
        made.model,
        loss=made.loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        scheduler=partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        batch=made.batch,
        config={"planning.search": "off"},
        cluster=make_cluster((1.0, 1.0)),
    )
    losses, rates = [], []
    loader = engine.loader(Rows(case.batches[0]), global_batch_size=4, shuffle=True)
    for _ in range(3):
        for batch in loader:
            losses.append(float(engine.step(batch)))
            assert engine.optimizer is not None
            rates.append(engine.optimizer.param_groups[0]["lr"])
            if plans:
                engine.replan(config=_config(plans[len(losses) % len(plans)]))
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return losses, rates, reference.copy_of(state)


def test_forth_and_back_is_never_having_moved(world: World) -> None:
    """To a pipeline and back nothing is computed otherwise: not a bit differs. Loaders and schedules go on where they are."""
    (losses, rates, state), _ = run_case(world, schedule, FORTH_AND_BACK, ())
    for plans in ((COPIES,), (PIPELINE, COPIES), (SPLIT, PIPELINE, COPIES)):
        for moved_losses, moved_rates, moved in run_case(world, schedule, FORTH_AND_BACK, plans):
            assert moved_rates == rates
            assert moved_losses == pytest.approx(losses, rel=1e-12)
            for name, value in state.items():
                torch.testing.assert_close(moved[name], value, rtol=1e-9, atol=1e-11)
            if plans == (COPIES,):
                assert moved_losses == losses and all(torch.equal(moved[name], value) for name, value in state.items())


def refused(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is said of a plan that cannot be, settings that are not, an optimizer that was replaced, and a call on one rank alone."""
    engine = make_engine(case)
    before, said = engine.state_dict(), []
    for config in ({"replicas": [{"devices": 5}]}, {"pipeline.num_stage": 2}):
        with pytest.raises(WhaleError) as fault:
            engine.replan(config=config)
        said.append(str(fault.value))
    after, old = engine.state_dict(), engine.optimizer
    assert before is not None and after is not None and old is not None
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    engine.replan(config=_config(SPLIT))
    with pytest.raises(ConfigError) as stale:
        old.param_groups[0]["lr"] = 0.0
    with pytest.raises(WhaleError) as alone:
        engine.replan() if rank == 0 else engine.step(case.batches[0])
    engine.close()
    return [*said, str(stale.value), str(alone.value)]


def test_what_cannot_be_changes_nothing_and_is_said(world: World) -> None:
    for devices, key, stale, alone in run_case(world, refused, FORTH_AND_BACK):
        assert "5" in devices and "num_stages" in key
        assert "engine.replan" in stale and "engine.optimizer" in stale
        assert "replan: rank 0" in alone and "step: rank 1" in alone


def moved(rank: int, num_ranks: int, case: Case) -> tuple[list[str], int, int]:
    """What of the old weights is still there after they were split, the most that was made at once, and what it may be."""
    engine = make_engine(case)
    engine.step(case.batches[0])
    old = {name: weakref.ref(value) for name, value in engine.tensors.items()}
    with LiveBytes() as memory:
        engine.replan(config=_config(SPLIT))
    left = [name for name, value in old.items() if value() is not None and value() is not engine.tensors[name]]
    sizes = [value.nbytes for value in engine.tensors.values()]
    engine.close()
    num_states_and_buckets = 3
    return left, memory.peak, (1 + num_states_and_buckets) * sum(sizes) + 4 * max(sizes) + (64 << 10)


def test_nothing_is_there_twice(world: World) -> None:
    """Name by name: the parts, what the optimizer keeps of them, buckets, and one tensor on its way."""
    wide = replace(CHAIN, width=96)
    for left, peak, most in run_case(world, moved, replace(FORTH_AND_BACK, description=wide)):
        assert not left and peak < most
