"""The law for replicas that are not alike: other numbers of stages, split degrees, schedules, micro-batches and rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note
from hypothesis import strategies as st

import whale
from tests.distributed.split_training import cut_anew, errors, plan_case
from tests.distributed.training import Case, make_engine, run_case, train_reference
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import Block, Description, descriptions
from whale.ir.plan import Plan
from whale.ir.serialization import from_json, to_json

TOLERANCE = 1e-10
CHAIN = (Block("feed_forward"), Block("attention"), Block("norm"), Block("linear", skip_from=1), Block("linear", tied_to=3), Block("gelu"))
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")
CLIPPED = (("gradient.clip_norm", 0.1), ("communication.bucket_bytes", 200))

Blocks = tuple[dict[str, Any], ...]


def unlike(*blocks: dict[str, Any], rows: tuple[int, ...] = (14, 13, 15), **more: Any) -> Case:
    """A case with these replicas, on as many ranks as they take."""
    num_ranks = sum(block.get("num_stages", 1) * block.get("split", 1) for block in blocks)
    config = (("replicas", list(blocks)), *more.pop("config", ()))
    return Case(TOKENS, rows, more.pop("speeds", (1.0, 2.0, 1.0, 3.0)[:num_ranks]), config, **more)


ONE, TWO, THREE = ({"num_stages": count, "num_micro_batch": count} for count in (1, 2, 3))
SPLIT = {"split": 2}

FIXED: dict[str, Case] = {
    "two stages and one": unlike(TWO, ONE, evaluates=True),
    "one stage and three, gpipe": unlike(ONE, THREE | {"schedule": "gpipe"}, config=CLIPPED),
    "three stages and one, zero bubble": unlike(THREE | {"schedule": "zb_h1"}, ONE, optimizer="adam", evaluates=True),
    "split and whole": unlike(SPLIT, ONE, ONE | {"num_micro_batch": 4}, config=CLIPPED),
    "two stages and split": unlike(TWO | {"num_micro_batch": 3, "rows": 2}, SPLIT | {"rows": 5}, evaluates=True, config=CLIPPED),
    "chunks and split": unlike({"num_stages": 2, "schedule": "zb_v", "num_micro_batch": 2}, SPLIT | {"num_micro_batch": 2}),
    "whole stages recompute": unlike({"num_stages": 2, "schedule": "recompute_early", "num_micro_batch": 2}, ONE),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_cases(world: World, name: str) -> None:
    case = FIXED[name]
    plan, _ = world.prepare(plan_case, case)
    assert len(set(plan.pipelines)) > 1 or len({stage.split for replica in plan.replicas for stage in replica.stages}) > 1
    error, where = errors(world, case, None)
    assert error < TOLERANCE, where


def with_order(plan: Plan, draw: st.DrawFn) -> Plan:
    """The plan with other schedules, micro-batches and shares by hand: what no planner has chosen.

    Where stages compute parts again, by none that computes whole stages again: a plan has one or the other.
    """
    replicas = []
    for replica in plan.replicas:
        again = () if any(stage.recomputed for stage in replica.stages) else ("recompute_early", "last_no_recompute")
        schedule = draw(st.sampled_from(("gpipe", "1f1b", "zb_h1", "zb_h2", *again)))
        pipeline = replace(replica.pipeline, schedule=schedule, num_micro_batch=draw(st.integers(1, 3)))
        replicas.append(replace(replica, share=draw(st.integers(1, 9)), pipeline=pipeline))
    return replace(plan, replicas=tuple(replicas))


@st.composite
def blocks(draw: st.DrawFn) -> Blocks:
    """Two or three unlike replicas on at most four ranks."""
    kinds = [(1, 1), (1, 2), (2, 1), (3, 1)]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=3).filter(lambda own: sum(a * b for a, b in own) <= 4))
    return tuple({"num_stages": stages, "split": split, "num_micro_batch": draw(st.integers(1, 3))} for stages, split in chosen)


@at_most(15, suppress_health_check=list(HealthCheck))
@given(blocks(), descriptions(), st.data())
def test_law_of_plans_by_hand(world: World, replicas: Blocks, description: Description, data: st.DataObject) -> None:
    config = CLIPPED if data.draw(st.booleans()) else ()
    seed = data.draw(st.integers(0, 99))
    case = replace(unlike(*replicas, config=config, seed=seed), description=replace(description, placement="none", copies=None))
    try:
        plan, graph = world.prepare(plan_case, case)
    except (whale.PlanError, whale.AnnotationError) as error:  # too few places to cut at, or nothing to split
        note(str(error))
        assume(False)
        raise
    plan = cut_anew(with_order(plan, data.draw), graph, case)
    note(str(plan))
    error, where = errors(world, case, from_json(Plan, to_json(plan)))
    assert error < TOLERANCE, where


@dataclass(frozen=True)
class Loaded:
    """The losses of the steps after a checkpoint, and how many replicas loaded it."""

    losses: list[float]
    num_stages: tuple[int, ...]


def save(rank: int, size: int, case: Case, folder: str) -> None:
    engine = make_engine(case)
    engine.step(case.batches[0])
    engine.save(Path(folder) / "checkpoint")
    engine.close()


def load(rank: int, size: int, case: Case, folder: str) -> Loaded:
    engine = make_engine(case)
    engine.load(Path(folder) / "checkpoint")
    losses = [float(engine.step(batch)) for batch in case.batches[1:]]
    engine.close()
    return Loaded(losses, tuple(pipeline.num_stages for pipeline in engine.plan.pipelines))


@pytest.mark.parametrize("order", [1, -1])
def test_a_checkpoint_goes_from_one_set_of_replicas_to_another(world: World, tmp_path: Path, order: int) -> None:
    first, then = [unlike(TWO, SPLIT, optimizer="adam"), unlike(ONE, THREE, optimizer="adam")][::order]
    run_case(world, save, first, str(tmp_path))
    expected = train_reference(then).losses[1:]
    for found in run_case(world, load, then, str(tmp_path)):
        assert found.num_stages == ((1, 3) if order == 1 else (2, 1))
        assert found.losses == pytest.approx(expected, abs=TOLERANCE)
