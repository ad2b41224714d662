"""The law: loss, every gradient and the weights after several steps equal the reference, for any model, plan and schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.distributed.training import Case, errors
from tests.distributed.world import World
from tests.models import Block, Description, Segment, descriptions

TOLERANCE = 1e-10


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random cases that have a plan: no fewer rows than the devices and micro-batches need."""
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
    rows = draw(st.lists(st.integers(least, least + 5), min_size=3, max_size=3))
    speeds = draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 3.0)), min_size=num_ranks, max_size=num_ranks))
    return Case(
        description, tuple(rows), tuple(speeds), tuple(config.items()), draw(st.sampled_from(("sgd", "adam"))), draw(st.integers(0, 99))
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
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
    "automatic stages": Case(TOKENS, (8, 8), (1.0, 1.0, 1.0), (("pipeline.num_stages", 3), ("pipeline.num_micro_batch", 3))),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_plans(world: World, name: str) -> None:
    error, where = errors(world, FIXED[name])
    assert error < TOLERANCE, where
