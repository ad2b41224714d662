"""A stand-in for NCCL over Gloo, which holds to the rules that Gloo is lenient in; who breaks one gets a `BrokenRule`.

    order       the operations of a communicator run one after another, each when it is the next one on all its ranks
    match       collectives agree on kind, type, sizes, root and sum; messages have no tags: the n-th send of a rank to another
                meets its n-th receive, of the same type and length
    memory      contiguous tensors of the device, of types that NCCL has; in a group of NCCL alone no others
    wait        until it is waited for, a buffer of results holds garbage and is not written, and what is sent does not change; the
                wait is the device's, so it has no time limit
    first use   a communicator connects two ranks when they first meet in it; until then the host waits
    end         a communicator is destroyed when all its operations have been waited for

Each communicator has a thread, which stands for its stream: it tells the other ranks which operation it has come to, and exchanges what
that moves, through one Gloo group beside. What is a device's goes this way: all tensors of the stand-in device (`tests.standin`); or,
where the CPU stands for a GPU, what whale sends, but for what it sends from host memory on a GPU too (`_FROM_HOST`).

``WHALE_TEST_NETWORK=strict`` runs distributed tests on it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce as fold
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import whale.comm.clocks
import whale.comm.groups
import whale.comm.waiting
import whale.comm.world
import whale.runtime.checkpoint.surviving
import whale.runtime.program.shard.group
from tests.counts import count
from tests.standin import DEVICE, OnDevice
from whale.runtime.checkpoint.copies import StateCopies
from whale.runtime.execute.call_check import WorldSums
from whale.runtime.execute.equal_copies import EqualCopies

PATIENCE_SECONDS = 240.0
"""Of a machine that is busy; what is not the next operation of all its ranks by then never is."""

TYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
)
"""That NCCL has."""

_FROM_HOST = frozenset(
    each.__code__
    for each in (
        whale.comm.clocks.compare_clocks,
        whale.comm.waiting.Lines.close_all,
        whale.runtime.checkpoint.surviving._travel,
        EqualCopies._check_numbers,
        StateCopies._travel,
        WorldSums.report,
    )
)
_PATCHED = (
    "all_gather", "all_reduce", "all_to_all_single", "batch_isend_irecv", "broadcast", "destroy_process_group", "irecv", "isend",
    "new_group", "reduce", "reduce_scatter",
)  # fmt: skip
_backend_of = whale.comm.waiting.backend_of
_GLOO: dict[str, Any] = {name: getattr(dist, name) for name in _PATCHED}
_COMBINED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
GARBAGE = 0xFF
"""In each byte: NaN as a floating point number, -1 as an integer."""
_LENGTH = 512
"""Bytes of what ranks tell each other of an operation."""


class BrokenRule(RuntimeError):
    """What would hang, fail or be wrong with NCCL."""


Values = Sequence[Tensor]
Results = Callable[[Mapping[int, Values]], Values]
"""What an operation writes to its outputs, by what it gets from each rank."""


@dataclass(eq=False)
class Operation:
    """One operation of a communicator; to whale, the work that `torch.distributed` returns.

    Attributes:
        kind: its name.
        said: per other rank in it, what both ends say of it.
        outputs, inputs: tensors of the caller.
        given: per other rank, what goes there.
        room: per other rank, tensors like what comes from there.
        results: what the outputs hold afterwards.
    """

    communicator: Communicator
    kind: str
    said: Mapping[int, str]
    outputs: Values
    inputs: Values
    given: Mapping[int, Values]
    room: Mapping[int, Values]
    results: Results
    is_done: threading.Event = field(default_factory=threading.Event)
    was_waited: bool = False
    error: BaseException | None = None
    _found: Values = ()

    def __post_init__(self) -> None:
        for each in self.outputs:
            _bytes(each).fill_(GARBAGE)
        self._before = [(each, _numbers(each).clone()) for each in (*self.outputs, *self.inputs)]

    def __str__(self) -> str:
        return f"{self.kind} on {self.communicator}"

    def run(self) -> None:
        """In the thread of the communicator."""
        received = self.communicator.exchange(self.said, self.given, self.room)
        self._found = self.results(received)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            raise self.communicator.broken(f"the host waits for {self}")
        self.until_done()
        if self.error is not None:
            raise self.error
        if not self.was_waited:
            self.was_waited = True
            for each, before in self._before:
                if not torch.equal(_bytes(each), _bytes(before)):
                    raise self.communicator.broken(f"memory of {self} was written before its wait")
            for each, found in zip(self.outputs, self._found, strict=True):
                _bytes(each).copy_(_bytes(found))
        return True

    def until_done(self) -> None:
        if not self.is_done.wait(PATIENCE_SECONDS):
            raise self.communicator.broken(f"{self} was never the next operation of all its ranks")

    def is_completed(self) -> bool:
        return self.is_done.is_set()


class Communicator:
    """A queue of operations, and the thread that runs them.

    Args:
        number: equal on all ranks.
        ranks: its ranks, in order.
    """

    def __init__(self, network: Network, number: int, ranks: Sequence[int]) -> None:
        self.network, self.number, self.ranks = network, number, tuple(ranks)
        self.rank = dist.get_rank()
        self.others = [rank for rank in self.ranks if rank != self.rank]
        self._met: set[object] = set()
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self.open: list[Operation] = []
        threading.Thread(target=self._run, daemon=True, name=str(self)).start()

    def __str__(self) -> str:
        return f"communicator {self.number} of ranks {self.ranks}"

    def broken(self, text: str) -> BrokenRule:
        return self.network.broken_by(text)

    def launch(
        self,
        kind: str,
        said: Mapping[int, str],
        outputs: Values,
        inputs: Values,
        given: Mapping[int, Values],
        room: Mapping[int, Values],
        results: Results,
    ) -> Operation:
        """Starts an operation."""
        for each in (*outputs, *inputs):
            self._check(each, kind)
        operation = Operation(self, kind, said, outputs, inputs, given, room, results)
        self.network.launches[kind] += 1
        self.open = [each for each in self.open if not each.was_waited]
        self.open.append(operation)
        self._queue.put(operation)
        meets = {*said} if kind in ("send", "receive", "batch") else {"all"}
        if not meets <= self._met:
            self._met |= meets
            operation.until_done()
        return operation

    def collective(
        self, kind: str, details: str, outputs: Values, inputs: Values, given: Mapping[int, Values], room: Mapping[int, Values], to: Results
    ) -> Operation:
        """Starts what all ranks must agree on."""
        return self.launch(kind, dict.fromkeys(self.others, f"{kind} of {details}"), outputs, inputs, given, room, to)

    def _check(self, tensor: Tensor, kind: str) -> None:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise self.broken(f"{kind} of what is not contiguous: {tuple(tensor.shape)}, {tensor.layout}")
        if tensor.dtype not in TYPES:
            raise self.broken(f"{kind} of {tensor.dtype}, which NCCL has not")

    def exchange(self, said: Mapping[int, str], given: Mapping[int, Values], room: Mapping[int, Values]) -> dict[int, Values]:
        """Compares what is said with the other ranks, and swaps values with them."""
        texts = {rank: _encoded(f"rank {self.rank}: {text}") for rank, text in said.items()}
        heard = self._swap({rank: [text] for rank, text in texts.items()}, {rank: [text] for rank, text in texts.items()}, 2 * self.number)
        for rank, (text,) in heard.items():
            theirs = bytes(text.tolist()).rstrip(b"\0").decode().partition(": ")[2]
            if theirs != said[rank][: len(theirs)] or not theirs:
                raise self.broken(f"on {self}, rank {self.rank} has come to {said[rank]}; rank {rank} to {theirs}")
        return self._swap(given, room, 2 * self.number + 1)

    def _swap(self, given: Mapping[int, Values], room: Mapping[int, Values], tag: int) -> dict[int, Values]:
        leaving = {rank: torch.cat([_bytes(each) for each in values]) for rank, values in given.items() if values}
        coming = {rank: torch.empty(sum(each.nbytes for each in values), dtype=torch.uint8) for rank, values in room.items() if values}
        twin = self.network.twin
        works = [_GLOO["isend"](flat, rank, group=twin, tag=tag) for rank, flat in leaving.items() if len(flat)]
        works += [_GLOO["irecv"](flat, rank, group=twin, tag=tag) for rank, flat in coming.items() if len(flat)]
        for work in works:
            work.wait()
        found: dict[int, Values] = {}
        for rank, flat in coming.items():
            parts = flat.split([each.nbytes for each in room[rank]])
            found[rank] = [part.clone().view(each.dtype).view(each.shape) for part, each in zip(parts, room[rank], strict=True)]
        return found

    def _run(self) -> None:
        error: BaseException | None = None
        while (operation := self._queue.get()) is not None:
            try:
                if error is None:
                    operation.run()
            except BaseException as raised:  # the others cannot run either
                error = raised
            operation.error = error
            operation.is_done.set()

    def close(self) -> None:
        """Ends the thread; every operation must have been waited for, unless one has failed."""
        left = [each for each in self.open if not each.was_waited]
        self._queue.put(None)
        if left and all(each.error is None for each in left) and sys.exc_info()[0] is None:
            raise self.broken(f"{self} is destroyed, and nobody has waited for {', '.join(each.kind for each in left)}")


class Network:
    """What carries the operations of this process.

    Args:
        device: whose tensors they are.

    Attributes:
        launches: how many of each kind.
        broken: what has been said of rules that were broken.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_stand_in = device == DEVICE
        self.launches, self.broken = Counter[str](), list[str]()
        self.twin = _GLOO["new_group"](timeout=timedelta(seconds=PATIENCE_SECONDS))
        self._num_made, self._without_gloo = 0, set[object]()
        self.communicators = {dist.group.WORLD: Communicator(self, 0, range(dist.get_world_size()))}

    def carries(self, group: Any, *tensors: Tensor) -> bool:
        """Whether an operation is a device's."""
        ours = [isinstance(each, OnDevice) if self.is_stand_in else not _is_from_host() for each in tensors]
        if any(ours) != all(ours):
            raise self.broken_by("an operation on tensors of the device and of the host")
        if not any(ours) and group in self._without_gloo:
            raise self.broken_by("host memory in a group of NCCL alone")
        return any(ours)

    def broken_by(self, text: str) -> BrokenRule:
        self.broken.append(text)
        return BrokenRule(text)

    def of(self, group: dist.ProcessGroup | None) -> Communicator:
        return self.communicators[dist.group.WORLD if group is None else group]

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None, **more: Any) -> Any:
        made = _GLOO["new_group"](ranks, **more)
        if backend == "nccl":
            self._without_gloo.add(made)
        self._num_made += 1
        members = range(dist.get_world_size()) if ranks is None else ranks
        if dist.get_rank() in members:
            self.communicators[made] = Communicator(self, self._num_made, members)
        return made

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        if group in self.communicators:
            self.communicators.pop(group).close()
        _GLOO["destroy_process_group"](group)

    def backend_of(self, device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
        is_ours = device == DEVICE if self.is_stand_in else device.type == "cpu" and not _is_from_host()
        if is_ours:
            return "nccl"
        return None if group in self._without_gloo else _backend_of(device, group)

    def blocks_host(self, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
        return self.backend_of(device, group) != "nccl"

    # -- as torch.distributed has them -----------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not self.carries(group, tensor):
            return _GLOO["all_reduce"](tensor, op, group, async_op)
        comm, own = self.of(group), _numbers(tensor).clone()
        terms = dict.fromkeys(comm.others, (own,))
        details = f"{_like(own)}, {op}"
        return _started(comm.collective("all-reduce", details, [tensor], [], terms, terms, _sum_of(comm, own, op)), async_op)

    def reduce(self, tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not self.carries(group, tensor):
            return _GLOO["reduce"](tensor, dst, op, group, async_op)
        comm, own = self.of(group), _numbers(tensor).clone()
        is_root = comm.rank == dst
        given, room = ({}, dict.fromkeys(comm.others, (own,))) if is_root else ({dst: [own]}, {})
        results = _sum_of(comm, own, op) if is_root else lambda _: [_garbage(own)]
        return _started(comm.collective("reduce", f"{_like(own)}, {op}, to {dst}", [tensor], [], given, room, results), async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        if not self.carries(group, tensor):
            return _GLOO["broadcast"](tensor, src, group, async_op)
        comm, own = self.of(group), _numbers(tensor).clone()
        details = f"{_like(own)}, from {src}"
        if comm.rank == src:
            work = comm.collective("broadcast", details, [], [tensor], dict.fromkeys(comm.others, (own,)), {}, lambda _: [])
        else:
            work = comm.collective("broadcast", details, [tensor], [], {}, {src: [own]}, lambda found: found[src])
        return _started(work, async_op)

    def all_gather(self, tensor_list: Values, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not self.carries(group, tensor, *tensor_list):
            return _GLOO["all_gather"](tensor_list, tensor, group, async_op)
        comm, own = self.of(group), _numbers(tensor).clone()
        rooms = {rank: [_numbers(room)] for rank, room in zip(comm.ranks, tensor_list, strict=True)}
        self._check_own(comm, own, rooms.pop(comm.rank)[0])
        details = _alike(tensor_list)
        given = dict.fromkeys(comm.others, (own,))

        def results(found: Mapping[int, Values]) -> Values:
            return [own if rank == comm.rank else found[rank][0] for rank in comm.ranks]

        return _started(comm.collective("all-gather", details, tensor_list, [tensor], given, rooms, results), async_op)

    def reduce_scatter(
        self, output: Tensor, input_list: Values, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not self.carries(group, output, *input_list):
            return _GLOO["reduce_scatter"](output, input_list, op, group, async_op)
        comm = self.of(group)
        pieces = {rank: [_numbers(each).clone()] for rank, each in zip(comm.ranks, input_list, strict=True)}
        (own,) = pieces.pop(comm.rank)
        self._check_own(comm, _numbers(output), own)
        details, room = f"{_alike(input_list)}, {op}", dict.fromkeys(comm.others, (own,))
        work = comm.collective("reduce-scatter", details, [output], input_list, pieces, room, _sum_of(comm, own, op))
        return _started(work, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not self.carries(group, output, input):
            return _GLOO["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group, async_op)
        comm = self.of(group)
        pieces = dict(zip(comm.ranks, _numbers(input).clone().split(input_split_sizes), strict=True))
        rooms = dict(zip(comm.ranks, _numbers(output).split(output_split_sizes), strict=True))
        own = pieces.pop(comm.rank)
        self._check_own(comm, own, rooms.pop(comm.rank))
        said = {}
        for rank in comm.others:
            ways = {comm.rank: pieces[rank], rank: rooms[rank]}
            said[rank] = f"all-to-all with {', '.join(f'{_like(ways[each])} of {each}' for each in sorted(ways))}"

        def results(found: Mapping[int, Values]) -> Values:
            return [torch.cat([own if rank == comm.rank else found[rank][0] for rank in comm.ranks])]

        given, room = ({rank: [each] for rank, each in of.items()} for of in (pieces, rooms))
        return _started(comm.launch("all-to-all", said, [output], [input], given, room, results), async_op)

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        if not self.carries(group, tensor):
            return _GLOO["isend"](tensor, dst, group, tag)
        comm, own = self.of(group), _numbers(tensor).clone()
        said = {dst: f"message from {comm.rank} to {dst} of {_like(own)}"}
        return comm.launch("send", said, [], [tensor], {dst: [own]}, {}, lambda _: [])

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        if not self.carries(group, tensor):
            return _GLOO["irecv"](tensor, src, group, tag)
        comm = self.of(group)
        said = {src: f"message from {src} to {comm.rank} of {_like(tensor)}"}
        return comm.launch("receive", said, [tensor], [], {}, {src: [_numbers(tensor)]}, lambda found: found[src])

    def batch_isend_irecv(self, p2p_op_list: Sequence[dist.P2POp]) -> Any:
        if not self.carries(p2p_op_list[0].group, *(each.tensor for each in p2p_op_list)):
            return _GLOO["batch_isend_irecv"](p2p_op_list)
        comm = self.of(p2p_op_list[0].group)
        sends, receives = ([each for each in p2p_op_list if each.op == way] for way in (dist.isend, dist.irecv))
        given: dict[int, list[Tensor]] = {each.peer: [] for each in p2p_op_list}
        room: dict[int, list[Tensor]] = {each.peer: [] for each in p2p_op_list}
        for each in sends:
            given[each.peer].append(_numbers(each.tensor).clone())
        for each in receives:
            room[each.peer].append(_numbers(each.tensor))
        said = {}
        for peer in given:
            ways = {comm.rank: given[peer], peer: room[peer]}
            said[peer] = f"messages with {', '.join(f'{_alike(ways[each])} of {each}' for each in sorted(ways))}"

        def results(found: Mapping[int, Values]) -> Values:
            arrived = {peer: iter(values) for peer, values in found.items()}
            return [next(arrived[each.peer]) for each in receives]

        return [comm.launch("batch", said, [each.tensor for each in receives], [each.tensor for each in sends], given, room, results)]

    def _check_own(self, comm: Communicator, one: Tensor, other: Tensor) -> None:
        if (one.numel(), one.dtype) != (other.numel(), other.dtype):
            raise comm.broken(f"a rank's part of its own is {_like(one)} and {_like(other)}")


def _sum_of(comm: Communicator, own: Tensor, op: Any) -> Results:
    """In the order of ranks, so that all have the same bits."""
    return lambda found: [fold(_COMBINED[op], [own if rank == comm.rank else found[rank][0] for rank in comm.ranks])]


def _started(work: Operation, async_op: bool) -> Operation | None:
    if async_op:
        return work
    work.wait()
    return None


def _numbers(tensor: Tensor) -> Tensor:
    """A tensor's memory, whose writes autograd does not see."""
    return tensor.held.data if isinstance(tensor, OnDevice) else tensor.data


def _bytes(tensor: Tensor) -> Tensor:
    return _numbers(tensor).view(-1).view(torch.uint8)


def _garbage(like: Tensor) -> Tensor:
    made = torch.empty_like(like)
    _bytes(made).fill_(GARBAGE)
    return made


def _like(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


def _alike(tensors: Values) -> str:
    return " + ".join(map(_like, tensors))


def _encoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()[:_LENGTH].ljust(_LENGTH, b"\0")), dtype=torch.uint8)


def _is_from_host() -> bool:
    """Whether the caller sends host memory, on a GPU too; tests send such of their own."""
    frame, sender = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code in _FROM_HOST:
            return True
        if not sender and name != __name__ and not name.startswith("torch."):
            sender = name
        frame = frame.f_back
    return not sender.startswith("whale.")


@contextmanager
def strict_network(device: torch.device | None = None) -> Iterator[Network]:
    """Within it, inside a Gloo world of several ranks, this process sends by the rules of NCCL what is a device's.

    Args:
        device: of its tensors: the stand-in device, or the CPU.

    Raises:
        BrokenRule: at the end, where a rule was broken, whoever has caught it; all operations must have been waited for.
    """
    network = Network(torch.device("cpu") if device is None else device)
    with ExitStack() as stack:
        for name in _PATCHED:
            stack.enter_context(mock.patch.object(dist, name, getattr(network, name)))
        for name in ("isend", "irecv"):  # by which `P2POp` knows them
            stack.enter_context(mock.patch.object(dist.distributed_c10d, name, getattr(network, name)))
        for module in (whale.comm.waiting, whale.comm.world, whale.comm.groups, whale.runtime.program.shard.group):
            for name in ("backend_of", "blocks_host"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, getattr(network, name)))
        yield network
        for communicator in network.communicators.values():
            communicator.close()
    for kind, number in network.launches.items():
        count(f"launches: {kind}", number)
    if network.broken:
        raise BrokenRule("; ".join(network.broken))
