"""The processes of `tests.distributed.world`: a source, which has what tests prepare, and the ranks of each run, forked from it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 300.0
"""Of a machine that is busy; only what never ends takes so long."""
GRACE_SECONDS = 5.0
"""How long what has been ended may take to be gone, or to say where it stood."""
PEERS_SECONDS = 60.0
"""How long the other ranks may still take after one of them has failed: what they say of it is looked at."""


@dataclass(frozen=True)
class Job:
    """One function to run.

    Attributes:
        num_ranks: 0 for the source itself.
        path: where the files of its ranks begin.
        timeout: seconds.
        network: that the ranks are on, as `World` has it.
        peers: seconds that the other ranks may still take after one of them has failed.
        function, arguments: what to run; ranks put their number and how many they are before the arguments.
    """

    num_ranks: int
    path: str
    timeout: float
    network: str
    peers: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a job on one rank.

    Attributes:
        value: what its function returned.
        error: what it raised.
        text: the traceback, or how it ended; "" for success.
    """

    value: Any = None
    error: BaseException | None = None
    text: str = ""


def serve(pipe: Connection) -> None:
    """The life of a source: does the jobs that arrive, and answers each with a list of pickled outcomes, by rank."""
    os.setsid()  # ends together with its ranks
    pipe.send_bytes(b"ready")
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send(_answer(payload))


def _answer(payload: bytes) -> list[bytes]:
    try:
        job: Job = pickle.loads(payload)
    except Exception:
        return [pickle.dumps(Outcome(text=traceback.format_exc()))]
    return _run_ranks(job) if job.num_ranks else [_pickled(_outcome_of(job.function, *job.arguments))]


def _outcome_of(function: Callable[..., Any], *arguments: Any) -> Outcome:
    try:
        return Outcome(function(*arguments))
    except BaseException as error:
        return Outcome(error=error, text=traceback.format_exc())


def _pickled(outcome: Outcome) -> bytes:
    with contextlib.suppress(Exception):
        payload = pickle.dumps(outcome)
        pickle.loads(payload)
        return payload
    return pickle.dumps(Outcome(text=outcome.text or f"the result does not pickle: {outcome.value!r}"))


# -- the ranks of one run ------------------------------------------------------------------------


@dataclass
class Rank:
    """A forked process, and the pipe that its outcome comes through."""

    number: int
    pid: int
    pipe: Connection
    stacks: Path

    def stack_text(self) -> str:
        """Where its threads stand now."""
        os.kill(self.pid, signal.SIGUSR1)
        before, text = "", ""
        for _ in range(int(GRACE_SECONDS / 0.2)):
            time.sleep(0.2)
            before, text = text, self.stacks.read_text()
            if text and text == before:
                break
        return text

    def end(self) -> int:
        """Sees to it that the process is gone; the exit code that it had, or was given."""
        os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_ranks(job: Job) -> list[bytes]:
    gc.freeze()  # else a rank's first collection would copy all memory
    ranks = [_fork(job, number) for number in range(job.num_ranks)]
    gc.unfreeze()
    faulthandler.unregister(signal.SIGUSR1)
    replies = _collect(ranks, job.timeout, job.peers)
    is_slow = all(reply is None or reply.is_success for reply in replies.values())
    when = f"after {job.timeout:g} s" if is_slow else f"{job.peers:g} s after another rank failed"
    texts = {rank.number: f"not done {when}, at\n{rank.stack_text()}" for rank in ranks if rank.number not in replies}
    codes = {rank.number: rank.end() for rank in ranks}
    _import({name: None for reply in replies.values() if reply is not None for name in reply.imported})
    texts |= {number: f"died with exit code {codes[number]}" for number, reply in replies.items() if reply is None}
    return [reply.payload if (reply := replies.get(number)) else pickle.dumps(Outcome(text=texts[number])) for number in codes]


def _import(names: Iterable[str]) -> None:
    """Has the source import what ranks imported, so that each import is paid for once; but for what starts processes of its own."""
    for name in names:
        if not name.startswith("torch._inductor"):
            with contextlib.suppress(Exception):  # of a folder that only the rank looked into
                importlib.import_module(name)


def _fork(job: Job, number: int) -> Rank:
    here, there = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    stacks = Path(f"{job.path}.stacks{number}")
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)  # of the rank that is to be, from its first moment on
        pid = os.fork()
        if pid == 0:
            try:
                _be_rank(job, number, there)
            finally:
                os._exit(1)
    there.close()
    return Rank(number, pid, here, stacks)


@dataclass(frozen=True)
class Reply:
    """What a rank sends: its pickled outcome, whether that is a success, and the modules that it had to import."""

    is_success: bool
    payload: bytes
    imported: list[str]


def _collect(ranks: list[Rank], limit: float, peers: float) -> dict[int, Reply | None]:
    """Replies by rank; None of one that died; nothing of one that was not done in time."""
    replies: dict[int, Reply | None] = {}
    waiting = {rank.pipe: rank.number for rank in ranks}
    deadline = time.monotonic() + limit
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            reply: Reply | None = None
            with contextlib.suppress(EOFError):
                reply = pipe.recv()
            replies[waiting.pop(pipe)] = reply
            if reply is None or not reply.is_success:
                deadline = min(deadline, time.monotonic() + peers)
    return replies


def outcome_of_rank(number: int, job: Job) -> Outcome:
    """What a rank has made of a job, inside of the process group of all ranks."""
    return _outcome_of(_in_group, number, job)


def _be_rank(job: Job, number: int, pipe: Connection) -> None:
    before = len(sys.modules)
    outcome = outcome_of_rank(number, job)
    imported = [*islice(reversed(sys.modules), max(0, len(sys.modules) - before))]  # to look at all would copy the pages of their names
    pipe.send(Reply(not outcome.text, _pickled(outcome), imported[::-1]))
    sys.stdout.flush()
    sys.stderr.flush()


def _in_group(number: int, job: Job) -> Any:
    """Runs the job's function inside the process group of its ranks."""
    import torch
    import torch.distributed as dist

    from tests.captures import at_hand

    torch.set_num_threads(1)  # makes the pool anew that did not survive the fork, before two threads would at once
    size = str(job.num_ranks)
    os.environ.update(RANK=str(number), WORLD_SIZE=size, LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=size)
    store = dist.FileStore(f"{job.path}.store", job.num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=number, world_size=job.num_ranks, timeout=timedelta(seconds=PATIENCE_SECONDS))
    dist.barrier()  # nobody leaves while another one still connects
    try:
        with at_hand(), _on_network(job.network if job.num_ranks > 1 else "gloo"):
            return job.function(number, job.num_ranks, *job.arguments)
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _on_network(name: str) -> contextlib.AbstractContextManager[object]:
    """Within it, this process sends as the ranks of such a network do."""
    if name == "rendezvous":
        from tests.distributed.rendezvous import launches_wait

        return launches_wait()
    if name in ("strict", "strict device"):
        from tests.standin import DEVICE
        from tests.strict import strict_network

        return strict_network(DEVICE if name == "strict device" else None)
    assert name == "gloo", name
    return contextlib.nullcontext()
