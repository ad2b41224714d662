"""Split stages whose halves take turns: loss, gradients and weights equal the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed import test_split_hugging_face
from tests.distributed.split_training import errors, plan_case
from tests.distributed.training import Case
from tests.distributed.world import World
from tests.models import Block, Description, Segment
from whale.axes import discover
from whale.axes.batch import halve_stage
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, program_of

TOLERANCE = 1e-10


def overlapped(plan: Plan, graph: ModelGraph) -> Plan:
    """The plan with every split stage in two halves where that can be."""
    axes = discover(graph)
    replicas = []
    for replica in plan.replicas:
        stages = tuple(
            replace(stage, program=program_of(stage.ops, in_halves=True))
            if stage.shards and not stage.recomputed and not halve_stage(graph, axes, replica.edges, stage).faults
            else stage
            for stage in replica.stages
        )
        replicas.append(replace(replica, stages=stages))
    return replace(plan, replicas=tuple(replicas))


CHAIN = (Block("feed_forward"), Block("attention"), Block("norm"), Block("linear", skip_from=1), Block("linear", tied_to=3), Block("gelu"))


def described(*segments: Segment, copies: int | None = None) -> Description:
    return Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms", segments=segments, placement="construction", copies=copies)


ALONE = described(Segment(0, 2, is_split=True))
HEAD = (Segment(0, 1), Segment(3, 2, is_split=True))
BOTH = (Segment(0, 2, is_split=True), Segment(3, 2, is_split=True))
MICRO = ("pipeline.num_micro_batch", 3)
CASES: dict[str, Case] = {
    "alone": Case(ALONE, (4, 5, 3), (1.0, 3.0), evaluates=True),
    "over three": Case(described(Segment(0, 3, is_split=True)), (5, 2, 4), (1.0, 2.0, 1.0)),
    "rows that do not halve": Case(ALONE, (3, 3, 4), (1.0, 1.0), (MICRO,)),
    "last stage": Case(described(*HEAD), (8, 7), (1.0, 2.0, 1.0), (MICRO,)),
    "weights apart": Case(described(*BOTH), (8, 9), (1.0, 2.0, 1.0, 3.0), (MICRO, ("pipeline.schedule", "zb_h1"))),
}


@pytest.mark.parametrize("name", CASES)
def test_law(world: World, name: str) -> None:
    plan, graph = world.prepare(plan_case, CASES[name])
    halved = overlapped(plan, graph)
    assert any(stage.overlap for stage in halved.replicas[0].stages)
    error, where = errors(world, CASES[name], halved)
    assert error < TOLERANCE, where


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_law_of_hugging_face(world: World, family: str) -> None:
    case = test_split_hugging_face.Case(family, (2,), ((1.0, 3.0),), (("communication.overlap", True),))
    test_split_hugging_face.check(world, case, "uneven")
