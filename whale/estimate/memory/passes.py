"""Memory of a pass through a stage besides what is kept, op by op: values in the forward pass, gradients in the backward pass.

forward    values that no later op reads are freed, unless they are kept or handed on
backward   gradients   alive from the backward pass of the last reader to that of the op; those of parameters until they are added
           kept        until the backward pass of the first op that keeps it
           a segment   is recomputed at its last op's turn, and all that its ops keep is alive until their turns

    kept    |##########|########  |######    |####      |##        |
    beside  |          |###       |######    |####      |###       |
                                   ^ fullest: neither where most is kept nor where an op needs most

A split group makes copies of tensors in another form (whole, or another shard) for some ops:

forward    from its first user to its last, or kept for the backward pass; of a sum, each device's own term
backward   where it is not kept, remade: with its segment, or for the ops that need it
           its gradient, from its last user to its first: then it becomes one of the shard
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale.axes.operators import operator_of
from whale.estimate.costs.line import Floats, Line
from whale.estimate.memory.memory import kept_for_weights, place_share, weight_share
from whale.ir.graph import ModelGraph, Op
from whale.sharding.buckets import NUM_AT_ONCE

Bytes = complex
"""Bytes by the rows of a micro-batch: those that are fixed and, as imaginary part, those of each row."""

PerOp = NDArray[np.complex128]
"""Such bytes that are alive while each op of a stage runs."""


def as_bytes(line: Line) -> Bytes:
    return complex(line.fixed, line.per_row)


def bytes_at(states: PerOp, num_rows: float) -> Floats:
    """Bytes with a number of rows."""
    found: Floats = states.real + states.imag * num_rows
    return found


def line_of(states: PerOp, num_rows: float) -> Line:
    """The fullest of some states at a number of rows; zero of none."""
    if not len(states):
        return Line()
    fullest = states[int(bytes_at(states, num_rows).argmax())]
    return Line(float(fullest.real), float(fullest.imag))


@dataclass(frozen=True, slots=True)
class BridgedTensor:
    """A form of a tensor on one device."""

    users: tuple[str, ...]  # the ops of the stage that read it, in order; of a term of a sum, the op that makes it
    keepers: tuple[str, ...]  # ops whose backward passes need it
    num_bytes: Bytes
    is_kept: bool  # whether it is alive from the forward pass on
    has_gradient: bool  # whether a gradient of this form returns, and becomes another


@dataclass(frozen=True)
class BridgedTensors:
    """The forms that a stage has on one device; `segments` are the recomputed runs of its ops."""

    all: tuple[BridgedTensor, ...]
    ops: Sequence[str]
    segments: Sequence[Sequence[str]] = ()

    @cached_property
    def forward(self) -> PerOp:
        """In a forward pass, besides those that are kept."""
        return self._between((self._at[form.users[0]], self._at[form.users[-1]], form) for form in self.all if not form.is_kept)

    @cached_property
    def remade(self) -> PerOp:
        """In a backward pass, those that were remade."""
        made = (form for form in self.all if form.keepers and not form.is_kept)
        return self._between((self._at[form.users[0]], self._last[form.users[0]] or self._at[form.keepers[-1]], form) for form in made)

    @cached_property
    def gradients(self) -> PerOp:
        """In a backward pass, their gradients."""
        return self._between((self._at[form.users[0]], self._at[form.users[-1]], form) for form in self.all if form.has_gradient)

    @cached_property
    def freed(self) -> PerOp:
        """In a backward pass, those that were kept and have been freed."""
        return self._between((0, self._at[form.users[0]] - 1, form) for form in self.all if form.is_kept)

    @cached_property
    def _at(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.ops)}

    @cached_property
    def _last(self) -> Mapping[str, int]:
        """Per op, the index of the last op of its segment; 0 outside segments."""
        return dict.fromkeys(self.ops, 0) | {name: self._at[segment[-1]] for segment in self.segments for name in segment}

    def _between(self, spans: Iterable[tuple[int, int, BridgedTensor]]) -> PerOp:
        found = np.zeros(len(self.ops), dtype=np.complex128)
        for first, last, form in spans:
            found[first : last + 1] += form.num_bytes
        return found


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A bucket of weights that a pass fetches for its first reader, and frees behind its last."""

    num_bytes: float
    received: float  # bytes of a copy in which they arrive, from when it is started until they have arrived; 0: they arrive in place
    first: int  # position in the graph of the first op that reads them
    last: int  # of the last
    is_read_backward: bool


