"""A dry run counts what a real step holds: the same bytes at the same time, on ranks of all kinds of plans."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest

from tests.captures import at_hand
from tests.distributed.split_training import plan_case
from tests.distributed.test_state_law import with_state
from tests.distributed.training import Case, captured_case, make_engine, run_case
from tests.distributed.world import World
from tests.examples import further
from tests.models import Block, Description, Segment
from whale.api.mode import CapturedMode
from whale.config import Config
from whale.dry_run import BLOCK_BYTES, LiveBytes, dry_run
from whale.ir.plan import Plan
from whale.runtime.program.watch import Watch

BLOCKS = (Block("linear"), Block("attention"), Block("feed_forward"), Block("norm"), Block("attention"), Block("feed_forward"))
WIDTH, SEQUENCE, ROWS = 64, 32, 16


def of(*segments: Segment, copies: int | None = None) -> Description:
    placement = "construction"
    return Description(True, BLOCKS, WIDTH, SEQUENCE, segments=segments, placement=placement, copies=copies)


PIPELINE, PARALLEL, SPLIT = of(Segment(0), Segment(3)), of(Segment(0, 1)), of(Segment(0, 2, is_split=True))
NESTED = of(Segment(0, 2, is_split=True), Segment(3, 1))
SHORT, SMALL = (("pipeline.num_micro_batch", 4),), ("communication.bucket_bytes", 1 << 15)
TWICE = ("pipeline.num_micro_batch", 2)  # where each gathers all weights, which makes the dry run long
FROZEN = tuple(replace(block, frozen=number in (0, 1, 4)) for number, block in enumerate(BLOCKS))
LEAST_LOOKS, MOST_LOOKS = 3, 200
"""Gloo's thread lets go of a message a moment after the wait for it; where it gets no core, as late as in the next step. So the least of
some steps is what one holds before, and at its peak; more of them are looked at while that is not what the dry run says."""
CASES = {
    "pipeline": (PIPELINE, (1.0, 1.0), SHORT),
    "zero_bubble": (PIPELINE, (1.0, 1.0), (*SHORT, ("pipeline.schedule", "zb_h1"))),
    "recompute": (PIPELINE, (1.0, 1.0), (*SHORT, ("recompute.policy", "full"))),
    "data_parallel": (PARALLEL, (1.0, 3.0), ()),
    "split_again": (SPLIT, (1.0, 1.0), (("recompute.policy", "selective"),)),
    "uneven_split": (SPLIT, (1.0, 3.0), ()),
    "nested": (NESTED, (1.0, 1.0, 1.0), SHORT),
    "zero_2": (PARALLEL, (1.0, 3.0), SHORT),
    "zero_3": (replace(PARALLEL, blocks=FROZEN), (1.0, 3.0), (TWICE, SMALL)),
    "zero_3_again": (PIPELINE, (1.0, 1.0, 1.0, 1.0), (TWICE, SMALL, ("recompute.policy", "blocks"))),
    **dict(further([("split", (SPLIT, (1.0, 1.0), ())), ("zero_1", (PARALLEL, (1.0, 3.0), ()))])),
}


def memory_of_a_step(rank: int, num_ranks: int, case: Case, plan: Plan, wanted: Mapping[str, tuple[int, int]]) -> tuple[str, int, int, int]:
    """The device that a rank is, what it holds before its second step, how much may be unseen of that, and what a step needs beside it.

    Args:
        wanted: per device, what is held and what a step needs beside it, by the dry run.
    """
    first, second = case.batches
    live = LiveBytes(BLOCK_BYTES)
    with live, mock.patch.object(Watch, "resized", lambda _, tensor: live.measure(tensor)):
        engine = make_engine(case, plan)
        try:
            assert engine.rank is not None and engine.state.optimizer is not None
            engine.step(first)
            device, held, peak = plan.devices[engine.rank], sys.maxsize, sys.maxsize
            counts = BLOCK_BYTES * len(engine.state.optimizer.state)  # of Adam's steps: a real `torch.tensor` is not seen being made
            kept, more = wanted[device]
            for number in range(1, MOST_LOOKS + 1):
                engine.state.forget_gradients()
                held = min(held, live.start_anew())
                engine.step(second)
                peak = min(peak, live.peak)
                is_seen = held <= kept <= held + counts and 0 <= more - (peak - held) <= BLOCK_BYTES
                if number >= LEAST_LOOKS and all(engine.runtime.roster.world.gather_objects(is_seen)):
                    break
            return device, held, counts, peak - held
        finally:
            engine.close()


@pytest.mark.parametrize("name", CASES)
def test_a_real_step_holds_as_much(world: World, name: str) -> None:
    description, speeds, config = CASES[name]
    case = Case(description, (ROWS, ROWS), speeds, config, optimizer="adam")
    plan, graph = plan_case(case)
    if name.startswith("zero_") and name[5].isdigit():
        plan = with_state(plan, graph, int(name[5]), shares=tuple(range(1, 1 + len(speeds))))
    assert len(plan.devices) == len(speeds)
    made = captured_case(case)
    with at_hand():
        mode = CapturedMode(made.model, made.batch, made.loss, "train")
    dry = dry_run(plan, mode, Config(dict(config)))
    wanted = {device: (mine.held_bytes, mine.num_bytes - mine.held_bytes) for device, mine in dry.of.items()}
    real = {device: found for device, *found in run_case(world, memory_of_a_step, case, plan, wanted)}
    assert real.keys() == dry.of.keys()
    for device, (held, unseen, more) in real.items():
        mine = dry.of[device]
        assert held <= mine.held_bytes <= held + unseen
        assert 0 <= wanted[device][1] - more <= BLOCK_BYTES  # the numbers that ranks agree on, as little seen
