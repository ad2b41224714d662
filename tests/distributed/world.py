"""A pool of Gloo ranks that lives as long as a test module: functions are sent to it, results or tracebacks come back.

    world = World(4)
    world.run(function, argument)                  # [function(rank, 4, argument) for each rank]
    world.run(function, argument, num_ranks=2)     # on the first two, a world of their own

Each run has its own default process group, so hypothesis examples need no new processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 60.0
GRACE_SECONDS = 5.0
"""How long the other ranks may still take after one of them has failed."""


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


@dataclass(frozen=True)
class Job:
    """One function to run on one rank."""

    num_ranks: int
    store: str
    timeout: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rendezvous: bool


@dataclass(frozen=True)
class Outcome:
    """What became of a job on one rank.

    Attributes:
        value: what its function returned.
        error: what it raised.
        text: the traceback; "" for success.
        is_broken: whether the process cannot serve on (a group half made leaves torch's counters askew).
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    is_broken: bool = False


@dataclass
class Worker:
    """A rank's process, and the pipe to it."""

    rank: int
    process: Any
    pipe: Connection
    stacks: Path

    def stack_text(self) -> str:
        """Where its threads stand now."""
        if not self.process.is_alive():
            return ""
        os.kill(self.process.pid, signal.SIGUSR1)
        before, text = "", ""
        for _ in range(int(GRACE_SECONDS / 0.2)):
            time.sleep(0.2)
            before, text = text, self.stacks.read_text()
            if text and text == before:
                break
        return text


@dataclass
class World:
    """Gloo ranks on this machine.

    Args:
        num_ranks: processes in the pool.
        timeout: seconds that one run may take; then all ranks are killed and replaced.
        rendezvous: whether every launch waits for its other end (`tests.distributed.rendezvous`).
    """

    num_ranks: int
    timeout: float = 60.0
    rendezvous: bool = field(default_factory=lambda: os.environ.get("WHALE_TEST_RENDEZVOUS") == "1")
    _workers: list[Worker] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="world")
        self._start()

    def run(self, function: Callable[..., Any], *arguments: Any, num_ranks: int | None = None, timeout: float | None = None) -> list[Any]:
        """Runs ``function(rank, num_ranks, *arguments)`` on the first ranks, inside a process group of theirs.

        The function must be importable (a top-level function of a module); arguments and results must pickle.

        Raises:
            RankFailure: a rank raised, died, or was not done in time.
        """
        size = self.num_ranks if num_ranks is None else num_ranks
        limit = self.timeout if timeout is None else timeout
        self._number += 1
        store = str(Path(self._directory.name) / f"store{self._number}")
        payload = pickle.dumps(Job(size, store, limit, function, arguments, self.rendezvous))
        workers = self._workers[:size]
        for worker in workers:
            worker.pipe.send_bytes(payload)
        outcomes, silent = _collect(workers, limit)
        if silent or any(outcome.text for outcome in outcomes.values()):
            self._fail(outcomes, silent, limit)
        return [outcomes[rank].value for rank in range(size)]

    def close(self) -> None:
        """Ends all ranks."""
        self._stop()
        self._directory.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fail(self, outcomes: dict[int, Outcome], silent: list[Worker], limit: float) -> None:
        texts = {rank: outcome.text for rank, outcome in outcomes.items() if outcome.text}
        another_failed = bool(texts) or any(worker.process.exitcode is not None for worker in silent)
        when = f"{GRACE_SECONDS:g} s after another rank failed" if another_failed else f"after {limit:g} s"
        for worker in silent:
            code = worker.process.exitcode
            texts[worker.rank] = f"died with exit code {code}" if code is not None else f"not done {when}, at\n{worker.stack_text()}"
        if silent or any(outcome.is_broken for outcome in outcomes.values()):
            self._stop()
            self._start()
        raise RankFailure({rank: outcomes[rank].error if rank in outcomes else None for rank in texts}, texts)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # imports are done once, then each rank is a fork
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch.export", "whale.api", "tests.models", "tests.distributed.world"]
        )
        self._workers = []
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            stacks = Path(self._directory.name) / f"stacks{rank}_{self._number}"
            process = context.Process(target=_serve, args=(rank, there, str(stacks)), daemon=True)
            process.start()
            there.close()
            self._workers.append(Worker(rank, process, here, stacks))
        for worker in self._workers:
            assert worker.pipe.poll(START_SECONDS), f"rank {worker.rank} did not start"
            worker.pipe.recv_bytes()

    def _stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(GRACE_SECONDS)
            worker.pipe.close()
        self._workers = []


def _collect(workers: list[Worker], limit: float) -> tuple[dict[int, Outcome], list[Worker]]:
    """Outcomes by rank in order of arrival, and the workers that gave none in time or died."""
    outcomes: dict[int, Outcome] = {}
    waiting = {worker.pipe: worker for worker in workers}
    dead: list[Worker] = []
    deadline = time.monotonic() + limit
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            worker = waiting.pop(pipe)
            try:
                outcome = pickle.loads(pipe.recv_bytes())
            except EOFError:
                worker.process.join(GRACE_SECONDS)
                dead.append(worker)
            else:
                outcomes[worker.rank] = outcome
            if worker in dead or outcomes[worker.rank].text:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return outcomes, [*dead, *waiting.values()]


# -- in the ranks' processes ---------------------------------------------------------------------


def _serve(rank: int, pipe: Connection, stacks: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            except Exception:
                pipe.send_bytes(pickle.dumps(Outcome(text=traceback.format_exc())))
                continue
            pipe.send_bytes(_pickled(_perform(rank, job)))


def _perform(rank: int, job: Job) -> Outcome:
    import torch.distributed as dist

    from tests.distributed.rendezvous import launches_wait

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.num_ranks))
    try:
        store = dist.FileStore(job.store, job.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=timedelta(seconds=job.timeout))
        dist.barrier()  # nobody leaves while another one still connects
    except BaseException as error:
        return Outcome(error=error, text=traceback.format_exc(), is_broken=True)
    try:
        with launches_wait() if job.rendezvous else contextlib.nullcontext():
            return Outcome(job.function(rank, job.num_ranks, *job.arguments))
    except BaseException as error:
        return Outcome(error=error, text=traceback.format_exc())
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _pickled(outcome: Outcome) -> bytes:
    try:
        payload = pickle.dumps(outcome)
        pickle.loads(payload)
        return payload
    except Exception:
        text = outcome.text or f"the result does not pickle\n{traceback.format_exc()}"
        return pickle.dumps(Outcome(text=text, is_broken=outcome.is_broken))
