"""What goes over the wire of a split group: counted, or carried between threads that stand for its devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.program.shard import Group
from whale.runtime.program.shard.group import Arrival

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """What one device had to do with one collective.

    Attributes:
        what: it was for.
        phase: of the program.
        received, sent: bytes, from and to others. Of an all-reduce: twice all but its share, as in rings and trees.
    """

    what: str
    phase: str
    received: int
    sent: int


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Counting(Group):
    """A group that writes down what passes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        vars(self).update(messages=[], phase="forward")  # the group itself is frozen

    messages: list[Message]
    phase: str

    def enter_phase(self, phase: str) -> None:
        vars(self)["phase"] = phase

    @property
    def rank(self) -> int:
        """In the process group."""
        return self.order.index(self.position)

    def _note(self, what: str, received: int, sent: int) -> None:
        self.messages.append(Message(what, self.phase, received, sent))

    def all_reduce(self, total: Tensor, own: Tensor, how: Any, what: str) -> Arrival:
        share = 2 * num_bytes(own) * (self.size - 1) // self.size
        self._note(what, share, share)
        return super().all_reduce(total, own, how, what)

    def all_gather(self, received: list[Tensor], own: Tensor, what: str) -> Arrival:
        self._note(what, num_bytes(*received) - num_bytes(received[self.rank]), num_bytes(own) * (self.size - 1))
        return super().all_gather(received, own, what)

    def reduce_scatter(self, total: Tensor, pieces: list[Tensor], what: str) -> Arrival:
        self._note(what, num_bytes(total) * (self.size - 1), num_bytes(*pieces) - num_bytes(pieces[self.rank]))
        return super().reduce_scatter(total, pieces, what)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes_received: list[int], sizes_sent: list[int], what: str) -> Arrival:
        element = received.element_size()
        self._note(what, *((sum(sizes) - sizes[self.rank]) * element for sizes in (sizes_received, sizes_sent)))
        return super().all_to_all(received, sent, sizes_received, sizes_sent, what)


class Exchange:
    """Where the threads of one group meet.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=600)
        self._given: list[Any] = [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        """What every thread gives, by rank."""
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


def _arrived() -> None:
    """Nothing is left to wait for."""


class _Threaded(Group):
    """A device that is a thread: its wire is memory."""

    exchange: Exchange
    rank: int

    def all_reduce(self, total: Tensor, own: Tensor, how: Any, what: str) -> Arrival:
        given = torch.stack(self.exchange.swap(self.rank, own.clone()))
        reduced = {dist.ReduceOp.SUM: given.sum(0), dist.ReduceOp.MAX: given.amax(0), dist.ReduceOp.MIN: given.amin(0)}
        total.copy_(reduced[how])
        return _arrived

    def all_gather(self, received: list[Tensor], own: Tensor, what: str) -> Arrival:
        for place, given in zip(received, self.exchange.swap(self.rank, own.clone()), strict=True):
            assert place.shape == given.shape
            place.copy_(given)
        return _arrived

    def reduce_scatter(self, total: Tensor, pieces: list[Tensor], what: str) -> Arrival:
        given = self.exchange.swap(self.rank, [piece.clone() for piece in pieces])
        total.copy_(torch.stack([theirs[self.rank] for theirs in given]).sum(0))
        return _arrived

    def all_to_all(self, received: Tensor, sent: Tensor, sizes_received: list[int], sizes_sent: list[int], what: str) -> Arrival:
        given = self.exchange.swap(self.rank, sent.clone().split(sizes_sent))
        mine = [theirs[self.rank] for theirs in given]
        assert [piece.numel() for piece in mine] == sizes_received
        received.copy_(torch.cat(mine))
        return _arrived


class Device(Counting, _Threaded):
    """A device of a group of threads that counts.

    Args:
        exchange: of its group.
        rank: in the process group that there is not.
        order: per rank, its position.
        is_gloo: whether it does what Gloo needs.
    """

    def __init__(self, exchange: Exchange, rank: int, order: tuple[int, ...], is_gloo: bool) -> None:
        super().__init__(None, tuple(range(len(order))))
        vars(self).update(exchange=exchange, size=len(order), position=order[rank], order=order, is_gloo=is_gloo)

    rank = Counting.rank


_POOL = ThreadPoolExecutor(4)


def on_devices(action: Callable[[Device], T], order: Sequence[int], is_gloo: bool = True) -> list[T]:
    """What every device of a group makes, by position; at most four devices.

    Args:
        action: of one device.
        order: per rank, its position.
        is_gloo: whether they do what Gloo needs.
    """
    exchange = Exchange(len(order))

    def act(rank: int) -> T:
        try:
            return action(Device(exchange, rank, tuple(order), is_gloo))
        except BaseException:
            exchange.abort()
            raise

    running = [_POOL.submit(act, rank) for rank in range(len(order))]
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    found = [future.result() for future in running]
    return [found[list(order).index(position)] for position in range(len(order))]
