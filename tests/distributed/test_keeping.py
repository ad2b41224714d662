"""What ranks leave that lose their peers, each in a folder that no other rank sees, and what other ranks under another plan make of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.world import World

STEPS = 2
STAGES = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}


@dataclass(frozen=True)
class Case:
    """A run that loses ranks.

    Attributes:
        config: of the run.
        num_ranks: of it.
        survivors: which of them leave what they hold.
        then: how many go on.
        then_config: how.
        split: over how many devices the second layer is cut.
        norm: whether the model keeps running statistics.
        per_host: how many ranks of the run share a folder.
        late: which survivors have done a step more.
        step: the last of which all pieces are there; 0 where they are of none.
        groups: of ranks that each keep a copy of sharded state.
    """

    name: str
    config: tuple[tuple[str, Any], ...]
    num_ranks: int
    survivors: tuple[int, ...]
    then: int = 1
    then_config: tuple[tuple[str, Any], ...] = ()
    split: int = 1
    norm: bool = False
    per_host: int = 1
    late: tuple[int, ...] = ()
    step: int = STEPS
    groups: tuple[int, ...] = ()


CASES = (
    Case("one of two copies", (), 2, (1,)),
    Case("both stages", tuple(STAGES.items()), 2, (0, 1), per_host=2),
    Case("one of two stages", tuple(STAGES.items()), 2, (0,), step=0),
    Case("a stage of each copy", tuple(STAGES.items()), 4, (0, 3), 3),
    Case("shares of three keepers", (("memory.zero", "3"),), 3, (0, 1, 2), 2, tuple(STAGES.items()), per_host=2),
    Case("two shares of three", (("memory.zero", "1"),), 3, (0, 2), 2, step=0),
    Case("two shares of four", (("memory.zero", "3"),), 4, (0, 1), 2, step=0),
    Case("a host's copy of all shares", (("memory.zero", "3"),), 4, (0, 1), 3, (("memory.zero", "2"),), per_host=2, groups=(0, 0, 1, 1)),
    Case("halves of a cut layer", (), 2, (0, 1), 2, (("memory.zero", "2"),), split=2),
    Case("a copy that is a step ahead", (), 2, (0, 1), late=(1,), step=STEPS + 1, per_host=2),
    Case("a stage that is a step ahead", tuple(STAGES.items()), 2, (0, 1), late=(0,), step=0, per_host=2),
    Case("averages of copies apart", (), 2, (0,), norm=True, step=0),
)


def open_engine(case: Case, config: dict[str, Any], host: int | str, folder: str) -> tuple[whale.Engine, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6, bias=not case.norm), nn.BatchNorm1d(6) if case.norm else nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    with whale.split(case.split) if case.split > 1 else contextlib.nullcontext():
        layers.append(nn.Linear(6, 4))
    samples = list(torch.randn(30, 4, dtype=torch.float64))
    engine = whale.parallelize(
        nn.Sequential(*layers).double(),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=partial(torch.optim.Adam, lr=0.02),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.8),
        batch=torch.stack(samples[:12]),
        config={"runtime.keep_on_fault": f"{folder}/{host}", "planning.search": "off", **config},
    )
    return engine, engine.loader(samples, global_batch_size=12, shuffle=True)


def train(engine: whale.Engine, loader: Any, num_steps: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            losses.append(float(engine.step(batch)))
            if len(losses) == num_steps:
                break
    return losses


def leave(rank: int, size: int, case: Case, folder: str) -> None:
    engine, loader = open_engine(case, dict(case.config), rank // case.per_host, folder)
    assert engine.resume(Path(folder) / "none") is None
    if case.groups:
        engine.replan(replace(engine.plan, keeper_groups=case.groups))
    batches = iter(loader)
    for step in range(STEPS + 1):
        engine.step(next(batches))
        if rank in case.survivors and step + 1 == STEPS + (rank in case.late):
            engine.leave_state()
    engine.close()


def resume(case: Case, config: dict[str, Any], host: int | str, folder: str) -> tuple[int, list[float], dict[str, Tensor]]:
    """Trains from what was left; the step that it goes on from, the losses, and the weights."""
    engine, loader = open_engine(case, config, host, folder)
    engine.resume(Path(folder) / "none")
    step, losses = engine.step_number, train(engine, loader, STEPS)
    state = engine.state_dict()
    engine.close()
    assert state is not None
    return step, losses, state


def go_on(rank: int, size: int, case: Case, folder: str, own: tuple[int, ...]) -> tuple[int, list[float], dict[str, Tensor]]:
    return resume(case, dict(case.then_config), own[rank], folder)


def undisturbed(rank: int, size: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    engine, loader = open_engine(replace(case, split=1), {}, "alone", folder)
    losses, state = train(engine, loader, case.step + STEPS), engine.state_dict()
    assert state is not None
    return losses, state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_survivors_hold_the_step_or_not(world: World, case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    world.run(leave, case, folder, num_ranks=case.num_ranks)
    own = (*sorted({rank // case.per_host for rank in case.survivors}), *range(100, 104))  # hosts that were there, and new ones
    results = world.run(go_on, case, folder, own, num_ranks=case.then)
    assert {step for step, _, _ in results} == {case.step}
    if case.step:
        ((losses, state),) = world.run(undisturbed, case, folder, num_ranks=1)
        for _, found, weights in results:
            assert found == pytest.approx(losses[case.step : case.step + STEPS], rel=1e-10)
            torch.testing.assert_close(weights, state, rtol=1e-10, atol=1e-12)
