"""Which rank died first, what it did, and who waited for it; in an elastic run, how often ranks have restarted in vain."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from whale.cli import rank_start
from whale.cli.elastic import KEPT
from whale.errors import PREEMPTED_CODE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from whale.runtime.execute.status import RankStatus


STILL_SECONDS = 3.0
"""So long may a rank of an elastic run stand still (SIGSTOP) before it counts as lost and is killed."""

MOST_IN_VAIN = 3
"""So often may ranks of a host fail by themselves, without one step more than ever before, till it leaves an elastic run."""


@dataclass
class Deaths:
    """What torchrun's account leaves out: it ends all ranks when one has failed.

    Attributes:
        first: the process that failed before all others.
        stopped: those that stood still then (SIGSTOP, a debugger). They would not end by SIGTERM, and are killed.
        fallen: in an elastic run, the processes of an earlier start.
        step: the highest that a rank of this host has done.
        num_in_vain: how often ranks have failed by themselves since then; a repeated step is no progress.
        has_left: whether that was too often, and this host leaves the run.
        is_stopping: whether SIGTERM has come to the launcher, which waits for its ranks.
    """

    first: int | None = None
    stopped: set[int] = field(default_factory=set)
    fallen: set[int] = field(default_factory=set)
    step: int = 0
    num_in_vain: int = 0
    has_left: bool = False
    is_stopping: bool = False

    def fell(self, status: RankStatus | None, step: int, *, by_itself: bool) -> bool:
        """Counts a death; whether it was one too many.

        Args:
            status: what the rank last reported; None where it had not begun.
            step: the highest that a rank has done.
            by_itself: whether no signal asked it to end.
        """
        if step > self.step:
            self.step, self.num_in_vain = step, 0
        self.num_in_vain += by_itself and (status is None or not status.waits_for)
        return self.num_in_vain > MOST_IN_VAIN


@contextmanager
def watching(directory: str, *, is_elastic: bool = False) -> Iterator[Deaths]:
    """Finds which rank ends first, and kills those that stand still: when another has ended; in an elastic run after some seconds.

    Args:
        directory: of the run.
        is_elastic: whether ranks restart when one has died, which is then printed at once.
    """
    found = Deaths()

    def look(_: int, __: FrameType | None) -> None:
        if is_elastic:
            _look_for_the_next(found, directory)
        elif found.first is None:
            _look_for_the_first(found, directory)

    if not hasattr(os, "waitid") or threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield found
    finally:
        signal.signal(signal.SIGCHLD, before)


def _look_for_the_first(found: Deaths, directory: str) -> None:
    """Of the ranks that stand still it knows those with a record in the run directory."""
    from whale.runtime.execute.status import read_all

    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None or ended.si_status == 0:
        return
    found.first = ended.si_pid
    for status in read_all(directory).values():
        _kill_if_still(found, status.pid)


def _look_for_the_next(found: Deaths, directory: str) -> None:
    """In an elastic run; a SignalException where ranks fail by themselves repeatedly: the launcher leaves, others may go on."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from whale.runtime.execute.status import read_all

    processes = {*rank_processes(directory)} - found.fallen
    for pid in processes:
        if _look_at(pid, os.WSTOPPED) is not None:
            patience = threading.Timer(STILL_SECONDS, _kill_if_still, (found, pid))
            patience.daemon = True
            patience.start()
    ended = next((end for pid in processes if (end := _look_at(pid, os.WEXITED)) is not None and end.si_status != 0), None)
    if ended is None or found.is_stopping:
        return
    found.fallen |= processes  # torchrun ends the others
    exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    statuses = read_all(directory).values()
    status = next((each for each in statuses if each.pid == ended.si_pid), None)
    if exit_code != PREEMPTED_CODE:
        rank = "a rank" if status is None else f"rank {status.rank}"
        how = _ended(exit_code, stood_still=ended.si_pid in found.stopped)
        said = f"whale run: {rank} (pid {ended.si_pid}) {how}; {_last(status, time.time())}; all ranks restart"
        print(said, file=sys.stderr, flush=True)
    step = max((each.step for each in statuses), default=0)
    _note_fall(Path(directory) / KEPT, step)
    by_itself = exit_code not in (PREEMPTED_CODE, -signal.SIGTERM)
    if found.fell(status, step, by_itself=by_itself):
        found.has_left = True
        # of torchrun's errors the one that does not end the run for all launchers
        raise SignalException(
            f"{found.num_in_vain} ranks of this host have failed by themselves, and none got past step {found.step}",
            sigval=signal.SIGTERM,
        )


