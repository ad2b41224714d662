"""`memory.redundancy`: a host is killed in mid-step, and the others go on from the step before, whatever it alone has held."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_keeping import STEPS, Case, open_engine, resume
from tests.distributed.world import RankFailure, World
from tests.examples import further
from whale.api.engine import Engine
from whale.errors import RuntimeFault
from whale.runtime.checkpoint.contents import Piece
from whale.runtime.checkpoint.copies import StateCopies
from whale.runtime.state.engine_state import EngineState
from whale.sharding.second_owners import NUM_STEPS_KEPT, second_owners

MOST_STEPS = 2 * STEPS + 1
MOMENTS = {
    "forward": (STEPS,),
    "script": (STEPS,),
    "copying": (STEPS, STEPS + 1),
    "sending": (STEPS, STEPS + 1),
    "update": (STEPS, STEPS + 1),
    "move": (STEPS,),
    "moved": (STEPS,),
}
"""Of the step behind `STEPS`: where a host is killed, and the steps that may be gone on from."""


@dataclass(frozen=True)
class Loss:
    """A run that loses a host.

    Attributes:
        hosts: of each of its ranks.
        lost: which hosts, at once.
        moment: when.
        config, split, norm: of the run, as `Case` has them.
        then: the settings of those who go on.
        writes: whether the script writes into weights behind `STEPS`.
    """

    hosts: str
    lost: str
    moment: str
    config: tuple[tuple[str, Any], ...]
    split: int
    norm: bool
    then: tuple[tuple[str, Any], ...]
    writes: bool = False

    @property
    def case(self) -> Case:
        return Case("", self.config, len(self.hosts), (), split=self.split, norm=self.norm)


def draw(seed: int) -> Loss:
    """Two hosts of one to three ranks, and plans."""
    random = Random(seed)
    size, moment = random.randint(2, 4), [*MOMENTS][seed % len(MOMENTS)]
    hosts = "".join(random.sample("a" + "ab"[: size - 2] * 2 + "b", size)) if size > 2 else "ab"
    hosts = hosts if len(set(hosts)) == 2 else hosts[:-1] + ("b" if hosts[0] == "a" else "a")
    lost, kind = random.choice("ab"), random.choice(("stages", "split", "norm", "zero"))
    split = 2 if kind == "split" and size % 2 == 0 else 1
    return Loss(
        hosts, lost, moment, settings(random, size, kind), split, kind == "norm", settings(random, len(hosts.replace(lost, "")), kind)
    )


def settings(random: Random, size: int, kind: str) -> tuple[tuple[str, Any], ...]:
    """Of a run of so many ranks."""
    found: dict[str, Any] = {"memory.redundancy": 1, "memory.zero": random.choice("0123")}
    if kind in ("stages", "zero") and size > 1 and random.random() < 0.75:
        found |= {"pipeline.num_stages": 3 if size == 3 else 2, "pipeline.num_micro_batch": 2}
    return tuple(found.items())


def die(*_: Any, **__: Any) -> None:
    os._exit(9)


def lose(rank: int, size: int, loss: Loss, folder: str) -> None:
    engine, loader = open_engine(loss.case, dict(loss.config), loss.hosts[rank], folder)
    assert engine.resume(Path(folder) / "none") is None
    batches = endless(loader)
    for _ in range(STEPS):
        engine.step(next(batches))
    check_bytes(engine, loss, rank)
    if loss.writes:
        write(engine)
    patch = pytest.MonkeyPatch()
    if loss.hosts[rank] in loss.lost:
        if loss.moment == "forward":
            patch.setattr(engine.runtime, "train", die)
        elif loss.moment == "script":
            die()
        elif loss.moment == "copying":
            patch.setattr(StateCopies, "_copied", die)
        elif loss.moment == "sending":
            patch.setattr(StateCopies, "_travel", after(StateCopies._travel))
        elif loss.moment == "update":
            patch.setattr(EngineState, "advance", after(EngineState.advance))
        elif loss.moment == "move":
            patch.setattr("whale.api.opening.move_state", die)
    with pytest.raises(RuntimeFault):
        if loss.moment in ("move", "moved"):
            engine.replan(config={"gradient.clip_norm": 1.0, "memory.zero": "1"})
        if loss.moment == "moved" and loss.hosts[rank] in loss.lost:
            die()
        engine.step(next(batches))
        engine.step(next(batches))
    if loss.hosts[rank] in loss.lost:  # another rank of this host was the first to die
        die()
    engine.close()  # weights of those that are lost may be on their way


def write(engine: Engine) -> None:
    for value in engine.parameters.values():
        value.data.mul_(0.5)  # by which torch counts no version


def check_bytes(engine: Engine, loss: Loss, rank: int) -> None:
    """What copies take, what of them is sent, and what a fault leaves beside them is what the estimate counts."""
    keeping = engine._keeping
    assert keeping.copies is not None
    order, duty = engine.runtime.roster.world_ranks, keeping.copies.duty
    found = second_owners(engine.plan, engine.model_graph, engine.runtime.holdings.shardings, [loss.hosts[each] for each in order])
    own = order.index(rank)
    copied = NUM_STEPS_KEPT * size_of(keeping.copies.steps[0].pieces)  # others may be from before the optimizer's first step
    assert copied == found.host_bytes(own)
    assert size_of(keeping.held(None, {}, {name: duty.chosen[name] for name in duty.sent})[0]) == found.sent_bytes[own]
    assert copied + size_of(keeping.held(None, {})[0]) == found.fault_bytes(own)


def size_of(pieces: Sequence[Piece]) -> int:
    return sum(value.nbytes for key, *_, value in pieces if key.startswith("model.") or (key.startswith("optimizer.") and value.dim()))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def after(method: Any) -> Any:
    """Calls a method, and dies."""

    def call(*arguments: Any, **named: Any) -> None:
        method(*arguments, **named)
        die()

    return call


def go_on(rank: int, size: int, loss: Loss, folder: str) -> tuple[int, list[float], dict[str, Tensor]]:
    own = [host for host in loss.hosts if host not in loss.lost][rank]
    return resume(replace(loss.case, split=1), dict(loss.then), own, folder)


def undisturbed(rank: int, size: int, norm: bool, writes: bool, folder: str) -> list[tuple[float, dict[str, Tensor]]]:
    engine, loader = open_engine(Case("", (), 1, (), norm=norm), {}, "alone", folder)
    found: list[tuple[float, dict[str, Tensor]]] = []
    while len(found) < MOST_STEPS:
        for batch in loader:
            found.append((float(engine.step(batch)), engine.state_dict() or {}))
            if writes and len(found) == STEPS:
                write(engine)
    return found


KNOWN: dict[tuple[bool, bool], list[tuple[float, dict[str, Tensor]]]] = {}
SPLIT = (("memory.redundancy", 1), ("pipeline.num_stages", 2), ("pipeline.num_micro_batch", 2))
WRITTEN = Loss("ab", "b", "forward", SPLIT, 1, False, (), writes=True)
TWO = Loss("abc", "ab", "forward", (("memory.redundancy", 1), ("pipeline.num_stages", 3)), 1, False, ())


@pytest.mark.parametrize(
    "loss",
    [WRITTEN, TWO, *map(draw, range(7)), *further(map(draw, range(7, 14)))],
    ids=lambda loss: f"{loss.moment} {loss.hosts} without {loss.lost}",
)
def test_no_step_but_that_in_flight_is_lost_with_a_host(world: World, loss: Loss, tmp_path: Path) -> None:
    folder, left = str(tmp_path), [rank for rank, host in enumerate(loss.hosts) if host in loss.lost]
    with pytest.raises(RankFailure) as ended:
        world.run(lose, loss, folder, num_ranks=len(loss.hosts))
    assert sorted(ended.value.texts) == left, ended.value
    results = world.run(go_on, loss, folder, num_ranks=len(loss.hosts) - len(left))
    (step,) = {step for step, _, _ in results}
    assert step in (MOMENTS[loss.moment] if len(loss.lost) == 1 else (0,)), "two hosts took what both had copies of: from the start"
    look = loss.norm, loss.writes
    if look not in KNOWN:
        (KNOWN[look],) = world.run(undisturbed, *look, folder, num_ranks=1)
    for _, losses, state in results:
        assert losses == pytest.approx([each for each, _ in KNOWN[look][step : step + STEPS]], rel=1e-10)
        torch.testing.assert_close(state, KNOWN[look][step + STEPS - 1][1], rtol=1e-10, atol=1e-12)
