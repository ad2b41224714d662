"""Waits: the host waits no longer than the limit; what a device waits for is looked at from beside, in order."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from whale.comm import Launched, Waits
from whale.comm.waiting import Lines
from whale.errors import RuntimeFault


@dataclass
class Work:
    """Stands for torch's: notes how it was waited for."""

    is_done: bool = False
    fails: bool = False
    waited: list[timedelta | None] = field(default_factory=list)

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.fails:
            raise RuntimeError("Connection closed by peer\nat some place")
        self.waited.append(timeout)

    def is_completed(self) -> bool:
        return self.is_done


def launched(work: Any, *, blocks_host: bool) -> Launched:
    return Launched(work, blocks_host)


LIMIT = timedelta(seconds=1000)


def test_the_host_waits_with_the_limit() -> None:
    work = Work()
    waits = Waits(LIMIT)
    waits.wait(None, "1RECV_F0", (1,))
    waits.wait(launched(work, blocks_host=True), "1RECV_F0", (1,))
    assert work.waited == [LIMIT]
    with pytest.raises(RuntimeFault, match=r"1RECV_F3 with rank 2 did not complete: a rank has left: its process has ended"):
        waits.wait(launched(Work(fails=True), blocks_host=True), "1RECV_F3", (2,))


def test_a_device_waits_without_one_and_the_overdue_is_named() -> None:
    first, second, waits = Work(), Work(), Waits(LIMIT)
    waits.wait(launched(first, blocks_host=False), "1RECV_F0", (1,))
    waits.wait(launched(second, blocks_host=False), "1RECV_B0", (1, 3))
    assert first.waited == second.waited == [None]
    assert waits.look(0.0) is None
    first.is_done = True
    assert waits.look(1e12) is None, "the first has just been seen done: the second has its time from now"
    fault = waits.look(1e12 + 1001)
    assert fault is not None and "1RECV_B0 with ranks 1, 3 did not complete" in str(fault)
    with pytest.raises(RuntimeFault, match="1RECV_B0"):
        waits.wait(None, "2RECV_B0", (0,))


def test_what_is_done_is_forgotten() -> None:
    works, waits = [Work(is_done=True) for _ in range(3)], Waits(LIMIT)
    for work in works:
        waits.wait(launched(work, blocks_host=False), "1RECV_F0", (1,))
    assert waits.look(1e12) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), "a rank has left"),
        (RuntimeError("[gloo/tcp/pair.cc:100] read: Connection reset by peer"), "a rank has left"),
        (
            RuntimeError("[gloo/unbound_buffer.cc:84] Timed out waiting 300000ms"),
            "nothing was received within communication.timeout_seconds (1000)",
        ),
        (RuntimeError("something unheard of"), "the backend failed (RuntimeError)"),
    ],
)
def test_what_a_backend_says_is_put_in_our_words(error: RuntimeError, said: str) -> None:
    with pytest.raises(RuntimeFault) as caught, Waits(LIMIT).speaking("gathering a.weight", (1, 2)):
        raise error
    assert caught.value.message.startswith(f"gathering a.weight with ranks 1, 2 did not complete: {said}")
    assert "gloo" not in str(caught.value) and caught.value.__cause__ is error


@dataclass
class Event:
    """Stands for CUDA's."""

    is_done: bool = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


def test_a_device_that_waits_keeps_nothing_that_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    work, waits = Work(), Waits(LIMIT)
    waits.wait(launched(work, blocks_host=False), "1RECV_F0", (1,))
    kept = weakref.ref(work)
    del work
    assert kept() is None
    assert waits.look(1e12) is not None, "what the device is not past is overdue"
    events[0].is_done = True
    waits = Waits(LIMIT)
    waits.wait(launched(Work(), blocks_host=False), "1RECV_F0", (1,))
    events[1].is_done = True
    assert waits.look(1e12) is None


def test_who_waits_for_a_device_gives_up_where_ranks_are_lost_or_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, looks = Waits(timedelta(seconds=5)), iter((False, True))
    waits.wait_for_device(lambda: next(looks), "copying", [1], lambda: True)  # it comes to an end in time
    monkeypatch.setattr("whale.comm.waiting.END_SECONDS", 0.0)
    with pytest.raises(RuntimeFault, match="copying with rank 1 did not complete: the device still waits 0 s after SIGTERM") as found:
        waits.wait_for_device(lambda: False, "copying", [1], lambda: True)
    assert found.value.lost_peers
    waits._lost = "ranks of another host cannot be reached"
    with pytest.raises(RuntimeFault, match="ranks of another host cannot be reached"):
        waits.wait_for_device(lambda: False, "copying", [1], lambda: False)


class Nccl:
    """Stands for a group and its backend: notes what is done with it, and in which thread."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def _get_backend(self, device: torch.device) -> Nccl:
        assert device.type == "cuda"
        return self

    def _group_start(self) -> None:
        self.done.append("start")

    def abort(self) -> None:
        self.done.append("abort")

    def _group_end(self) -> None:
        self.done.append("end")


def test_a_device_that_waits_too_long_is_freed_after_the_fault_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr("whale.comm.waiting._aborted", None)
    monkeypatch.setattr("whale.comm.waiting.backend_of", lambda device, group: "nccl")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("whale.comm.waiting.failure_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"{device} in {threading.current_thread().name}"))
    waits = Waits(timedelta(0), torch.device("cuda", 3))
    for _ in range(2):
        waits.lines.add(Nccl(done))
    monkeypatch.setattr(Nccl, "abort", lambda self: done.append(f"abort, {waits.has_lost_device}"))
    waits.wait(launched(Work(), blocks_host=False), "1RECV_F0", (1,))
    assert waits._monitor is not None
    waits._monitor.join()
    assert done == ["cuda:3 in whale waits", "start", "abort, True", "abort, True", "end"]
    assert "1RECV_F0 with rank 1 did not complete: nothing was received" in capsys.readouterr().err
    with pytest.raises(RuntimeFault, match="1RECV_F0"):
        waits.wait_for_device(lambda: True, "copying", [1], lambda: False)  # it is done since it was freed


def test_all_engines_of_a_process_know_that_its_communicators_were_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale.comm.waiting._aborted", None)
    monkeypatch.setattr("whale.comm.waiting.backend_of", lambda device, group: "nccl")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("whale.comm.waiting.failure_reason", lambda: None)
    monkeypatch.setattr(Lines, "abort", lambda self: None)
    world, later = cast("torch.distributed.ProcessGroup", object()), cast("torch.distributed.ProcessGroup", object())
    first, second = Waits(timedelta(0), group=lambda: world), Waits(LIMIT, group=lambda: world)
    first.wait(launched(Work(), blocks_host=False), "1RECV_F0", (1,))
    assert first._monitor is not None
    first._monitor.join()
    with pytest.raises(RuntimeFault, match="1RECV_F0 with rank 1"):
        second.wait(None, "2RECV_F0", (2,))
    assert second.has_lost_device
    third = Waits(LIMIT, group=lambda: later)  # of the ranks that were connected since
    assert not third.has_lost_device
    third.wait(None, "1RECV_F0", (1,))
