"""A run that changes its plan between steps goes on as if it had always had the new one, and as in one process."""

from __future__ import annotations

import contextlib
import io
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn
from unittest import mock

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
from whale.api import Engine
from whale.config import Config
from whale.dry_run import LiveBytes
from whale.errors import ConfigError, WhaleError
from whale.runtime.recording.meter import Meter
from whale.search import decide

TOLERANCE = 1e-10
Blocks = tuple[tuple[tuple[str, Any], ...], ...]
"""Replicas as settings have them."""


@st.composite
def replicas(draw: st.DrawFn, num_ranks: int) -> Blocks:
    """Some or all devices, as copies of the model, pipelines and split groups beside each other."""
    found, left = list[Any](), num_ranks
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


@st.composite
def throttled(draw: st.DrawFn) -> tuple[Case, tuple[dict[str, float], ...]]:
    """A model, and before each step but the first by how much its devices are slowed."""
    num_ranks = draw(st.integers(2, 4))
    description = replace(draw(descriptions()), segments=(Segment(0),), placement="none", copies=None)
    config: dict[str, Any] = {"runtime.rebalance_horizon": 1e9, "pipeline.num_micro_batch": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        config["pipeline.num_stages"] = 2
    if draw(st.booleans()):
        config["planning.search"] = "off"
    config["memory.zero"] = draw(st.sampled_from(("0", "2")))
    slowdowns = st.sampled_from((1.0, 2.0, 5.0, 20.0))
    moves = draw(st.lists(st.fixed_dictionaries({f"host0/{n}": slowdowns for n in range(num_ranks)}), min_size=2, max_size=2))
    rows = draw(st.lists(st.integers(16, 19), min_size=3, max_size=3))
    optimizer = draw(st.sampled_from(("sgd", "adam")))
    return Case(description, tuple(rows), (1.0,) * num_ranks, tuple(config.items()), optimizer), tuple(moves)


def rebalanced(rank: int, num_ranks: int, case: Case, slowdowns: tuple[dict[str, float], ...]) -> tuple[reference.Run, int]:
    """Trains a case on devices that are slowed from step to step; also gives how often it moved."""
    engine, losses, num_moves = make_engine(case), [], 0
    for batch, slowed in zip(case.batches, ({}, *slowdowns), strict=True):
        if slowed:
            before = engine.plan
            num_moves += engine.rebalance(slowed if rank == 0 else {}).replicas != before.replicas
        losses.append(float(engine.step(batch)))
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return reference.Run(losses, {}, reference.copy_of(state)), num_moves


@at_most(15, suppress_health_check=list(HealthCheck))
@given(case=throttled())
def test_moving_with_the_speeds_changes_no_number(world: World, case: tuple[Case, tuple[dict[str, float], ...]]) -> None:
    note(f"{case!r}")
    runs, (num_moves, *_) = zip(*run_case(world, rebalanced, *case), strict=True)
    event(f"{num_moves} moves of 2")
    error, where = largest_of(runs, train_reference(case[0]), all_gradients=False)
    assert error < TOLERANCE, where


THROTTLED: tuple[dict[str, float], ...] = ({"host0/1": 8.0}, {"host0/1": 8.0}, {"host0/1": 1.0})


def test_it_moves_where_that_pays_and_back(world: World) -> None:
    wide = Description(tokens=False, blocks=(Block("linear"), Block("gelu"), Block("linear")), width=64)
    case = Case(wide, (32,) * 4, (1.0, 1.0), (("planning.search", "off"), ("runtime.rebalance_horizon", 1e9)), "adam")
    runs, num_moves = zip(*run_case(world, rebalanced, case, THROTTLED), strict=True)
    assert num_moves == (2, 2)
    error, where = largest_of(runs, train_reference(case), all_gradients=False)
    assert error < TOLERANCE, where


def fed(rank: int, num_ranks: int, case: Case, slowdowns: tuple[dict[str, float], ...]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Trains from a loader, whose devices are slowed before every second step."""
    engine, losses, rows = make_engine(case), [], []
    loader = engine.loader(Rows(case.batches[0]), global_batch_size=8, shuffle=True)
    for _ in range(2):
        for batch in loader:
            losses.append(float(engine.step(batch)))
            if slowdowns and len(losses) % 2:
                rows.append(engine.rebalance(slowdowns[len(losses) // 2 % len(slowdowns)]).replica_rows(8))
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return losses, reference.copy_of(state), len(set(rows))


def test_a_loader_goes_on_where_it_is(world: World) -> None:
    """Each sample is read once in an epoch by whichever rank, in the order of a run that never moved."""
    wide = Description(tokens=False, blocks=(Block("linear"), Block("gelu"), Block("linear")), width=64)
    case = Case(wide, (32,), (1.0, 1.0), (("planning.search", "off"), ("runtime.rebalance_horizon", 1e9)), "adam")
    (losses, state, _), _ = run_case(world, fed, case, ())
    for moved_losses, moved, num_rows in run_case(world, fed, case, ({"host0/1": 8.0}, {"host0/1": 1.0}, {"host0/0": 8.0})):
        assert num_rows > 1, "rows were divided in several ways"
        assert moved_losses == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(moved[name], value, rtol=1e-9, atol=1e-11)


@contextlib.contextmanager
def equally_fast(engine: Engine, rank: int) -> Iterator[None]:
    """Has a rank say that each of its rows has taken equally long, on however busy a machine."""

    def seconds(meter: Meter) -> float:
        start, stop = engine.plan.replica_rows(64)[rank]
        return (stop - start) * 1e-4

    with mock.patch.object(Meter, "busy_seconds", seconds):
        yield


def misjudged(rank: int, num_ranks: int, case: Case, mode: str) -> tuple[list[float], list[tuple[tuple[int, int], ...]], str]:
    """Trains by a plan that gives one rank most rows, on a cluster whose file says that the other is faster: they are equally fast."""
    there, config = make_cluster((1.0, 8.0)), {"planning.search": "off", "runtime.rebalance": mode, "runtime.rebalance_horizon": 1e9}
    made = captured_case(case)
    plan = decide(None, made.capture()[0], make_cluster((8.0, 1.0)), Config({"planning.search": "off"}))[0]
    engine = whale.parallelize(
        made.model, loss=made.loss, optimizer=partial(torch.optim.SGD, lr=1e-3), batch=made.batch, config=config, cluster=there, plan=plan
    )
    losses, rows = [], []
    with contextlib.redirect_stderr(io.StringIO()) as said, equally_fast(engine, rank):
        for _ in range(24):
            rows.append(engine.plan.replica_rows(64))
            losses.append(float(engine.step(case.batches[0])))
    engine.close()
    return losses, rows, said.getvalue()


def test_a_run_moves_by_itself_when_its_plan_is_for_other_speeds(world: World) -> None:
    wide = Description(tokens=False, blocks=(Block("linear"), Block("gelu"), Block("linear")), width=512)
    case = Case(wide, (64,), (1.0, 1.0))
    found = {mode: run_case(world, misjudged, case, mode) for mode in ("off", "advise", "on")}
    (losses, rows, said), (_, others_rows, _) = found["on"]
    assert rows == others_rows and rows[15][0][1] > 48, "nothing moves before a window is full"
    assert 16 < rows[20][0][1] < 48, said
    assert "host0/1 (rank 1) takes" in said and "moving to it" in said
    assert losses == pytest.approx(found["off"][0][0], rel=TOLERANCE)
    for mode, word in (("off", "predicted step time"), ("advise", "runtime.rebalance: on would move to it")):
        (_, rows, said), _ = found[mode]
        assert len(set(rows)) == 1 and word in said


def refused_move(*_: object) -> NoReturn:
    raise ConfigError("an optimizer that takes no parts")


Source = Literal["once", "again", "kept", "refused"]


def from_loader(rank: int, num_ranks: int, case: Case, source: Source) -> tuple[list[float], int, str]:
    """Trains as `misjudged`, from a loader whose batches are used once, again, or kept; or where no move can be made."""
    there = make_cluster((1.0, 8.0))
    made = captured_case(case)
    plan = decide(None, made.capture()[0], make_cluster((8.0, 1.0)), Config({"planning.search": "off"}))[0]
    config = {"planning.search": "off", "runtime.rebalance": "on", "runtime.rebalance_horizon": 1e9}
    engine = whale.parallelize(
        made.model, loss=made.loss, optimizer=partial(torch.optim.SGD, lr=1e-3), batch=made.batch, config=config, cluster=there, plan=plan
    )
    loader, num_rows, losses = engine.loader(Rows(case.batches[0]), global_batch_size=64), set(), list[float]()
    kept = next(iter(loader)) if source == "kept" else None
    if source == "refused":
        engine._checked = refused_move
    with contextlib.redirect_stderr(io.StringIO()) as said, equally_fast(engine, rank):
        for _ in range(24):
            for batch in loader:
                losses.append(float(engine.step(batch)))
                if source == "again":
                    engine.evaluate(batch)
            num_rows.add(engine.plan.replica_rows(64))
        if kept is not None:
            engine.evaluate(kept)
    engine.close()
    return losses, len(num_rows), said.getvalue()


def test_a_run_stays_while_a_batch_needs_its_plan(world: World) -> None:
    wide = Description(tokens=False, blocks=(Block("linear"), Block("gelu"), Block("linear")), width=512)
    case = Case(wide, (64,), (1.0, 1.0))
    losses, num_plans, said = run_case(world, from_loader, case, "once")[0]
    assert num_plans > 1, said
    words = {
        "again": "again after training on it",
        "kept": "holds another batch of engine.loader than the last one it trained on",
        "refused": "the plan stays, because the move failed",
    }
    for source, word in words.items():
        stayed, num_plans, said = run_case(world, from_loader, case, source)[0]
        assert num_plans == 1 and stayed == pytest.approx(losses, rel=TOLERANCE)
        assert "host0/1 (rank 1) takes" in said and word in said


def healthy(rank: int, num_ranks: int, case: Case, evaluates: bool) -> tuple[list[str], int, str]:
    """What is known of the devices after some steps, and what is said of slowdowns that are none."""
    engine = make_engine(case)
    assert not engine.health.devices
    for batch in case.batches:
        engine.step(batch)
        if evaluates:
            engine.evaluate(batch)
    health = engine.health
    with pytest.raises(ConfigError) as fault:
        engine.rebalance({"host0/7": 2.0})
    engine.close()
    assert all(each.busy_seconds > 0 and each.predicted_seconds > 0 for each in health.devices)
    return [str(each) for each in health.devices], health.num_steps, str(fault.value)


@pytest.mark.parametrize("evaluates", [False, True])
def test_every_rank_knows_the_health_of_all(world: World, evaluates: bool) -> None:
    first, *others = run_case(world, healthy, replace(FORTH_AND_BACK, config=(("pipeline.num_stages", 2),)), evaluates)
    assert all(other == first for other in others) and len(first[0]) == 2
    assert first[1] == len(FORTH_AND_BACK.rows) - 1 - 2, "the first two are left out, and the last was not told yet"
    assert "devices of the run, not host0/7: 2.0" in first[2]


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
