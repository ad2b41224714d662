"""A process at a stated share of a core: by a quota of the kernel where one may be set, else by stopping it in every period.

    share 0.33    |###......|###......|###......|      periods of 5 ms

What a process has left of its share when it waits is there when it goes on: so much of the next thing runs as on a whole core. A slow
device has nothing of the kind, so periods are short.

A group has the priority of its process: the kernel weighs groups, not what is in them, against other work. A share of 1 is left
alone. Each process is pinned to one core, on which the shares add up to at most 1. What was changed is undone at the end, whatever
happens in between; what a killed process could not undo is undone by the next.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from miniature.owners import NAME, is_left_over, name_of

PERIOD_SECONDS = 0.005
"""Of a quota; longer where the share of it would be less than `LEAST_SECONDS`."""
LEAST_SECONDS = 0.001
"""Of a core in a period: less is no quota to the kernel."""
STOPS_SECONDS = 0.02
"""From one stop of a process to the next, where there are no quotas."""
CGROUPS = Path("/sys/fs/cgroup")
ROUNDING = 1e-9
"""By which shares that are written with a few digits may add up to more than a core."""


@contextlib.contextmanager
def slowed(pids: Sequence[int], shares: Sequence[float], memory_bytes: int | None = None) -> Iterator[str]:
    """Keeps processes at shares of a core while it is open.

    Args:
        pids: of the processes; they may start threads later, which are slowed too.
        shares: of a core, in (0, 1], one per process.
        memory_bytes: that each may use; needs control groups.

    Yields:
        How it is done: "quota" or "signals".

    Raises:
        ValueError: a share is out of range, or there are too few cores for all of them.
        OSError: memory cannot be limited here.
    """
    places = cores_of(shares, sorted(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        for pid, core in zip(pids, places, strict=True):
            stack.callback(_pin, pid, os.sched_getaffinity(pid))
            _pin(pid, {core})
        if memory_bytes is not None:
            for pid in pids:
                stack.enter_context(_group("memory", pid, {"memory.limit_in_bytes": memory_bytes}, {"memory.max": memory_bytes}))
        slow = [(pid, share) for pid, share in zip(pids, shares, strict=True) if share < 1]
        quotas = contextlib.ExitStack()
        try:
            for pid, share in slow:
                quotas.enter_context(_quota(pid, share))
        except OSError:
            quotas.close()
            for pid, share in slow:
                stack.enter_context(_stopped(pid, share))
            yield "signals"
            return
        stack.push(quotas)
        yield "quota"


def cores_of(shares: Sequence[float], cores: Sequence[int]) -> tuple[int, ...]:
    """Which core each process has: the largest shares first, each where most is left.

    Args:
        shares: of a core, one per process.
        cores: their numbers.

    Raises:
        ValueError: a share is out of range, or there are too few cores.
    """
    if any(not 0 < share <= 1 for share in shares):
        raise ValueError(f"a share of a core is above 0 and at most 1 ({list(shares)})")
    left, found = dict.fromkeys(cores, 1.0), {}
    for number in sorted(range(len(shares)), key=lambda number: -shares[number]):
        core = max(left, key=left.__getitem__)
        left[core] -= shares[number]
        found[number] = core
    if min(left.values()) < -ROUNDING:
        raise ValueError(f"the shares of the processes on one core add up to at most 1 ({list(shares)} on {len(cores)} core(s))")
    return tuple(found[number] for number in range(len(shares)))


def _pin(pid: int, cores: Collection[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(pid, cores)


def _quota(pid: int, share: float) -> contextlib.AbstractContextManager[None]:
    period = round(1e6 * max(PERIOD_SECONDS, LEAST_SECONDS / share))
    own = round(period * share)
    first = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": own, "cpu.shares": _weight(pid)}
    return _group("cpu", pid, first, {"cpu.max": f"{own} {period}", "cpu.weight.nice": _priority(pid)})


def _priority(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def _weight(pid: int) -> int:
    """Of a process beside one of priority 0, which weighs 1,024: each step of priority is a quarter more."""
    return round(1024 * 1.25 ** -_priority(pid))


@contextlib.contextmanager
def _group(controller: str, pid: int, first: dict[str, int], second: dict[str, int | str]) -> Iterator[None]:
    """A control group of one process; the settings of version 1, which has a tree per controller, and of version 2."""
    of_controller = CGROUPS / controller
    root, settings = (of_controller, first) if of_controller.is_dir() else (CGROUPS, second)
    for left in root.glob(f"{NAME}-*"):
        if is_left_over(left.name):
            _dissolve(left)
    group = root / name_of(pid)
    group.mkdir(exist_ok=root is CGROUPS)
    try:
        for name, value in settings.items():
            (group / name).write_text(str(value))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        _dissolve(group)


def _dissolve(group: Path) -> None:
    """Lets a group's processes go, and removes it."""
    with contextlib.suppress(FileNotFoundError):  # somebody else has swept
        for line in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (group.parent / "cgroup.procs").write_text(line)
        _remove(group)


def _remove(group: Path) -> None:
    """A group can go when the last of its processes has been reaped, which takes a moment."""
    until = time.monotonic() + 5
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(STOPS_SECONDS)


@contextlib.contextmanager
def _stopped(pid: int, share: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(STOPS_SECONDS * share):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(STOPS_SECONDS * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
