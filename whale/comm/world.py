"""The world of ranks that torchrun (or nothing) started: joining it, and doing a thing on every rank such that all succeed or all raise.

A CPU rank keeps the memory that it frees, so that the next pass finds it there. glibc gives the end of its heap back to the kernel when
enough of it is free. A step frees what it has kept, pass by pass, and asks for as much again, page by page: of a pass of 40 ms such pages
took 3 to 7.

    step     F F F  I I I  W W W  F F F
    heap     /-----------------\\  /----     given back, and faulted in anew
    kept     /--------------------------

Tensors of more than 32 MiB it would map one by one, whatever is freed: of a step of 2.7 s whose largest have 50 MB, 60,000 to 110,000
faults took 0.1 to 0.2. They come from the heap, too.
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
import torch.distributed.nn.functional  # keeps the group that is there when it is imported: there is to be none
from torch.distributed.rendezvous import rendezvous

from whale.comm.notice import Notice
from whale.comm.waiting import LINGER_SECONDS, Waits, backend_of, end_together, say_why
from whale.errors import ConfigError, OpFault, RuntimeFault, WhaleError


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Attributes:
        rank, size: as `torch.distributed` numbers them; 0 of 1 without a launcher.
        local_rank, local_size: among the ranks of this host.
        device: where this rank computes.
        timeout: the longest that any wait may take.
        is_imagined: whether the peers are not there (`imagined_world`).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    timeout: timedelta
    is_imagined: bool = False

    @cached_property
    def waits(self) -> Waits:
        """How communication is waited for here."""
        return Waits(self.timeout)

    @cached_property
    def notice(self) -> Notice:
        """Whether this process is about to be ended."""
        return Notice()

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must lie to travel from rank to rank: Gloo sends from host memory only."""
        return self.device if not self.is_alone and backend_of(self.device) == "nccl" else torch.device("cpu")

    @property
    def can_compare(self) -> bool:
        """Whether there are peers to compare notes with."""
        return not self.is_alone and not self.is_imagined

    def gather_objects(self, value: object) -> list[object]:
        """The value of every rank, in rank order, on every rank."""
        if self.is_alone:
            return [value]
        values: list[object] = [None] * self.size
        with self.speaking("comparing notes"):
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        if self.is_alone:
            return value
        box = [value]
        with self.speaking("waiting for what rank 0 decides"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Waits for all ranks."""
        if not self.is_alone:
            with self.speaking("waiting for all ranks"):
                dist.barrier()

    def speaking(self, action: str) -> AbstractContextManager[None]:
        """Around communication with all ranks: what fails in it is a `RuntimeFault` that names the action."""
        return self.waits.speaking(action, [rank for rank in range(self.size) if rank != self.rank])

    @contextmanager
    def all_ranks(self) -> Iterator[None]:
        """Around what all ranks do together: where it fails on this rank in a way that the others do not know of, they are told at once.

        They know of a `WhaleError`: it is raised on all ranks, or was told to them when it was raised, but for an `OpFault`. After
        any other error this rank cannot go on with them.
        """
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, WhaleError) and not isinstance(error, OpFault)
            if not is_known and not self.is_alone:
                say_why(error)
                self.waits.lines.hang_up()
            raise


def connect(timeout_seconds: float) -> World:
    """Joins the process group that is there, or makes it from torchrun's environment, or is a world of one.

    A rank of a group that computes on its CPU keeps the memory that it frees.

    Args:
        timeout_seconds: the longest that any wait may take.

    Raises:
        ConfigError: the group that is there carries no messages of host memory.
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
    atexit.register(_say_why, weakref.ref(world.waits))
    return world


class Closable(Protocol):
    """What holds process groups."""

    def close(self) -> None:
        """Gives them back."""


def close_at_exit(holder: Closable) -> None:
    """Closes a holder of process groups that is still alive when the interpreter ends in good order.

    A group ends its threads when its last holder lets go. Gloo's let go of tensors after the work is done, for which they
    need the interpreter; one that asks for it while it ends aborts the process, so that a run that went well would fail.
    """
    atexit.register(_close, weakref.ref(holder))


def _close(reference: weakref.ref[Closable]) -> None:
    holder = reference()
    if holder is not None and not _has_failed():
        holder.close()


def _leave() -> None:
    """Ends the process group that `connect` made."""
    if dist.is_initialized() and not _has_failed():
        dist.destroy_process_group()


def _say_why(reference: weakref.ref[Waits]) -> None:
    """Leaves the error that ends this process for the others, which have seen nothing of it, and lets them say theirs before it ends."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and dist.is_initialized():
        waits = reference()
        if not isinstance(error, RuntimeFault):
            say_why(error)
            if waits is not None:
                waits.lines.hang_up()
        end_together(LINGER_SECONDS if waits is None else waits.linger_seconds)


def _has_failed() -> bool:
    """Whether an error ends this process: work that peers will never join may be under way, and is not to be waited for."""
    return hasattr(sys, "last_value")


def _device(local_rank: str | None) -> torch.device:
    """The GPU of the rank's number on its host; where no launcher says that, the one that the script has chosen."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, timeout: timedelta) -> None:
    """Makes the process group, over NCCL where that can be.

    The GPU is named to torch: NCCL then makes communicators when a group is made, in one order on all ranks, and not in
    the midst of the first messages.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set(f"gpu of rank {rank}", _gpu(device))
    gpus = [bytes(gpu).decode() for gpu in store.multi_get([f"gpu of rank {other}" for other in range(size)])]
    backend = choose_backend(gpus)
    named = device if "nccl" in backend else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=named)
    if backend == "gloo" and rank == 0 and any(gpus):
        warnings.warn(f"messages between GPUs go through host memory, by Gloo: {_reason(gpus)}; NCCL needs one GPU per rank", stacklevel=3)


def _check_group() -> None:
    """Checks that the group, which a user may have made, carries what lies on the host.

    Raises:
        ConfigError: it does not.
    """
    if backend_of(torch.device("cpu")) is None:
        raise ConfigError(
            f"the process group cannot carry tensors in host memory (torch.distributed was initialised with {dist.get_backend_config()!r})",
            hint='init_process_group("cpu:gloo,cuda:nccl", ...), or leave it out: whale.parallelize makes the group from the environment',
        )


def _gpu(device: torch.device) -> str:
    """What tells this rank's GPU from all others, wherever they are and however many are visible; empty for a CPU."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(gpus: Sequence[str]) -> str:
    """NCCL where every rank has a GPU of its own, Gloo otherwise (``cpu:gloo,cuda:nccl`` fails on a CPU build).

    Args:
        gpus: per rank, the identity of its GPU; empty without one that NCCL can use.
    """
    return "cpu:gloo,cuda:nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def _reason(gpus: Sequence[str]) -> str:
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        return f"rank {without[0]} has none that NCCL can use"
    second = next(rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank])
    return f"ranks {gpus.index(gpus[second])} and {second} share one"


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3): what is free at the end of the heap when that is given back; which pieces are mapped by themselves, and how many."""
NEVER, NONE = -1, 0
LARGEST_IN_HEAP = 32 << 20
"""Bytes: as far as glibc itself raises the limit above which it maps memory for one piece alone."""
USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES")
"""How the names of environment variables begin that say how memory is kept."""


def keep_freed_memory() -> None:
    """Lets this process keep what it frees; where it has another C library, or its user has said how memory is kept, it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(USERS_OWN) for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_MMAP_MAX, NONE)
        mallopt(M_TRIM_THRESHOLD, NEVER)


T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Runs an action on every rank.

    Returns:
        This rank's result.

    Raises:
        Exception: this rank's own error; where only others failed, the first one's as a `WhaleError` that names its rank.
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
    """An error that can travel: other libraries' exceptions may not."""
    return error if isinstance(error, WhaleError) else RuntimeFault(f"{type(error).__name__}: {error}")


def on_first_rank(world: World, action: Callable[[], T]) -> T:
    """Runs an action on rank 0 and gives its result to all.

    Raises:
        Exception: what rank 0 raised, on all ranks.
    """
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
    """One rank of a world that is imagined, for as long as it is open.

    Args:
        rank: this process's.
        size: how many ranks there would be.

    Raises:
        ConfigError: this process has peers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # tells torch of a backend, which nobody else is to see

    if dist.is_initialized():
        raise ConfigError("a dry run was started in a process that is a rank of a process group already", hint="run it without a launcher")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, 0, 1, torch.device("cpu"), timedelta(seconds=60), is_imagined=True)
    finally:
        dist.destroy_process_group()
