"""What ranks saw, put together: one time for all, messages from both their ends, devices by the plan's names."""

from __future__ import annotations

import torch

from whale.comm import Channel, Clock
from whale.ir.schedule import Action
from whale.ir.timeline import Message
from whale.runtime.recording.recorder import Leg, RankStep, Recorder, put_together


def seen(rank: int, start: float, sends: tuple[Leg, ...] = (), receives: tuple[Leg, ...] = (), error: float = 0.0) -> RankStep:
    recorder = Recorder(rank, torch.device("cpu"))
    recorder.start(Clock(start, error))
    recorder.begin(Action.parse("0F0"))
    recorder.end()
    found = recorder.stop()
    return RankStep(rank, found.spans, sends, receives, (), (), (), ((start, 5.0),), error)


def test_a_message_begins_when_both_its_ends_are_ready() -> None:
    early, late = Leg("0 -> 1 F0", 7, 3, 64, 10.0, 10.0), Leg("0 -> 1 F1", 7, 3, 64, 14.0, 14.0)
    posts = Leg("0 -> 1 F0", 7, 3, 64, 11.0, 13.0), Leg("0 -> 1 F1", 7, 3, 64, 11.0, 15.0)
    ranks = [seen(7, 0.0, sends=(early, late)), seen(3, 0.0, receives=posts, error=2e-6), seen(5, 0.0)]
    step = put_together(4, 16, ranks, {7: "a", 3: "b"})
    zero = ranks[0].spans[0].start
    assert [each.device for each in step.devices] == ["a", "b"], "rank 5 is idle"
    wanted = (Message("0 -> 1 F0", "a", "b", 64, 11.0 - zero, 13.0 - zero), Message("0 -> 1 F1", "a", "b", 64, 14.0 - zero, 15.0 - zero))
    assert step.devices[0].messages == step.devices[1].messages == wanted
    assert (step.step_number, step.num_rows, step.clock_error) == (4, 16, 2e-6)
    assert step.devices[0].actions[0].start == 0.0 and step.devices[1].memory == ((0.0 - zero, 5.0),)


def test_a_recorder_takes_notice_between_start_and_stop_only() -> None:
    recorder = Recorder(0, torch.device("cpu"))
    place, wire = ("forward", 0, 0), torch.zeros(4)

    def step() -> None:
        recorder.begin(Action.parse("0F0"))
        with recorder.segment("linear .. gelu"), recorder.waiting("gradients"):
            pass
        recorder.end()
        recorder.end()
        recorder.posted(place, ("forward", 1, 0), Channel(0, 1), wire)
        recorder.posted(place, ("forward", 1, 0), Channel(0, 1), wire)
        recorder.arrived(place, ("forward", 1, 0), Channel(0, 1))
        recorder.summed(0)

    step()
    recorder.start(Clock(100.0))
    step()
    found = recorder.stop()
    step()
    assert [str(span.action) for span in found.spans] == ["0F0"]
    (leg,) = found.receives
    assert (leg.name, leg.num_bytes) == ("0 -> 1 F0", 32), "two tensors, one message"
    (segment,), (wait,) = found.segments, found.waits
    assert found.spans[0].start <= segment.start <= wait.start <= wait.end <= segment.end <= found.spans[0].end <= leg.start <= leg.end
    assert found.memory == () and found.syncs == ()


def test_what_ends_early_is_recorded_to_its_end() -> None:
    """torch's recomputation ends by an exception once it has all that it needs."""
    recorder = Recorder(0, torch.device("cpu"))
    recorder.start(Clock())
    try:
        with recorder.segment("a .. b"):
            raise StopIteration
    except StopIteration:
        pass
    assert [each.name for each in recorder.stop().segments] == ["a .. b"]
