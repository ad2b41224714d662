"""Gloo ranks on this machine: functions are sent to them, results or tracebacks come back.

    world = World(4)
    world.run(function, argument)                  # [function(rank, 4, argument) for each rank]
    world.run(function, argument, num_ranks=2)     # by two ranks
    world.prepare(function, argument)              # function(argument), in the process that all ranks are forked from

The ranks of each run are forks of one process, the source, which has imported what tests need. So a rank starts in
milliseconds and ends with its run, whatever became of it; and what a prepared function keeps (`functools.cache`), such as
the capture of a model, all later ranks have.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.counts import count
from tests.distributed.launched import forkserver
from tests.distributed.ranks import GRACE_SECONDS, PATIENCE_SECONDS, PEERS_SECONDS, Job, Outcome, serve


class RankFailure(Exception):
    """Some ranks raised, hung or died.

    Attributes:
        errors: per rank, the exception that it raised, where that could be sent; else None.
        texts: per rank, its traceback or what became of it.
    """

    def __init__(self, errors: dict[int, BaseException | None], texts: dict[int, str]) -> None:
        self.errors = errors
        self.texts = texts
        super().__init__("\n".join(f"rank {rank}: {text.strip()}" for rank, text in texts.items()))


@dataclass
class World:
    """Gloo ranks on this machine's CPUs.

    Args:
        num_ranks: of a run that names no number of its own.
        timeout: seconds that one run may take; then its ranks are killed.
        network: ``gloo``; ``rendezvous``, on which every launch waits for its other end (`tests.distributed.rendezvous`); or ``strict``,
            which has the rules of NCCL (`tests.strict`), for tensors of the CPU, or ``strict device`` for those of the stand-in device.
        peers: seconds that the other ranks may still take after one of them has failed; then they are killed.
        grace: seconds that the source may take longer, to say where they stood; then it is killed.
    """

    num_ranks: int
    timeout: float = PATIENCE_SECONDS
    network: str = field(default_factory=lambda: os.environ.get("WHALE_TEST_NETWORK", "gloo"))
    peers: float = PEERS_SECONDS
    grace: float = 4 * GRACE_SECONDS
    _number: int = 0
    _source: Any = None
    _pipe: Connection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="world")

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int | None = None, timeout: float | None = None) -> list[Any]:
        """Runs ``function(rank, num_ranks, *arguments)`` on ranks of its own, inside a process group of theirs.

        The function must be importable (a top-level function of a module); arguments and results must pickle.

        Raises:
            RankFailure: a rank raised, died, or was not done in time.
        """
        size = self.num_ranks if num_ranks is None else num_ranks
        count("worlds")
        count("ranks", size)
        return [outcome.value for outcome in self._ask(size, function, arguments, timeout)]

    def prepare(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
        """Runs ``function(*arguments)`` in the process that the ranks of later runs are forked from.

        Raises:
            Exception: what the function raised.
            RankFailure: it raised what does not pickle, or was not done in time.
        """
        try:
            (outcome,) = self._ask(0, function, arguments, timeout)
        except RankFailure as failure:
            error = failure.errors[0]
            raise failure if error is None else error from failure
        return outcome.value

    def close(self) -> None:
        """Ends all ranks."""
        self._stop()
        self._directory.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None) -> list[Outcome]:
        self._number += 1
        path = str(Path(self._directory.name) / f"run{self._number}")
        limit = self.timeout if timeout is None else timeout
        outcomes = self._outcomes(Job(size, path, limit, self.network, self.peers, function, arguments))
        if any(outcome.text for outcome in outcomes):
            failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.text}
            raise RankFailure({rank: outcome.error for rank, outcome in failed.items()}, {r: outcome.text for r, outcome in failed.items()})
        return outcomes

    def _outcomes(self, job: Job) -> list[Outcome]:
        """What each rank has made of a job; of one without ranks, what the source has."""
        payload = pickle.dumps(job)
        if self._source is None:
            self._start()
        self._pipe.send_bytes(payload)
        return self._answer(job.timeout)

    def _answer(self, limit: float) -> list[Outcome]:
        """What the source sends; where it hangs or has died, it is ended, and the next run gets another."""
        text = f"the source of ranks gave no answer within {limit:g} s"
        try:
            if self._pipe.poll(limit + self.grace):
                return [pickle.loads(payload) for payload in self._pipe.recv()]
        except EOFError:
            self._source.join(GRACE_SECONDS)
            text = f"the source of ranks died with exit code {self._source.exitcode}"
        self._stop()
        raise RankFailure({0: None}, {0: text})

    def _start(self) -> None:
        context = forkserver()  # so that another source starts as fast as a rank
        self._pipe, there = context.Pipe()
        self._source = context.Process(target=serve, args=(there,), daemon=True)
        self._source.start()
        there.close()
        assert self._pipe.poll(PATIENCE_SECONDS), "the source of ranks did not start"
        self._pipe.recv_bytes()

    def _stop(self) -> None:
        if self._source is None:
            return
        if self._source.is_alive():
            os.killpg(self._source.pid, signal.SIGKILL)  # the source, and its ranks where a run was broken off
        self._source.join(GRACE_SECONDS)
        self._pipe.close()
        self._source = None
