"""The law where samples are mixed: replicas with one micro-batch give each other the rows that they need, whatever their shares.

Loss, gradients, weights, running statistics, evaluation and output equal those of the unmodified model on one device.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.training import largest_of, make_cluster
from tests.distributed.world import World
from tests.examples import at_most
from tests.mixing import LOSSES, MIDDLES, Batch, Layers, make_batch
from whale.ir.plan import BATCH, Plan

torch.set_num_threads(1)

TOLERANCE = 1e-9
OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model, its loss and the devices it is trained on, in one or two stages."""

    middle: str
    loss: str = "mean"
    speeds: tuple[float, ...] = (1.0, 2.0)
    rows: tuple[int, ...] = (10, 7)
    num_stages: int = 1
    normalised: bool = False
    num_micro_batch: int = 1
    momentum: float | None = 0.1

    @property
    def batches(self) -> list[Batch]:
        return [make_batch(rows, step) for step, rows in enumerate(self.rows)]


@dataclass(frozen=True)
class Outcome:
    """What one rank found: the run, the plan and what was said."""

    run: reference.Run
    plan: Plan
    said: tuple[str, ...]


def build(middle: str, loss: str, normalised: bool, momentum: float | None, rows: int) -> tuple[Layers, Batch, Any]:
    return Layers(middle, normalised=normalised, momentum=momentum), make_batch(rows), LOSSES[loss]


def captured_case(case: Case) -> Captured:
    """The model of a case, captured in all modes."""
    made = captured_once(build, case.middle, case.loss, case.normalised, case.momentum, case.rows[0])
    for mode in ("eval", "predict"):
        made.capture(mode)
    return made


def _prepare(case: Case) -> None:
    captured_case(case)


def run_ranks(world: World, case: Case) -> list[Outcome]:
    world.prepare(_prepare, case)
    outcomes: list[Outcome] = world.run(train_rank, case, num_ranks=len(case.speeds))
    return outcomes


def train_rank(rank: int, num_ranks: int, case: Case) -> Outcome:
    made = captured_case(case)
    settings = {"pipeline.num_stages": case.num_stages, "pipeline.num_micro_batch": case.num_micro_batch}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = whale.parallelize(
            made.model, loss=made.loss, optimizer=OPTIMIZER, batch=made.batch, config=settings, cluster=make_cluster(case.speeds)
        )
    try:
        losses, gradients = [float(engine.step(case.batches[0]))], reference.copy_of(engine.gradients())
        losses += [float(engine.step(batch)) for batch in case.batches[1:]]
        state = engine.state_dict()
        assert state is not None
        evaluation, output = float(engine.evaluate(case.batches[0])), engine.predict(case.batches[0])
        run = reference.Run(losses, gradients, reference.copy_of(state), evaluation=evaluation, prediction=reference.tensors_of(output))
        return Outcome(run, engine.plan, tuple(str(each.message) for each in caught if "the batch" in str(each.message)))
    finally:
        engine.close()


def train_reference(case: Case) -> reference.Run:
    model, _, loss = build(case.middle, case.loss, case.normalised, case.momentum, case.rows[0])
    run = reference.train(model, loss, case.batches, OPTIMIZER)
    evaluation, prediction = reference.evaluate(model, loss, case.batches[0])
    return replace(run, evaluation=evaluation, prediction=prediction)


def check(world: World, case: Case) -> list[Outcome]:
    outcomes = run_ranks(world, case)
    error, where = largest_of([outcome.run for outcome in outcomes], train_reference(case))
    assert error < TOLERANCE, where
    assert not any(outcome.said for outcome in outcomes)
    return outcomes