@dataclass(frozen=True)
class Fetching:
    """The weights that are there while a pass runs its steps: each bucket is started when the one before it is needed."""

    beside: Floats  # bytes while each step runs
    arriving: Floats  # bytes before each step at which some arrive; 0 at others

    @staticmethod
    def of(num_steps: int, buckets: Sequence[tuple[FetchedWeights, int, int]]) -> Fetching:
        """`buckets`: in the order in which they are started, with the steps that need them first and last."""
        beside, arriving, start = np.zeros(num_steps), np.zeros(num_steps), num_steps
        starts = [0] * len(buckets)
        for number in range(len(buckets) - 1, -1, -1):  # each is started with the one before it, or for a later one
            starts[number] = start = min(start, buckets[max(0, number - 1)][1])
        for begin, (bucket, need, end) in zip(starts, buckets, strict=True):
            beside[begin:need] += bucket.received or bucket.num_bytes
            beside[need : end + 1] += bucket.num_bytes
        for number, (bucket, need, _) in enumerate(buckets):
            later = [own for own, same, _ in buckets[number + 1 :] if same == need]  # of which the next is on its way, the others wait
            on_their_way = sum(own.received or own.num_bytes for own in later[:1]) - sum(own.num_bytes for own in later)
            arriving[need] = max(arriving[need], beside[need] + bucket.received + on_their_way)
        return Fetching(beside, arriving)


@dataclass(frozen=True, slots=True)
class SummedGradients:
    """A bucket of gradients that is summed in the last backward pass, as soon as it is whole."""

    place: int  # position in the graph of the op whose backward pass makes the last of them
    gathered: float = 0.0  # bytes of a buffer to which they are copied, and then freed
    sent: float = 0.0  # bytes that are there beside them, until the sum has arrived
    freed: float = 0.0  # bytes that the device does not keep when it has arrived
    is_copied: bool = False  # whether the device then copies what it keeps from the buffer, before that is freed


_NO_SUM = SummedGradients(0)


@dataclass(frozen=True, slots=True)
class Fullest:
    """The state of a backward pass at its peak, in bytes."""

    freed: float = 0.0  # of what was kept, freed by then
    recomputed: float = 0.0  # restored: the recomputed segment, and what came from the host
    gradients: float = 0.0  # of parameters, kept from now on
    working: float = 0.0  # activation gradients, and gradients of parameters until they are added


_State = tuple[Bytes, Bytes, Bytes, Bytes]
"""The fields of `Fullest`."""


@dataclass(frozen=True)
class BackwardStates:
    """The states of a backward pass, in order: ``[4, states]`` for the fields of `Fullest`; gradients of parameters as if all stayed."""

    states: PerOp

    @staticmethod
    def of(states: Iterable[_State]) -> BackwardStates:
        return BackwardStates(np.array([*states], dtype=np.complex128).reshape(-1, 4).T)

    @cached_property
    def totals(self) -> PerOp:
        """Bytes in each, beyond what is kept."""
        freed, recomputed, gradients, working = self.states
        found: PerOp = working + gradients + recomputed - freed
        return found

    def fullest(self, num_rows: float, besides: Floats | float = 0.0) -> Fullest:
        """The pass at its peak; `besides`: bytes of gradients in each state, beyond those that stay."""
        if not self.states.size:
            return Fullest()
        freed, recomputed, gradients, working = bytes_at(self.states, num_rows)
        gradients = gradients + besides
        at = int((working + gradients + recomputed - freed).argmax())
        return Fullest(*(float(each[at]) for each in (freed, recomputed, gradients, working)))


@dataclass(frozen=True)
class SummingStates:
    """The states of a backward pass, with one after each op, in which sums of gradients start."""

    states: BackwardStates
    places: NDArray[np.float64]  # per state, the position of its op in the graph; of those after the op, half of one less

    def fullest(self, num_rows: float, sums: Sequence[SummedGradients]) -> Fullest:
        """The pass at its peak; `sums`: of its buckets, in the order in which they start. As many as may be are in flight."""
        starts = np.minimum.accumulate([float(each.place) for each in sums])  # none before the one ahead of it
        sent, freed = (np.concatenate(([0.0], np.cumsum(each))) for each in zip(*((own.sent, own.freed) for own in sums), strict=True))
        arrived = np.maximum(np.arange(len(sent)) - NUM_AT_ONCE, 0)  # by the number that have started
        in_flight = sent - sent[arrived] - freed[arrived]
        besides: Floats = in_flight[np.searchsorted(-starts, -self.places, side="left")]  # with those of earlier ops
        for number, (start, each) in enumerate(zip(starts, sums, strict=True)):  # one after the other, also where several start at once
            taken = sums[number - NUM_AT_ONCE] if number >= NUM_AT_ONCE else _NO_SUM
            # what is sent is made of the buffer when the gradients are freed; what is kept, of the one before the last, first
            most = max(each.gathered - each.sent, taken.gathered if taken.is_copied else 0.0, 0.0)
            here = self.places == start - 0.5
            besides[here] = np.maximum(besides[here], in_flight[number + 1] + most)
        return self.states.fullest(num_rows, besides)


