"""The law: loss, every gradient and the weights after several steps equal the reference, for any model, plan and schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

import whale
from tests import reference
from tests.distributed.training import (
    OPTIMIZERS,
    Case,
    errors,
    largest_of,
    make_cluster,
    run_case,
    train_rank,
    train_rank_and_plan,
    train_reference,
)
from tests.distributed.world import RankFailure, World
from tests.examples import at_most
from tests.models import Block, Description, Segment, build, descriptions
from whale.ir.division import intervals
from whale.ir.plan import Plan
from whale.runtime.state.gradient_sync import GradientSync

TOLERANCE = 1e-10


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random cases that have a plan: no fewer rows than a replica's devices need, and first no fewer than all micro-batches do."""
    num_ranks = draw(st.integers(1, 4))
    description = draw(descriptions(max_devices=num_ranks))
    num_micro_batch = draw(st.integers(1, 3))
    config: dict[str, Any] = {"pipeline.num_micro_batch": num_micro_batch, "pipeline.schedule": draw(st.sampled_from(("gpipe", "1f1b")))}
    if description.placement == "none" and draw(st.booleans()):
        config["pipeline.num_stages"] = draw(st.integers(1, min(num_ranks, 1 + len(description.blocks))))
    if draw(st.booleans()):
        config["gradient.clip_norm"] = 0.1
    if draw(st.booleans()):
        config["communication.bucket_bytes"] = 200
    least = max(2, num_ranks * num_micro_batch * 2)
    fewest = 1 if description.placement == "none" and "pipeline.num_stages" not in config else max(2, num_ranks * 2)
    rows = [draw(st.integers(least, least + 5)), *draw(st.lists(st.integers(fewest, least + 5), min_size=2, max_size=3))]
    speeds = draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 3.0)), min_size=num_ranks, max_size=num_ranks))
    return Case(
        description,
        tuple(rows),
        tuple(speeds),
        tuple(config.items()),
        optimizer=draw(st.sampled_from(("sgd", "adam"))),
        seed=draw(st.integers(0, 99)),
        evaluates=draw(st.integers(0, 3)) == 3,
        num_accumulated=draw(st.sampled_from((1, 1, 2))),
        decay=draw(st.sampled_from((None, None, 0.5))),
    )