CASES = {
    "contrastive, uneven": Case("nothing", "contrastive"),
    "two views, three devices": Case("nothing", "two views", (1.0, 3.0, 2.0), (11, 12)),
    "dice": Case("nothing", "dice"),
    "root": Case("nothing", "root"),
    "hardest rows": Case("nothing", "hardest"),
    "softmax over rows": Case("softmax", "covariance"),
    "attention over rows": Case("attention"),
    "places": Case("places", "places"),
    "batch normalisation": Case("nothing", "mean", normalised=True, speeds=(1.0, 2.0, 1.0)),
    "batch normalisation, a root": Case("nothing", "root", normalised=True),
    "statistics over all batches": Case("nothing", "mean", (1.0, 2.0), (10, 7, 9), normalised=True, momentum=None),
    "two stages, statistics over all batches": Case("nothing", "mean", (1.0,) * 4, num_stages=2, normalised=True, momentum=None),
    "experts, statistics": Case("experts", "chosen", normalised=True),
    "halves of two views": Case("halves", rows=(12, 6), normalised=True),
    "two stages": Case("nothing", "contrastive", (1.0, 1.0, 1.0, 1.0), num_stages=2),
    "two stages, statistics": Case("sort", "dice", (1.0, 1.0, 1.0, 1.0), num_stages=2, normalised=True),
}


@pytest.mark.parametrize("name", CASES)
def test_mixed_samples_are_exact(world: World, name: str) -> None:
    (replica,) = check(world, CASES[name])[0].plan.replicas
    assert [[shard.axis for shard in stage.shards] for stage in replica.stages] == [[BATCH]] * CASES[name].num_stages


@pytest.mark.slow
@at_most(25, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Case,
        st.sampled_from(sorted(MIDDLES)),
        st.sampled_from(sorted(LOSSES)),
        st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3).map(tuple),
        st.lists(st.integers(6, 14), min_size=1, max_size=2).map(tuple),
        normalised=st.booleans(),
        momentum=st.sampled_from([0.1, None]),
    )
)
def test_any_model_and_loss(world: World, case: Case) -> None:
    note(f"{case!r}")
    check(world, case)


def train_or_refuse(rank: int, num_ranks: int, case: Case) -> Outcome | str:
    try:
        return train_rank(rank, num_ranks, case)
    except whale.WhaleError as error:
        return f"{type(error).__name__}: {error}"


@at_most(30, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Case,
        st.sampled_from(sorted(MIDDLES)),
        st.sampled_from(sorted(LOSSES)),
        st.sampled_from([(1.0, 1.0), (1.0, 3.0)]),
        st.lists(st.integers(6, 14), min_size=3, max_size=3).map(tuple),
        num_stages=st.integers(1, 2),
        normalised=st.booleans(),
        momentum=st.sampled_from([0.1, None]),
        num_micro_batch=st.integers(1, 3),
    )
)
def test_any_row_counts_are_exact_or_something_is_said(world: World, case: Case) -> None:
    """Ragged batches, replicas of unlike shares, stages, micro-batches: nothing differs in silence, and no rank waits for another."""
    note(f"{case!r}")
    world.prepare(_prepare, case)
    outcomes: list[Outcome | str] = world.run(train_or_refuse, case, num_ranks=2)
    runs = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    assert len(runs) in (0, 2), "refused on all ranks, or on none"
    if runs and not any(outcome.said for outcome in runs):
        error, where = largest_of([outcome.run for outcome in runs], train_reference(case))
        assert error < TOLERANCE, where


@pytest.mark.parametrize("middle", ["experts", "masked experts", "elements"])
def test_rows_that_a_mask_selects_are_exact_in_pieces(world: World, middle: str) -> None:
    outcomes = check(world, Case(middle, "chosen", num_micro_batch=2))
    assert len(outcomes[0].plan.replicas) == 2


@pytest.mark.parametrize("middle", ["sum of chosen", "softmax of chosen"])
def test_selected_rows_that_mix_are_said_to_differ(world: World, middle: str) -> None:
    first, *_ = run_ranks(world, Case(middle, num_micro_batch=2))
    assert len(first.said) == 1 and "the numbers are not those of one device" in first.said[0] and "tests/mixing.py" in first.said[0]


def test_micro_batches_are_said_to_differ(world: World) -> None:
    first, *others = run_ranks(world, Case("softmax", num_micro_batch=2))
    assert len(first.said) == 1 and "2 replicas of 2 micro-batches" in first.said[0] and "tests/mixing.py" in first.said[0]
    assert len(first.plan.replicas) == 2 and not any(other.said for other in others)
