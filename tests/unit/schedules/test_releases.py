"""What a rank sent is let go only when its taker has it, and in steady state soon."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.schedules.test_builders import schedules
from whale.ir.schedule import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from whale.schedules import Edges, build, execute, insert_communication, releases

RECEIVED_AS = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}


def chain(schedule: Schedule) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]


@given(schedules(), st.data())
def test_taken_before_let_go_whatever_computations_last(schedule: Schedule, data: st.DataObject) -> None:
    pairs = [(source, target) for target in range(schedule.num_stages) for source in range(target)]
    skips = data.draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    edges = Edges.of(schedule, [*chain(schedule), *skips])
    talking = insert_communication(schedule, edges.pairs)
    times = st.lists(st.floats(0.1, 10), min_size=schedule.num_stages, max_size=schedule.num_stages)
    run = execute(talking, edges, durations={kind: data.draw(times) for kind in COMPUTE}, latency=data.draw(st.floats(0, 3)))
    ends = [dict(zip(actions, times, strict=True)) for actions, times in zip(talking.ranks, run.ends, strict=True)]
    for rank in range(schedule.num_ranks):
        seen: set[tuple[Action, int]] = set()
        for (receive, peer), sends in releases(talking, edges, rank).items():
            assert receive in ends[rank] and receive.kind in RECEIVES
            for send in sends:
                assert (send, peer) not in seen
                seen.add((send, peer))
                targets = [
                    there if send.kind is Kind.SEND_FORWARD else here
                    for here, there in edges.crossing()
                    if send.stage == (here if send.kind is Kind.SEND_FORWARD else there)
                ]
                for target in targets:
                    if schedule.stage_rank[target] == peer:
                        assert ends[peer][Action(RECEIVED_AS[send.kind], target, send.micro_batch)] <= ends[rank][receive]


def test_in_1f1b_no_more_is_held_than_is_on_its_way() -> None:
    schedule = build("1f1b", num_ranks=4, num_micro_batch=16)
    talking = insert_communication(schedule, chain(schedule))
    for rank, actions in enumerate(talking.ranks):
        done = releases(talking, Edges.of(talking, chain(schedule)), rank)
        held, most = Counter[bool](), 0
        for action in actions:
            if action.kind in SENDS:
                held[action.kind is Kind.SEND_FORWARD] += 1
            for peer in range(4):
                for send in done.get((action, peer), ()):
                    held[send.kind is Kind.SEND_FORWARD] -= 1
            most = max(most, held[True])
        assert most <= 4 - rank and held[False] <= 4 and held[True] == 0
