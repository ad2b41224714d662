"""The current action of each rank, readable by others after the rank's death.

Each rank has a small memory-mapped file in the run directory. A write is a few stores into shared memory (about 1 us, no system
call), cheap enough for every action; the pages belong to the file, so they survive a rank that is killed.

    run directory/rank_00003:  | pid | state | time | waits for 1, 2 | 1RECV_B3 |
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from whale.errors import first_few, warn

RUN_DIRECTORY = "WHALE_RUN_DIR"
"""Environment variable that names the run directory; without it statuses stay in memory."""

FALL = "fall.json"
"""File in which the launcher of an elastic run notes when ranks fell, and the finished steps."""

LOST = "lost"
"""File by which the launcher says that other hosts cannot be reached."""

State = Literal["running", "waiting", "failed", "finished"]

_STATES: tuple[State, ...] = ("running", "waiting", "failed", "finished")
_MAX_PEERS = 32
_TEXT_BYTES = 168
_HEAD, _PEER, _PEERS = struct.Struct("=8sqqdqqq"), struct.Struct("=q"), struct.Struct(f"={_MAX_PEERS}q")
_TEXT_AT = _HEAD.size + _PEERS.size
_SIZE = _TEXT_AT + _TEXT_BYTES
_MAGIC = b"whale\0\0\2"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last record of a rank."""

    rank: int
    pid: int
    state: State  # ``running``, ``waiting``, ``failed`` or ``finished``
    action: str  # the current action (``1RECV_B3``), or what failed
    waits_for: tuple[int, ...]  # ranks that it waits for, the first 32 of `num_waits`
    num_waits: int
    since: float  # when the action began, in seconds of ``time.time()``
    step: int = 0  # finished steps at that time

    def describe(self, now: float) -> str:
        """The status as a line: ``waiting in 1RECV_B3 for rank 2, for 0.4 s``."""
        peers = first_few([str(peer) for peer in self.waits_for], _MAX_PEERS, count=self.num_waits)
        waits = f" for rank{'s' if self.num_waits > 1 else ''} {peers}" if self.num_waits else ""
        seconds = f"{max(now - self.since, 0.0):.1f} s"
        if self.state in ("running", "waiting"):
            return f"{self.state} in {self.action or 'no action yet'}{waits}, for {seconds}"
        return f"{self.state}{f' in {self.action}' if self.action else ''}{waits and f', while it waited{waits}'}, {seconds} ago"


class StatusBoard:
    """This rank's own record, written in place at every action.

    Made by `open`; the last record stays readable after `close` and after the process has died.

    Attributes:
        step: finished steps, for the next record.
    """

    def __init__(self, rank: int, buffer: mmap.mmap) -> None:
        self.rank, self.step = rank, 0
        self._buffer = buffer
        self._pid = os.getpid()
        self._reporting = _Reporting(self)
        self._write(0, "", ())

    @staticmethod
    def open(rank: int, environment: Mapping[str, str] | None = None) -> StatusBoard:
        """Opens the record of a rank in the run directory; in memory if none is named, or, with a warning, if it cannot be written.

        Args:
            environment: names the run directory; by default that of the process.
        """
        directory = (os.environ if environment is None else environment).get(RUN_DIRECTORY)
        if not directory:
            return StatusBoard(rank, mmap.mmap(-1, _SIZE))
        try:
            with open(_path(Path(directory), rank), "w+b", buffering=0) as file:
                file.write(bytes(_SIZE))  # allocate: on a full disk a write to a sparse page would kill the process
                return StatusBoard(rank, mmap.mmap(file.fileno(), _SIZE))
        except OSError as error:
            warn(f"cannot record what rank {rank} does in {directory}: {error.strerror}; if it dies, `whale run` cannot say where")
            return StatusBoard(rank, mmap.mmap(-1, _SIZE))

    def set(self, action: str, waits_for: Sequence[int] = ()) -> None:
        """Records the action that begins now, and the ranks that it waits for."""
        self._write(1 if waits_for else 0, action, waits_for)

    def fail(self, reason: str) -> None:
        """Records that this rank failed, with the reason as the action; keeps the ranks it waited for."""
        self._write(2, reason, self.read().waits_for)

    def reporting(self) -> AbstractContextManager[None]:
        """Records an exception inside, with the action in which it happened."""
        return self._reporting

    def finish(self) -> None:
        """Records a normal end."""
        self._write(3, "", ())

    def read(self) -> RankStatus:
        """The record as others see it."""
        status = _decode(self.rank, bytes(self._buffer))
        assert status is not None, "written when it was opened"
        return status

    def close(self) -> None:
        """Unmaps the memory; the file stays."""
        self._buffer.close()

    def _write(self, state: int, action: str, waits_for: Sequence[int]) -> None:
        text = action.encode(errors="replace")
        _HEAD.pack_into(self._buffer, 0, _MAGIC, self._pid, state, time.time(), self.step, len(waits_for), len(text))
        for place, peer in enumerate(waits_for[:_MAX_PEERS]):
            _PEER.pack_into(self._buffer, _HEAD.size + place * _PEER.size, peer)
        shown = text[:_TEXT_BYTES]
        self._buffer[_TEXT_AT : _TEXT_AT + len(shown)] = shown


class _Reporting(AbstractContextManager[None]):
    """What `StatusBoard.reporting` says: it has no state, so that one serves all."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._board.fail(f"{self._board.read().action}: {reason}")


def read_all(directory: str | os.PathLike[str]) -> dict[int, RankStatus]:
    """The statuses of all ranks in a run directory, by rank, without incomplete records."""
    found: dict[int, RankStatus] = {}
    for path in sorted(Path(directory).glob("rank_*")):
        rank = int(path.name.removeprefix("rank_"))
        status = _decode(rank, path.read_bytes())
        if status is not None:
            found[rank] = status
    return found


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}"


def _decode(rank: int, data: bytes) -> RankStatus | None:
    if len(data) != _SIZE:
        return None
    magic, pid, state, since, step, count, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        return None
    peers = _PEERS.unpack_from(data, _HEAD.size)[: min(count, _MAX_PEERS)]
    action = data[_TEXT_AT : _TEXT_AT + min(length, _TEXT_BYTES)].decode(errors="replace")
    return RankStatus(rank, pid, _STATES[state], action, peers, count, since, step)
