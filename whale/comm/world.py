r"""The world of ranks: joining it, and running an action on every rank such that all succeed or all raise.

A CPU rank keeps the memory that it frees. glibc otherwise returns the top of its heap to the kernel after each pass, and the next
pass faults it in again page by page: 3 to 7 ms of a pass of 40 ms.

    step     F F F  I I I  W W W  F F F
    heap     /-----------------\\  /----     returned, and faulted in again
    kept     /--------------------------

It would also map tensors of more than 32 MiB one by one: in a step of 2.7 s with tensors of 50 MB, 60,000 to 110,000 faults took
0.1 to 0.2 s. They come from the heap, too.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # binds the default group at import: there must be none yet
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from whale.comm.listening import listening_at, store_on
from whale.comm.notice import Notice
from whale.comm.waiting import LINGER_SECONDS, NCCL_FACTOR, Waits, backend_of, end_together, report_failure
from whale.errors import ConfigError, OpFault, RuntimeFault, WhaleError


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int  # of `torch.distributed`; 0 without a launcher
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    device: torch.device
    timeout: timedelta  # the limit of any wait
    is_imagined: bool = False  # whether there are no peers in fact (`imagined_world`)

    @cached_property
    def waits(self) -> Waits:
        return Waits(self.timeout, self.device)

    @cached_property
    def notice(self) -> Notice:
        return Notice()

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL carries what is on the device; else Gloo does, through host memory."""
        return not self.is_alone and backend_of(self.device) == "nccl"

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must be to be sent: Gloo sends from host memory only."""
        return self.device if self.has_nccl else torch.device("cpu")

    @property
    def can_compare(self) -> bool:
        """Whether there are peers to exchange values with."""
        return not self.is_alone and not self.is_imagined

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group for what is on the device, over NCCL alone where it has that; None on ranks outside.

        All ranks take part: else torch names a group by how many each member has already, and members with different numbers of groups
        wait for each other under different names.
        """
        backend, limit = ("nccl", NCCL_FACTOR * self.timeout) if self.has_nccl else (None, self.timeout)
        with self.speaking("creating process groups"):
            group: dist.ProcessGroup | None = dist.new_group(list(ranks), timeout=limit, backend=backend)
        if self.rank not in ranks:
            return None
        assert group is not None
        self.waits.lines.add(group)
        return group

    def gather_objects(self, value: object) -> list[object]:
        """The value of every rank, in rank order, on every rank."""
        if self.is_alone:
            return [value]
        values: list[object] = [None] * self.size
        with self.speaking("exchanging values"):
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        if self.is_alone:
            return value
        box = [value]
        with self.speaking("waiting for the decision of rank 0"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if not self.is_alone:
            with self.speaking("waiting for all ranks"):
                dist.barrier()

    def speaking(self, action: str) -> AbstractContextManager[None]:
        """Around communication with all ranks: an error in it becomes a `RuntimeFault` that names the action."""
        return self.waits.speaking(action, [rank for rank in range(self.size) if rank != self.rank])

    @contextmanager
    def all_ranks(self) -> Iterator[None]:
        """Around what all ranks do together: reports an error of this rank that the others do not know of.

        They know of a `WhaleError`, which is raised on all ranks or was reported when raised, except an `OpFault`. After any other
        error this rank cannot go on with them.
        """
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, WhaleError) and not isinstance(error, OpFault)
            if not is_known and not self.is_alone:
                report_failure(error)
                self.waits.lines.close_all()
            raise


def connect(timeout_seconds: float) -> World:
    """Joins the existing process group, or makes it from torchrun's environment, or returns a world of one.

    Args:
        timeout_seconds: the limit of any wait.

    Raises:
        ConfigError: the existing group cannot send host memory.
    """
    timeout = timedelta(seconds=timeout_seconds)
    launched = os.environ.get("LOCAL_RANK")
    local_rank, device = int(launched or 0), _device(launched)
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join(device, timeout)
        atexit.register(_leave)
    if not dist.is_initialized():
        return World(0, 1, 0, 1, device, timeout)
    _check_group()
    if device.type == "cpu":
        keep_freed_memory()
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    world = World(dist.get_rank(), size, local_rank, local_size, device, timeout)
    atexit.register(_report_failure, weakref.ref(world.waits))
    return world


class Closable(Protocol):
    """An owner of process groups."""

    def close(self) -> None:
        pass


def close_at_exit(holder: Closable) -> None:
    """Closes an owner of process groups that is still alive at a normal end of the interpreter.

    A group joins its threads when its last reference goes. Gloo's threads release tensors after the work is done, for which they need
    the interpreter; one that does so while it ends aborts the process, so that a successful run would fail.
    """
    atexit.register(_close, weakref.ref(holder))


def _close(reference: weakref.ref[Closable]) -> None:
    holder = reference()
    if holder is not None and not _has_failed():
        holder.close()


def _leave() -> None:
    """Destroys the process group that `connect` made."""
    if dist.is_initialized() and not _has_failed():
        dist.destroy_process_group()


