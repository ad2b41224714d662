"""One order of launches on all ranks: free of deadlock even where each launch waits for its other end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedules.test_builders import schedules
from whale.ir.schedule import COMPUTE, LAUNCHES, POSTS, RECEIVES, Action, Kind, Schedule, format_actions
from whale.schedules import BUILDERS, build, forward_only, insert_communication, replay, verify


def chain(schedule: Schedule) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]


def posted_two_computations_ahead(schedule: Schedule) -> Schedule:
    """The same with each POST as early as a rank would have it that looks at its own actions alone: before the sends there."""
    return replace(schedule, ranks=tuple(tuple(_ahead(actions)) for actions in schedule.ranks))


def _ahead(actions: Sequence[Action]) -> Iterator[Action]:
    posts = [action for action in actions if action.kind in POSTS]
    rest = [action for action in actions if action.kind not in POSTS]
    for position, action in enumerate(rest):
        due, computations = set(), 0
        for later in rest[position:]:
            computations += later.kind in COMPUTE
            if computations == 2:
                break
            if later.kind in RECEIVES:
                due.add((later.kind is Kind.RECV_FORWARD, later.micro_batch))
        if action.kind not in COMPUTE:
            for post in [post for post in posts if (post.kind is Kind.POST_FORWARD, post.micro_batch) in due]:
                posts.remove(post)
                yield post
        yield action


@pytest.mark.parametrize(("name", "num_ranks", "num_chunks"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("zb_h1", 2, 1), ("zb_h1", 4, 1)])
def test_receives_posted_before_the_sends_deadlock(name: str, num_ranks: int, num_chunks: int) -> None:
    schedule = build(name, num_ranks=num_ranks, num_micro_batch=8, num_chunks=num_chunks)
    talking = insert_communication(schedule, chain(schedule))
    assert not replay(talking)
    blocked = replay(posted_two_computations_ahead(talking))
    assert {fault.rank for fault in blocked} == set(range(num_ranks))


def test_interleaved_receives_posted_before_the_sends_deadlock() -> None:
    schedule = build("interleaved", num_ranks=2, num_micro_batch=4, num_chunks=2)
    talking = insert_communication(schedule, chain(schedule))
    assert not replay(talking) and replay(posted_two_computations_ahead(talking))


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_schedule_has_one_order(name: str) -> None:
    for num_ranks in range(1, 6):
        for num_micro_batch in (1, 2, 3, num_ranks, 2 * num_ranks, 11):
            schedule = build(name, num_ranks=num_ranks, num_micro_batch=num_micro_batch, num_chunks=BUILDERS[name].chunks or 2)
            assert not replay(insert_communication(schedule, chain(schedule)))


@given(schedules(), st.data())
def test_any_edges_have_one_order(schedule: Schedule, data: st.DataObject) -> None:
    stages = range(schedule.num_stages)
    pairs = [(source, target) for source in stages for target in stages if source < target]
    edges = sorted({*chain(schedule), *(data.draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else [])})
    assert not replay(insert_communication(schedule, edges))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 5))
def test_forwards_have_one_order(stage_rank: list[int], num_micro_batch: int) -> None:
    edges = [(source, target) for source in range(len(stage_rank)) for target in range(source + 1, len(stage_rank))]
    assert not replay(insert_communication(forward_only(3, num_micro_batch, stage_rank), edges))


@given(schedules(), st.booleans())
def test_launches_of_two_ranks_come_in_one_order_at_both(schedule: Schedule, early: bool) -> None:
    """What makes one communicator per pair of ranks, or per direction, enough."""
    talking = insert_communication(schedule, chain(schedule), early=early)
    verify(talking, chain(schedule))
    seen = [[_message(action) for action in actions if action.kind in LAUNCHES] for actions in talking.ranks]
    for first, mine in enumerate(seen):
        for theirs in seen[:first]:
            shared = set(mine) & set(theirs)
            assert [launch for launch in mine if launch in shared] == [launch for launch in theirs if launch in shared]


def _message(action: Action) -> tuple[bool, int | None, int | None, bool]:
    forward = action.kind in (Kind.SEND_FORWARD, Kind.POST_FORWARD)
    return forward, action.stage, action.micro_batch, action.kind is Kind.SYNC


@given(schedules())
def test_posts_stand_before_the_computation_in_front_or_where_the_order_wants_them(schedule: Schedule) -> None:
    """Messages travel while their receiver computes: only a launch that comes first in the order may stand between."""
    for actions in insert_communication(schedule, chain(schedule)).ranks:
        for position, action in enumerate(actions):
            if action.kind not in POSTS:
                continue
            before = [other for other in actions[:position] if other.kind in COMPUTE or other.kind in LAUNCHES - POSTS]
            computations = 0
            for later in actions[position:]:
                if later.kind in RECEIVES and later.micro_batch == action.micro_batch:
                    break
                computations += later.kind in COMPUTE
            assert computations >= 1 or not before or before[-1].kind in LAUNCHES


@given(schedules())
def test_late_posts_stand_right_before_their_receive_or_where_the_order_wants_them(schedule: Schedule) -> None:
    for actions in insert_communication(schedule, chain(schedule), early=False).ranks:
        for position, action in enumerate(actions):
            after = actions[position:] if action.kind in POSTS else ()
            until = next((other for other in after if other.kind not in POSTS), None)
            assert until is None or until.kind in RECEIVES or until.kind in LAUNCHES


def test_where_posts_stand() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batch=2)
    early, late = (format_actions(insert_communication(schedule, chain(schedule), early=early).ranks[1]) for early in (True, False))
    assert early == "0POST_F0 1RECV_F0 1F0 0POST_F1 1B0 1SEND_B0 1RECV_F1 1F1 LOSS 1B1 1SYNC 1SEND_B1 STEP"
    assert late == "0POST_F0 1RECV_F0 1F0 1B0 0POST_F1 1SEND_B0 1RECV_F1 1F1 LOSS 1B1 1SYNC 1SEND_B1 STEP"


def test_verify_names_both_ends() -> None:
    schedule = build("1f1b", num_ranks=2, num_micro_batch=4)
    late = posted_two_computations_ahead(insert_communication(schedule, chain(schedule)))
    with pytest.raises(Exception, match=r"1POST_B0 \(action \d+ of rank 0\) waits for rank 1, which stays at 0POST_F0"):
        verify(late)