def _note_fall(kept: Path, step: int) -> None:
    """For the restarted ranks, which remove it once they have gone on."""
    from whale.runtime.execute.status import FALL

    with suppress(OSError):  # no room, or the ranks before have not gone on: theirs stands
        kept.mkdir(mode=0o700, exist_ok=True)
        with open(kept / FALL, "x") as file:
            json.dump([time.time(), step], file)


def rank_processes(directory: str) -> list[int]:
    """All processes of ranks that this host has had."""
    return [int(file.suffix[1:]) for file in Path(directory).glob(f"{rank_start.PROCESS}.*")]


def _look_at(pid: int, what: int) -> os.waitid_result | None:
    """What has become of a child, if it is this, which stays to be seen."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, what | os.WNOHANG | os.WNOWAIT)
    return None


def _kill_if_still(found: Deaths, pid: int) -> None:
    if _look_at(pid, os.WSTOPPED) is not None:
        found.stopped.add(pid)
        os.kill(pid, signal.SIGKILL)


def describe_failure(error: ChildFailedError, statuses: Mapping[int, RankStatus], now: float, deaths: Deaths) -> str:
    """Which rank died, its last action, and what every other rank was doing or waiting for.

    Args:
        error: torchrun's account: the ranks that it saw fail.
        statuses: what the ranks of this host last reported.
        now: seconds of ``time.time()``.
        deaths: what was seen of them.
    """
    failures = sorted(error.failures.items(), key=lambda item: _blame(item[0], item[1], statuses, deaths))
    lines = []
    for rank, failure in failures:
        lines.append(f"whale run: rank {rank} (pid {failure.pid}) {_how(failure, deaths)}; {_last(statuses.get(rank), now)}")
    for rank, status in sorted(statuses.items()):
        if rank not in error.failures:
            lines.append(f"  rank {rank} was {_last(status, now).removeprefix('last ')}")
    silent = "" if statuses else "\n  no rank had started a step"
    return "\n".join(lines) + silent


def _blame(rank: int, failure: ProcessFailure, statuses: Mapping[int, RankStatus], deaths: Deaths) -> tuple[int, int, int]:
    """Sorts the likely cause first: killed, then failed by itself, then failed while it waited, then stopped by torchrun.

    Ranks that fail end at about the same time, and torchrun stops all others when the first has ended. So a rank that it stopped
    counts as failed by itself where it waited for nobody and others failed while they waited for it.
    """
    status = statuses.get(rank)
    waited = status is not None and bool(status.waits_for)
    if failure.exitcode >= 0:
        order = 2 if waited else 1
    elif not _was_told_to_end(failure, deaths):
        order = 0
    else:
        awaited = any(other.state == "failed" and rank in other.waits_for for other in statuses.values())
        order = 1 if awaited and not waited else 3
    return order, int(failure.timestamp), rank


def _was_told_to_end(failure: ProcessFailure, deaths: Deaths) -> bool:
    """Whether it got what torchrun sends the others after a death."""
    return -failure.exitcode == signal.SIGTERM and failure.pid != deaths.first


def _how(failure: ProcessFailure, deaths: Deaths) -> str:
    if _was_told_to_end(failure, deaths) and failure.pid not in deaths.stopped:
        return "was stopped by SIGTERM"
    return _ended(failure.exitcode, stood_still=failure.pid in deaths.stopped)


def _ended(exit_code: int, *, stood_still: bool) -> str:
    """How a process ended, by its code as `subprocess` has it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    return "was paused (SIGSTOP or a debugger), then killed" if stood_still else f"was killed by {signal.Signals(-exit_code).name}"


def _last(status: RankStatus | None, now: float) -> str:
    return "last seen before its first action" if status is None else f"last {status.describe(now)}"
