"""The law with split scopes: random models, cuts, sizes, nestings, schedules and recomputation equal the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note
from hypothesis import strategies as st

import whale
from tests import reference
from tests.distributed.split_training import cut_anew, errors, plan_case, train_rank
from tests.distributed.training import Case, largest_of, run_case, train_reference
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import Block, Description, Segment, descriptions
from whale.ir.plan import Plan
from whale.runtime.program.shard import Group, communication
from whale.runtime.program.shard.collectives import ready

TOLERANCE = 1e-10
ORDERS = (
    ("1f1b", "none"),
    ("gpipe", "none"),
    ("zb_h1", "none"),
    ("aiao", "selective"),
    ("1f1b", "full"),
    ("zb_h1", "auto"),
    ("recompute_early", "none"),
)
"""Schedules, and what is recomputed."""


@st.composite
def split_descriptions(draw: st.DrawFn, num_ranks: int, colocated: bool) -> Description:
    """Random models of which at least one segment is split over two devices or more."""
    description = draw(descriptions())
    num_segments = 1 if num_ranks < 3 and not colocated else draw(st.integers(1, min(2, len(description.blocks))))
    starts = [0, *([draw(st.integers(1, len(description.blocks) - 1))] if num_segments == 2 else [])]
    split_at = draw(st.integers(0, num_segments - 1))
    spare = num_ranks - 2 - (0 if colocated else num_segments - 1)
    segments = []
    for number, start in enumerate(starts):
        extra = draw(st.integers(0, max(0, spare)))
        width = (2 if number == split_at else 1) + extra
        is_split = number == split_at or (width > 1 and draw(st.booleans()))
        spare -= 0 if colocated else extra
        segments.append(Segment(start, width, is_split=is_split))
    used = max(segment.device_count or 1 for segment in segments) if colocated else sum(segment.device_count or 1 for segment in segments)
    copies = draw(st.none() | st.integers(1, num_ranks // used)) if not colocated else None
    placement = draw(st.sampled_from(("construction", "forward")))
    return replace(description, segments=tuple(segments), copies=copies, placement=placement)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random cases with split scopes and rows enough for their devices and micro-batches."""
    num_ranks = draw(st.integers(2, 4))
    colocated = draw(st.integers(0, 3)) == 3
    description = draw(split_descriptions(num_ranks, colocated))
    num_micro_batch = draw(st.integers(1, 3))
    schedule, policy = draw(st.sampled_from(ORDERS))
    config: dict[str, Any] = {"pipeline.num_micro_batch": num_micro_batch, "pipeline.schedule": schedule, "recompute.policy": policy}
    if colocated:
        config["cluster.colocate_split_and_replicate"] = True
    if draw(st.booleans()):
        config["gradient.clip_norm"] = 0.1
    if draw(st.booleans()):
        config["communication.bucket_bytes"] = 200
    if draw(st.booleans()):
        config["communication.overlap"] = True
    least = max(2, num_ranks * num_micro_batch)
    return Case(
        description,
        tuple(draw(st.lists(st.integers(least, least + 5), min_size=3, max_size=3))),
        tuple(draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 3.0)), min_size=num_ranks, max_size=num_ranks))),
        tuple(config.items()),
        optimizer=draw(st.sampled_from(("sgd", "adam"))),
        seed=draw(st.integers(0, 999)),
        evaluates=draw(st.integers(0, 3)) == 3,
        num_accumulated=draw(st.sampled_from((1, 1, 3))),
        decay=draw(st.sampled_from((None, None, 0.5))),
    )


@at_most(25, suppress_health_check=list(HealthCheck))
@given(case=cases(), shards=st.sampled_from(("planned", "axes", "bridged")))
def test_law(world: World, case: Case, shards: str) -> None:
    note(f"{case!r}")
    try:
        plan, graph = world.prepare(plan_case, case)
    except (whale.PlanError, whale.AnnotationError) as error:  # nothing in a scope can be cut in so many parts
        note(str(error))
        assume(False)
        raise
    plan = plan if shards == "planned" else cut_anew(plan, graph, case, bridged=shards == "bridged")
    note(str(plan))
    error, where = errors(world, case, plan)
    assert error < TOLERANCE, where


CHAIN = (Block("feed_forward"), Block("attention"), Block("norm"), Block("linear", skip_from=1), Block("linear", tied_to=3), Block("gelu"))


def described(*segments: Segment, copies: int | None = None) -> Description:
    return Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms", segments=segments, placement="construction", copies=copies)


ALONE = described(Segment(0, 2, is_split=True))
HEAD = (Segment(0, 1), Segment(3, 2, is_split=True))
BOTH = (Segment(0, 2, is_split=True), Segment(3, 2, is_split=True))
COLOCATED = ("cluster.colocate_split_and_replicate", True)
FIXED: dict[str, Case] = {
    "alone": Case(ALONE, (4, 5, 3), (1.0, 3.0), evaluates=True),
    "over four": Case(described(Segment(0, 4, is_split=True)), (8, 7), (1.0, 2.0, 1.0, 1.0)),
    "with a replica around": Case(ALONE, (8, 9), (1.0, 1.0, 3.0, 1.0), (("pipeline.num_micro_batch", 2),)),
    "in replicate": Case(described(Segment(0, 2, is_split=True), copies=2), (8, 9), (1.0, 1.0, 3.0, 1.0)),
    "last stage": Case(described(*HEAD), (8, 7), (1.0, 2.0, 1.0), (("pipeline.num_micro_batch", 3),)),
    "both stages": Case(described(*BOTH), (8, 9), (1.0, 2.0, 1.0, 3.0), (("pipeline.num_micro_batch", 3), ("pipeline.schedule", "zb_h1"))),
    "beside copies": Case(described(Segment(0, 2), Segment(3, 2, is_split=True)), (8, 9), (1.0, 2.0), (COLOCATED,)),
    "recomputed": Case(ALONE, (8, 9), (1.0, 2.0), (("pipeline.num_micro_batch", 2), ("recompute.policy", "full"))),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_plans(world: World, name: str) -> None:
    error, where = errors(world, FIXED[name], None)
    assert error < TOLERANCE, where


def train_without_entering(rank: int, num_ranks: int, case: Case, plan: Plan | None, expected: Mapping[str, torch.Tensor]) -> reference.Run:
    """The same run, except that gradients of whole values that are read by parts stay each device's own."""

    def without_sum(group: Group, what: str) -> communication._Move:
        return communication._Move(lambda value: ready(value.detach()), ready)

    with mock.patch.object(communication, "_enter", without_sum):
        return train_rank(rank, num_ranks, case, plan, expected)


@pytest.mark.parametrize("name", ["alone", "both stages"])
def test_the_law_would_notice_an_entrance_without_its_sum(world: World, name: str) -> None:
    """The negative control, in one step: before the next the ranks themselves notice."""
    case = replace(FIXED[name], rows=FIXED[name].rows[:1])
    expected = train_reference(case)
    runs = run_case(world, train_without_entering, case, None, expected.gradients)
    assert largest_of(runs, expected)[0] > 1e-3