@at_most(25, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_law(world: World, case: Case) -> None:
    note(f"{case!r}")
    error, where = errors(world, case)
    assert error < TOLERANCE, where


CHAIN = (Block("feed_forward"), Block("attention"), Block("norm"), Block("linear", skip_from=1), Block("linear", tied_to=3), Block("gelu"))
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")
TWO = (Segment(0), Segment(3))


def with_scopes(*segments: Segment) -> Description:
    return Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms", segments=segments, placement="construction")


FIXED: dict[str, Case] = {
    "one rank": Case(TOKENS, (8, 8), (1.0,)),
    "accumulation": Case(TOKENS, (8, 7), (1.0,), (("pipeline.num_micro_batch", 4),)),
    "data parallel": Case(TOKENS, (8, 8), (1.0, 1.0)),
    "uneven data parallel": Case(TOKENS, (8, 9, 5), (1.0, 3.0), (("pipeline.num_micro_batch", 2),)),
    "pipeline": Case(with_scopes(*TWO), (8, 8), (1.0, 1.0), (("pipeline.num_micro_batch", 4),)),
    "pipeline, gpipe": Case(with_scopes(*TWO), (8, 8), (1.0, 1.0), (("pipeline.num_micro_batch", 4), ("pipeline.schedule", "gpipe"))),
    "data parallel around": Case(with_scopes(*TWO), (8, 9), (1.0, 2.0, 1.0, 1.0), (("pipeline.num_micro_batch", 2),)),
    "data parallel inside": Case(with_scopes(Segment(0, 2), Segment(3, 1)), (8, 11), (1.0, 2.0, 1.0), (("pipeline.num_micro_batch", 2),)),
    "fewer rows than planned": Case(
        Description(tokens=False, blocks=(Block("linear"),), segments=(Segment(0, 2),), placement="construction"),
        (27, 24, 24),
        (1.0, 1.0, 1.0, 3.0),
        (("pipeline.num_micro_batch", 3),),
    ),
    "fewer rows than micro-batches": Case(with_scopes(*TWO), (8, 3, 1, 8), (1.0, 1.0), (("pipeline.num_micro_batch", 4),), evaluates=True),
    "fewer rows than micro-batches, interleaved": Case(
        TOKENS,
        (8, 3, 1, 2),
        (1.0, 1.0),
        (("pipeline.num_stages", 2), ("pipeline.schedule", "interleaved"), ("pipeline.num_chunks", 2), ("pipeline.num_micro_batch", 4)),
    ),
    "fewer rows than micro-batches, inside": Case(
        with_scopes(Segment(0, 2), Segment(3, 1)), (24, 5, 4, 24), (1.0, 2.0, 1.0), (("pipeline.num_micro_batch", 4),)
    ),
    "fewer rows than micro-batches, zero bubble": Case(
        with_scopes(*TWO), (8, 3, 1), (1.0, 1.0), (("pipeline.num_micro_batch", 4), ("pipeline.schedule", "zb_h1"))
    ),
    "fewer rows than micro-batches, accumulation": Case(TOKENS, (8, 3, 2, 8), (1.0, 2.0), (("pipeline.num_micro_batch", 4),)),
    "fewer rows than replicas": Case(
        TOKENS, (8, 1, 2, 8), (1.0, 3.0, 2.0), (("memory.zero", 2), ("gradient.clip_norm", 0.1), ("communication.bucket_bytes", 200))
    ),
    "fewer rows than replicas, zero bubble": Case(
        with_scopes(*TWO),
        (8, 1, 1, 8),
        (1.0, 2.0, 1.0, 1.0),
        (("pipeline.num_micro_batch", 2), ("pipeline.schedule", "zb_h1")),
        "adam",
        num_accumulated=2,
        decay=0.5,
    ),
    "automatic stages": Case(
        TOKENS, (8, 8), (1.0, 1.0, 1.0), (("pipeline.num_stages", 3), ("pipeline.num_micro_batch", 3)), evaluates=True
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_plans(world: World, name: str) -> None:
    error, where = errors(world, FIXED[name])
    assert error < TOLERANCE, where


def train_without_synchronisation(rank: int, num_ranks: int, case: Case) -> reference.Run:
    """The same run, except that ranks keep their own gradients."""

    def keep(self: GradientSync, bucket: Any) -> None:
        bucket.is_started = True

    with mock.patch.object(GradientSync, "_start", keep):
        return train_rank(rank, num_ranks, case)


def test_the_law_would_notice_gradients_that_are_not_summed(world: World) -> None:
    case = FIXED["uneven data parallel"]
    first = replace(case, rows=case.rows[:1])
    runs = run_case(world, train_without_synchronisation, first)
    assert largest_of(runs, train_reference(first))[0] > 1e-3
    with pytest.raises(RankFailure, match="weights differ between ranks"):  # the ranks themselves notice when it has been applied
        run_case(world, train_without_synchronisation, case)


def test_the_law_would_notice_another_seed(world: World) -> None:
    case = FIXED["pipeline"]
    runs = run_case(world, train_rank, case)
    assert largest_of(runs, train_reference(replace(case, seed=1)))[0] > 1e-3


NORMALISED = Description(
    tokens=False,
    blocks=(Block("linear"), Block("batch_norm"), Block("gelu"), Block("linear"), Block("batch_norm", skip_from=1)),
    loss="pair",
    segments=TWO,
)
WITH_STATISTICS: dict[str, Case] = {
    "accumulation": Case(NORMALISED, (8, 8), (1.0,), (("pipeline.num_micro_batch", 2),)),
    "uneven data parallel": Case(NORMALISED, (8, 8), (1.0, 3.0)),
    "pipeline": Case(replace(NORMALISED, placement="construction"), (8, 8), (1.0, 1.0), (("pipeline.num_micro_batch", 2),)),
    "data parallel around": Case(
        replace(NORMALISED, placement="forward"), (12, 12), (1.0, 2.0, 1.0, 1.0), (("pipeline.num_micro_batch", 2),)
    ),
}


def pieces_of(plan: Plan, num_rows: int) -> list[list[tuple[int, int]]]:
    """Per device of a replica's first stage, the rows of its micro-batches."""
    found = []
    for replica in plan.replicas:
        stage = replica.stages[0]
        micro_batches = plan.micro_batch_rows(replica.index, num_rows)
        parts = [intervals(stage.rows(stop - start), start) for start, stop in micro_batches]
        found += [[part[position] for part in parts] for position in range(len(stage.shares))]
    return found


@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_batch_normalisation_per_replica(world: World, name: str) -> None:
    """The reference runs the same micro-batches; running statistics are averaged by rows."""
    case = WITH_STATISTICS[name]
    results = run_case(world, train_rank_and_plan, case)
    plan = results[0][1]
    model, _, loss = build(case.description, case.seed)
    pieces = [pieces_of(plan, rows) for rows in case.rows]
    expected = reference.train_in_pieces(model, loss, case.batches, pieces, OPTIMIZERS[case.optimizer])
    error, where = largest_of([run for run, _ in results], expected)
    assert error < TOLERANCE, where


def mean_square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def synchronised(kind: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), kind(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def train_synchronised(rank: int, num_ranks: int, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    cluster, optimizer = make_cluster((1.0, 3.0)), partial(torch.optim.SGD, lr=0.1)
    config = {"planning.search": "off"}
    model = synchronised(torch.nn.SyncBatchNorm)
    engine = whale.parallelize(model, loss=mean_square, optimizer=optimizer, batch=batch, config=config, cluster=cluster)
    for _ in range(3):
        engine.step(batch)
    state = engine.state_dict()
    engine.close()
    assert state is not None and type(model[1]) is torch.nn.SyncBatchNorm
    return reference.copy_of(state)


def test_synchronised_batch_normalisation_is_over_the_rows_of_all_replicas(world: World) -> None:
    batch, model = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6) ** 2, synchronised(torch.nn.BatchNorm1d)
    reference.train(model, mean_square, [(batch,)] * 3, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    for state in world.run(train_synchronised, batch, num_ranks=2):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-9)