def _report_failure(reference: weakref.ref[Waits]) -> None:
    """Reports the error that ends this process to the others, and waits for theirs."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and dist.is_initialized():
        waits = reference()
        if not isinstance(error, RuntimeFault):
            report_failure(error)
            if waits is not None:
                waits.lines.close_all()
        end_together(LINGER_SECONDS if waits is None else waits.linger_seconds)


def _has_failed() -> bool:
    """Whether an error ends this process: unfinished work that peers will never join must not be waited for."""
    return hasattr(sys, "last_value")


def _device(local_rank: str | None) -> torch.device:
    """The GPU of the rank's number on its host; without a launcher the script's current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, timeout: timedelta) -> None:
    """Makes the process group, over NCCL where possible.

    With `device_id` NCCL makes communicators when a group is made, in one order on all ranks, and not during the first messages.
    """
    store, rank, size = _own_store(timeout) or next(iter(rendezvous("env://", timeout=timeout)))
    store.set(f"gpu of rank {rank}", _gpu(device))
    gpus = [bytes(gpu).decode() for gpu in store.multi_get([f"gpu of rank {other}" for other in range(size)])]
    backend = choose_backend(gpus)
    named = device if "nccl" in backend else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=named)
    if named is not None and dist.group.WORLD is not None:  # Gloo keeps the limit of what the host waits for
        dist.group.WORLD._get_backend(named)._set_default_timeout(NCCL_FACTOR * timeout)
    if backend == "gloo" and rank == 0 and any(gpus):
        warnings.warn(
            f"messages between GPUs go through host memory, over Gloo: {_reason(gpus)}; NCCL needs one GPU per rank", stacklevel=3
        )


def _own_store(timeout: timedelta) -> tuple[Store, int, int] | None:
    """Rank 0's store for all ranks, with its rank and their number, where no launcher has one: at the address named, not at all.

    None where torch is to open or find the store: on other ranks; for a host's name, which may be another address elsewhere; and where
    the address is not this host's or in use, of which torch knows more.
    """
    host, port, size = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    try:
        listener = listening_at(host, int(port))
    except (ValueError, OverflowError, OSError):
        return None
    return store_on(listener, timeout, size), 0, size


def _check_group() -> None:
    """Raises `ConfigError` if the group, which a user may have made, cannot send host memory."""
    if backend_of(torch.device("cpu")) is None:
        raise ConfigError(
            f"the process group cannot carry tensors in host memory (torch.distributed was initialised with {dist.get_backend_config()!r})",
            hint='init_process_group("cpu:gloo,cuda:nccl", ...), or leave it out: whale.parallelize makes the group from the environment',
        )


def _gpu(device: torch.device) -> str:
    """A unique identifier of this rank's GPU, across hosts and visibility masks; empty for a CPU."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(gpus: Sequence[str]) -> str:
    """NCCL if every rank has its own GPU, else Gloo (``cpu:gloo,cuda:nccl`` fails on a CPU build).

    Args:
        gpus: per rank, the identifier of its GPU; empty without one that NCCL can use.
    """
    return "cpu:gloo,cuda:nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def _reason(gpus: Sequence[str]) -> str:
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        return f"rank {without[0]} has no GPU that NCCL can use"
    second = next(rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank])
    return f"ranks {gpus.index(gpus[second])} and {second} share a GPU"


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3)."""
NEVER, NONE = -1, 0
LARGEST_IN_HEAP = 32 << 20
"""Bytes: the largest value of M_MMAP_THRESHOLD that glibc accepts."""
USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES")
"""Prefixes of the environment variables by which users set the allocator."""


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory; no effect with another C library, or if the user has set the allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(USERS_OWN) for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_MMAP_MAX, NONE)
        mallopt(M_TRIM_THRESHOLD, NEVER)


T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Runs an action on every rank and returns this rank's result.
    Raises this rank's own error; if only others failed, the first one's as a `WhaleError` that names its rank.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    for rank, other in enumerate(world.gather_objects(None if error is None else _portable(error))):
        if isinstance(other, WhaleError):
            raise error or type(other)(f"rank {rank}: {other.message}", where=other.where, hint=other.hint)
    return result


def _portable(error: Exception) -> WhaleError:
    """Other libraries' exceptions may not pickle."""
    return error if isinstance(error, WhaleError) else RuntimeFault(f"{type(error).__name__}: {error}")


def on_first_rank(world: World, action: Callable[[], T]) -> T:
    """Runs an action on rank 0 and returns its result, or raises its error, on all ranks."""
    outcome: object = None
    error: Exception | None = None
    if world.rank == 0:
        try:
            outcome = action()
        except Exception as raised:
            error = raised
            outcome = _portable(raised)
    outcome = world.broadcast_object(outcome)
    if isinstance(outcome, WhaleError):
        raise error or outcome
    return outcome  # type: ignore[return-value]


@contextmanager
def imagined_world(rank: int, size: int) -> Iterator[World]:
    """One rank of a world without peers, while the context is open. Raises ConfigError if this process has peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers a backend with torch, which nobody else should see

    if dist.is_initialized():
        raise ConfigError("a dry run was started in a process that is a rank of a process group already", hint="run it without a launcher")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, 0, 1, torch.device("cpu"), timedelta(seconds=60), is_imagined=True)
    finally:
        dist.destroy_process_group()