@dataclass(frozen=True)
class PassStates:
    """What the passes of a stage hold besides what is kept."""

    forward: PerOp  # F, beyond what it leaves
    recompute: PerOp  # R, beyond what it leaves
    later: BackwardStates  # B (or I); gradients of parameters are there already

    def working(self, num_rows: float) -> Line:
        """The peak of F, R and B as a line that is exact about a number of rows."""
        return line_of(np.concatenate((self.forward, self.recompute, self.later.totals)), num_rows)


@dataclass(frozen=True)
class Passes:
    """The passes of one stage."""

    graph: ModelGraph  # the model; of a split stage, this device's part
    num_bytes: Mapping[str, Bytes]  # per op, of its results
    ops: tuple[str, ...]  # of the stage
    kept: Mapping[str, tuple[str, ...]]  # per op, what it keeps (`kept_tensors`)
    segments: tuple[tuple[str, ...], ...]  # runs of ops that are recomputed
    crossing: Collection[str]  # storages received or handed on: alive from the forward pass to the end of the backward pass
    parameter_bytes: Mapping[str, float]  # per trained parameter, bytes of its gradient
    divided: Collection[str] = ()  # ops that work on parts of what they contract, and are one op there
    forms: tuple[BridgedTensor, ...] = ()  # of tensors, that the split group makes
    offloads: bool = False  # whether what is kept waits on the host until the backward pass of the last op that keeps it
    fetched: tuple[FetchedWeights, ...] = ()  # in the order in which a forward pass starts them
    in_halves: bool = False  # whether each op runs twice, on half of the rows, so that each parameter has two gradients
    _backward: dict[tuple[frozenset[str], bool], BackwardStates] = field(default_factory=dict, init=False)
    _summing: dict[frozenset[str], SummingStates] = field(default_factory=dict, init=False)
    _weights: dict[frozenset[str], SummingStates] = field(default_factory=dict, init=False)

    def forward(self, left: Collection[str]) -> PerOp:
        """Bytes at each point of a forward pass beyond the storages `left`, which it leaves."""
        if not self.fetched:
            return self._forward(self.ops, frozenset(left), self.formed.forward)
        return self._forward(self.ops, frozenset(left), self.formed.forward + self._fetching.beside, self._fetching.arriving)

    def _forward(self, ops: Sequence[str], left: frozenset[str], forms: PerOp, before: Floats | None = None) -> PerOp:
        storage, by_name = self.graph.storage, self.graph.by_name
        last = {storage[name]: index for index, op in enumerate(ops) for name in (op, *by_name[op].inputs)}
        made = self.made.intersection(ops)
        alive: Bytes = 0.0
        states = [alive]
        for index, name in enumerate(ops):
            if before is not None:
                states.append(alive + before[index])
            alive += self.num_bytes[name] if name in made else 0.0
            states.append(alive + forms[index] + self.inside(by_name[name]))
            for root in {storage[name], *(storage[source] for source in by_name[name].inputs)}:
                if root in made and last[root] == index and root not in left:
                    alive -= self.num_bytes[root]
        return np.array(states, dtype=np.complex128) - alive

    def inside(self, op: Op) -> Bytes:
        """Bytes that an op needs besides what it reads and makes."""
        return self.num_bytes[op.inputs[0]] if operator_of(op).is_two and op.name not in self.divided else 0.0

    def backward(self, *, stay: Collection[str] = (), defers_weights: bool = False) -> BackwardStates:
        """A backward pass.

        Args:
            stay: parameters whose gradients it makes, and leaves.
            defers_weights: whether weight gradients are left to W, so that what they need stays.
        """
        key = frozenset(stay), defers_weights
        if key not in self._backward:
            self._backward[key] = BackwardStates.of(_Backward(self, stay, defers_weights).walk())
        return self._backward[key]

    def summing(self, stay: Collection[str]) -> SummingStates:
        """A backward pass in which gradients are summed; `stay` as of `backward`."""
        key = frozenset(stay)
        if key not in self._summing:
            walk, states, places = _Backward(self, stay, is_summing=True), list[_State](), list[float]()
            for state in walk.walk():
                states.append(state)
                places.append(walk.position)
            self._summing[key] = SummingStates(BackwardStates.of(states), np.array(places))
        return self._summing[key]

    def weights(self, stay: Collection[str]) -> SummingStates:
        """A pass for the weight gradients that were left to it; `stay` as of `backward`.

        In the order of backward passes each op's gradients are made, and then what it waited with is freed.
        """
        key = frozenset(stay)
        if key not in self._weights:
            states, places = list[_State](), list[float]()
            left = Counter(each for waits in self.waiting.values() for each in waits)
            new = key.intersection(name for op in self.waiting for name in self.trained_by(op))
            freed, stays = 0j, sum(self.parameter_bytes[name] for name in key - new)
            for op, waits in reversed([*self.waiting.items()]):
                made = {*self.trained_by(op)}
                stays += sum(self.parameter_bytes[name] for name in made & new)
                states.append((freed, 0.0, stays, sum(self.parameter_bytes[name] for name in made - new)))
                new -= made
                left.subtract(waits)
                freed += sum(self.num_bytes[each] for each in waits if not left[each])
                states.append((freed, 0.0, stays, 0.0))
                places += self.graph.position[op], self.graph.position[op] - 0.5
            self._weights[key] = SummingStates(BackwardStates.of(states), np.array(places))
        return self._weights[key]

    @cached_property
    def _fetching(self) -> Fetching:
        return Fetching.of(len(self.ops), [(each, self._step(each.first), self._step(each.last)) for each in self.fetched])

    @cached_property
    def fetching_back(self) -> Fetching:
        """`Fetching` of a backward pass, by the ops in their order; a recomputed segment needs its weights when it begins.

        Weights are freed once the gradients of what their first reader reads are complete: where it reads none, when the pass ends.
        """
        last, ends = len(self.ops) - 1, dict[int, int]()
        for segment in self.segments:
            end = self.ops.index(segment[-1])
            ends |= dict.fromkeys(range(end - len(segment) + 1, end + 1), end)
        again = sorted((each for each in self.fetched if each.is_read_backward), key=lambda each: -each.last)
        steps = ((each, start if self._reads_gradients(start := self._step(each.first)) else 0, self._step(each.last)) for each in again)
        found = Fetching.of(len(self.ops), [(each, last - ends.get(end, end), last - start) for each, start, end in steps])
        return Fetching(found.beside[::-1], found.arriving[::-1])

    def _reads_gradients(self, step: int) -> bool:
        read = (self.graph.by_name[name] for name in self.graph.by_name[self.ops[step]].inputs)
        return any(op.kind == "call" and op.requires_grad for op in read)

    def _step(self, position: int) -> int:
        """The index among the ops of the one at a position of the graph."""
        return min(bisect_left(self.positions, position), len(self.ops) - 1)

    @cached_property
    def positions(self) -> Sequence[int]:
        return [self.graph.position[name] for name in self.ops]

    @cached_property
    def formed(self) -> BridgedTensors:
        return BridgedTensors(self.forms, self.ops, self.segments)

    @cached_property
    def made(self) -> frozenset[str]:
        """The ops of the stage whose results own their storage."""
        return frozenset(op for op in self.ops if self.graph.storage[op] == op)

    @cached_property
    def largest_gradient(self) -> float:
        return max((self.parameter_bytes[name] for name in self.uses), default=0.0)

    @cached_property
    def waiting(self) -> Mapping[str, tuple[str, ...]]:
        """Per op whose weight gradients can be left to a pass of their own, what waits for it: gradients go by their op's name."""
        return {op: tuple(kept_for_weights(self.graph, [op])) for op in self.ops if weight_share(self.graph, op)}

    @cached_property
    def uses(self) -> Counter[str]:
        """How many ops read each trained parameter."""
        return Counter(name for op in self.ops for name in self.trained_by(op))

    def trained_by(self, op: str) -> Iterator[str]:
        """The parameters that get gradients from an op."""
        return (each.name for each in self.graph.parameters_among(self.graph.by_name[op].inputs) if each.name in self.parameter_bytes)

    @cached_property
    def segment_of(self) -> Mapping[str, int]:
        """Per op of a segment, the segment's index."""
        return {op: number for number, segment in enumerate(self.segments) for op in segment}

    @cached_property
    def frees(self) -> Mapping[str, tuple[str, ...]]:
        """Per op, the storages outside segments that its backward pass frees: those that it is the first to keep."""
        return self._by_keeper(reversed(self.ops), 0)

    @cached_property
    def returns(self) -> Mapping[str, tuple[str, ...]]:
        """Per op, the storages fetched from the host for its backward pass: those that it is the last to keep."""
        return self._by_keeper(self.ops, -1) if self.offloads else {}

    def _by_keeper(self, ops: Iterable[str], place: int) -> dict[str, tuple[str, ...]]:
        """Storages outside segments by the last op (in this order) that keeps them; a segment keeps its inputs at its first or last op."""
        keeper: dict[str, str] = {}
        for op in ops:
            own = self.segment_of.get(op)
            if own is None:
                keeper |= dict.fromkeys(self.kept.get(op, ()), op)
            else:
                inside = self.segments[own]
                roots = (self.graph.storage[source] for source in self.graph.by_name[op].inputs if source not in inside)
                keeper |= {root: inside[place] for root in roots if self.graph.by_name[root].kind == "call"}
        found: dict[str, list[str]] = {}
        for root, op in keeper.items():
            if root in self.made if self.offloads else root not in self.crossing:
                found.setdefault(op, []).append(root)
        return {op: tuple(roots) for op, roots in found.items()}

    def restored(self, number: int) -> Mapping[str, str]:
        """What recomputing a segment restores: per storage, the op whose backward pass frees it."""
        left = {root for roots in self.frees.values() for root in roots}.union(self.crossing)
        first: dict[str, str] = {}
        for op in reversed(self.segments[number]):
            first |= dict.fromkeys((root for root in self.kept.get(op, ()) if root not in left), op)
        return first

    def recomputed_bytes(self, number: int) -> PerOp:
        """Bytes at each point of recomputing a segment beyond what it restores."""
        segment, forms = self.segments[number], self.formed
        start = self.ops.index(segment[0])
        extra = (forms.forward - forms.remade)[start : start + len(segment)]
        extra = np.maximum(extra.real, 0.0) + 1j * np.maximum(extra.imag, 0.0)
        return self._forward(segment, frozenset(self.restored(number)), extra)


