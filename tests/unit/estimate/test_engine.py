"""The event engine: tasks wait for what they need, transfers for both ends, and links are shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.estimate.events.engine import Task, Transfer, run
from whale.estimate.step.alike import Wire, classify


def test_a_message_starts_when_both_ends_are_ready() -> None:
    sender = [Task(1.0, sends=(0,))]
    receiver = [Task(3.0), Task(1.0, needs=(0,), posts=(0,))]
    found = run([sender, receiver], [Transfer(10.0, 0.5, 2, ((0, 1),))], [5.0])
    assert found.transfers == [(3.0, 5.5)]
    assert found.tasks[1] == [(0.0, 3.0), (5.5, 6.5)]


def test_a_receive_that_is_posted_ahead_hides_the_message() -> None:
    found = run([[Task(1.0, sends=(0,))], [Task(3.0, posts=(0,)), Task(1.0, needs=(0,))]], [Transfer(5.0, 0.5, 2, ((0, 1),))], [5.0])
    assert found.transfers == [(1.0, 2.5)] and found.tasks[1][1] == (3.0, 4.0)


def test_two_messages_share_a_link_fairly() -> None:
    """The second starts when half of the first has passed: both get half until the first is done."""
    workers = [[Task(1.0, sends=(0,)), Task(1.0, sends=(1,))], [Task(0.0, posts=(0, 1)), Task(0.0, needs=(0, 1))]]
    found = run(workers, [Transfer(10.0, 0.0, 2, ((0, 1),)), Transfer(10.0, 0.0, 2, ((0, 1),))], [5.0])
    assert found.transfers[0] == (1.0, pytest.approx(4.0)) and found.transfers[1] == (2.0, pytest.approx(5.0))


def test_equal_transfers_that_are_run_once_count_as_many() -> None:
    found = run([[Task(1.0, sends=(0,))], [Task(0.0, posts=(0,))]], [Transfer(10.0, 0.0, 2, ((0, 4),))], [5.0])
    assert found.transfers[0] == (1.0, pytest.approx(9.0))


def test_collectives_of_one_queue_follow_one_another() -> None:
    sums = [Transfer(5.0, 1.0, 2, ((0, 1),), queue=0), Transfer(5.0, 0.0, 2, ((0, 1),), queue=0)]
    found = run([[Task(4.0, joins=((0, 0.5), (1, 0.75)))], [Task(3.0, joins=((0, 1.0), (1, 1.0)))]], sums, [5.0])
    assert found.transfers == [(3.0, 5.0), (5.0, 6.0)]


def test_a_task_goes_on_when_what_it_needs_in_its_midst_is_there() -> None:
    workers = [[Task(4.0, posts=(0, 1), awaits=((0, 0.25), (1, 0.5))), Task(1.0)], [Task(2.0, sends=(0,)), Task(4.0, sends=(1,))]]
    found = run(workers, [Transfer(5.0, 0.0, 2, ((0, 1),)), Transfer(5.0, 0.0, 2, ((0, 1),))], [5.0])
    assert found.paused == ([(1.0, 3.0), (4.0, 7.0)], []) and found.tasks[0] == [(0.0, 9.0), (9.0, 10.0)]


def test_what_can_never_go_on_is_told() -> None:
    found = run([[Task(1.0, needs=(0,))]], [Transfer(1.0, 0.0, 1)], [])
    assert [(stuck.worker, stuck.task, stuck.transfer) for stuck in found.stuck] == [(0, 0, 0)]
    found = run([[Task(1.0), Task(1.0, awaits=((0, 0.5),))]], [Transfer(1.0, 0.0, 1)], [])
    assert [(stuck.worker, stuck.task, stuck.transfer) for stuck in found.stuck] == [(0, 1, 0)]


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(1, 100)), min_size=1, max_size=6))
def test_a_link_carries_no_more_than_it_can(messages: list[tuple[float, float]]) -> None:
    workers = [[Task(ready, sends=(number,))] for number, (ready, _) in enumerate(messages)]
    found = run(workers, [Transfer(num_bytes, 0.0, 1, ((0, 1),)) for _, num_bytes in messages], [7.0])
    last = max(end for _, end in found.transfers)
    assert last >= min(ready for ready, _ in messages) + sum(num_bytes for _, num_bytes in messages) / 7.0 - 1e-9
    assert all(end - start >= num_bytes / 7.0 - 1e-9 for (start, end), (_, num_bytes) in zip(found.transfers, messages, strict=True))


def test_replicas_that_do_the_same_are_alike_until_something_differs() -> None:
    wires = [Wire("message", (replica, 4 + replica), ((0,), (1,)), ((0, 1.0),)) for replica in range(4)]
    found = classify(["first"] * 4 + ["last"] * 4, ["card"], wires)
    assert found.workers == (0,) * 4 + (1,) * 4 and found.wires == (0,) * 4
    odd = [*wires[:3], Wire("longer message", (3, 7), ((0,), (1,)), ((0, 1.0),))]
    assert classify(["first"] * 4 + ["last"] * 4, ["card"], odd).workers == (0, 0, 0, 1, 2, 2, 2, 3)


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_and_a_wire_whose_colours_change_places_are_not_alike(first: int) -> None:
    wires = [Wire(f"message {number}", (party,), (("sends",),), ()) for number, party in enumerate((1 - first, first))]
    found = classify(["first", "last"], [], wires)
    assert found.workers == (0, 1) and found.wires == (0, 1), "and it comes to an end"