@dataclass
class _Backward:
    """One backward pass, op by op."""

    passes: Passes
    stay: Collection[str]
    defers: bool = False
    is_summing: bool = False  # whether there is a state after each op
    _gradients: dict[str, list[Any]] = field(default_factory=dict)  # per storage; those that share memory share the list: bytes, readers
    _on_their_way: Bytes = 0.0
    _freed: Bytes = 0.0
    _restored: dict[str, str] = field(default_factory=dict)
    _recomputed: Bytes = 0.0
    _back: Bytes = 0.0
    _stays: Bytes = 0.0
    _views: set[str] = field(default_factory=set)  # parameters whose gradients, so far, are views
    _begun: int | None = None
    _place: int = 0
    _is_after: bool = False

    @property
    def position(self) -> float:
        """`SummingStates.places` of the latest state."""
        return self.passes.positions[self._place] - 0.5 * self._is_after

    def walk(self) -> Iterator[_State]:
        """The state at each op, from the last to the first."""
        passes, graph = self.passes, self.passes.graph
        uses = Counter(passes.uses)
        for name in passes.crossing:
            if name in passes.made and graph.by_name[name].requires_grad:
                self._hold(name, passes.num_bytes[name])
        for self._place, name in reversed([*enumerate(passes.ops)]):
            op = graph.by_name[name]
            self._bring(op)
            if passes.fetched and (arriving := float(passes.fetching_back.arriving[self._place])):
                yield self._freed, self._recomputed + self._back, self._stays, self._on_their_way + arriving
            yield from self._enter(passes.segment_of.get(name))
            if op.requires_grad:
                yield self._at(self._differentiate(op, uses))
                self._pass(op)
            self._let_go(name)
            if self.is_summing:
                self._is_after = True
                yield self._at()
                self._is_after = False

    def _at(self, extra: Bytes = 0.0) -> _State:
        if self.passes.fetched:
            extra += float(self.passes.fetching_back.beside[self._place])
        if not self.passes.forms:
            return self._freed, self._recomputed + self._back, self._stays, self._on_their_way + extra
        forms, place = self.passes.formed, self._place
        freed, restored, gradients = (each[place] for each in (forms.freed, forms.remade, forms.gradients))
        return self._freed + freed, self._recomputed + self._back + restored, self._stays, self._on_their_way + gradients + extra

    def _bring(self, op: Op) -> None:
        """Fetches from the host what an op is the last to keep."""
        self._back += sum(self.passes.num_bytes[root] for root in self.passes.returns.get(op.name, ()))
        if self.passes.offloads:
            self._back += self._places(op)

    def _places(self, op: Op) -> Bytes:
        """Bytes of the indices that an op keeps, outside segments."""
        return 0.0 if op.name in self.passes.segment_of else place_share(op) * self.passes.num_bytes[op.name]

    def _enter(self, segment: int | None) -> Iterator[_State]:
        """Recomputes a segment at its turn."""
        if segment == self._begun:
            return
        self._begun = segment
        if segment is not None:
            self._restored = dict(self.passes.restored(segment))
            self._recomputed = sum(self.passes.num_bytes[root] for root in self._restored)
            yield from map(self._at, self.passes.recomputed_bytes(segment).tolist())

    def _differentiate(self, op: Op, uses: Counter[str]) -> Bytes:
        """Adds the gradients that an op makes; returns the bytes that only this op needs."""
        passes, graph = self.passes, self.passes.graph
        own = graph.storage[op.name]
        if own != op.name:
            makes_new = operator_of(op).gradient == "put together" or "in_place" in op.tags
            return passes.num_bytes[own] if makes_new else 0.0
        extra: Bytes = passes.inside(op)
        gradient = operator_of(op).gradient
        for root in dict.fromkeys(graph.storage[source] for source in op.inputs if self._is_value(source)):
            size = passes.num_bytes[root]
            if root not in self._gradients and gradient == "handed on" and op.name in self._gradients and size == passes.num_bytes[op.name]:
                self._gradients[root] = self._gradients[op.name]
                self._gradients[root][1] += 1
            elif root in self._gradients:
                extra += size
            else:
                self._hold(root, 0.0 if gradient == "one number" else size)
        if not self._waits(op.name):
            extra += sum(self._parameter(name, op, uses) for name in passes.trained_by(op.name))
        return extra

    def _parameter(self, name: str, op: Op, uses: Counter[str]) -> float:
        """Adds the gradient of a parameter, which waits for those of its other uses; returns the bytes that only this use needs."""
        size, total, stays = self.passes.parameter_bytes[name], self.passes.uses[name], name in self.stay
        uses[name] -= 1
        if uses[name] == 0 and stays:
            self._stays += size
        if total == 1 and not self.passes.in_halves:
            return 0.0 if stays else size
        if uses[name] == total - 1:
            self._on_their_way += size
            if operator_of(op).weights == "linear":
                self._views.add(name)
            if not self.passes.in_halves:
                return 0.0
        summed = size if name in self._views else 0.0  # torch adds to no view: to a product's transpose
        self._views.discard(name)
        if uses[name] == 0:
            self._on_their_way -= size
            summed += 0.0 if stays else size
        return size + summed

    def _waits(self, op: str) -> bool:
        """Whether an op leaves its weight gradients to W."""
        return self.defers and op in self.passes.waiting

    def _is_value(self, name: str) -> bool:
        op = self.passes.graph.by_name[name]
        return op.kind == "call" and op.requires_grad

    def _hold(self, root: str, size: Bytes) -> None:
        self._gradients[root] = [size, 1]
        self._on_their_way += size

    def _pass(self, op: Op) -> None:
        """Frees the gradient of an op's result, unless it is shared or weight gradients need it."""
        passes = self.passes
        if op.name in self._gradients and op.name not in passes.crossing and not self._waits(op.name):
            shared = self._gradients.pop(op.name)
            shared[1] -= 1
            if shared[1] == 0:
                self._on_their_way -= shared[0]

    def _let_go(self, name: str) -> None:
        passes, op = self.passes, self.passes.graph.by_name[name]
        waits = self._waits(name)
        freed = sum(0.0 if waits else passes.num_bytes[root] for root in passes.frees.get(name, ())) + self._places(op)
        if passes.offloads:
            self._back -= freed
        else:
            self._freed += freed
        for root in [root for root, op in self._restored.items() if op == name]:
            self._recomputed -= passes.num_bytes[root]
            del self._restored[root]
