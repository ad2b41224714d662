"""What one device computes and keeps of one stage, for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from whale.estimate.costs.line import Line, Started
from whale.estimate.memory.memory import size_line, state_bytes
from whale.estimate.memory.passes import BridgedTensor, FetchedWeights, Fullest, Passes, SummedGradients, bytes_at
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace, halved, messages_of
from whale.estimate.prices.part import Part
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.repeated import RepeatedBridges
from whale.ir.cluster import Device, Link
from whale.ir.plan import ParameterState, Shard
from whale.sharding.bridges import Bridge


@dataclass(frozen=True)
class StageKey:
    """A stage as its price sees it."""

    part: Part  # what it runs
    segments: tuple[tuple[str, ...], ...] = ()  # recomputed runs of its ops
    shards: tuple[Shard, ...] = ()  # how it is split
    overlap: bool = False  # whether it computes its rows in two halves
    recomputes: bool = False  # whether R actions recompute all of it
    defers_weights: bool = False  # whether its weight gradients have W actions
    offloads: bool = False  # whether what it keeps waits on the host

    @cached_property
    def _hash(self) -> int:
        return hash((self.part, self.segments, self.shards, self.overlap, self.recomputes, self.defers_weights, self.offloads))

    def __hash__(self) -> int:  # as of its part: a key, and long
        return self._hash


_NOTHING = Fullest()


@dataclass(frozen=True, slots=True)
class Peaks:
    """A pass that makes gradients at its peak."""

    first: Fullest = _NOTHING  # in the first of a step
    later: Fullest = _NOTHING  # in the others
    last: Fullest | None = None  # in the last, where sums of gradients in memory of their own start in it


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of the passes of one micro-batch besides what is kept."""

    gradients: float = 0.0  # unbucketed, from the first backward pass of a step on
    forward: float = 0.0  # peak of F beyond what it leaves
    recompute: float = 0.0  # peak of R beyond what it leaves
    backward: Peaks = Peaks()  # of B (or I)
    weights: Peaks = Peaks()  # of W


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds and bytes for one micro-batch."""

    forward: float  # seconds of F and of R, with exchanges inside the split group
    backward_input: float  # seconds of I; B takes this and `backward_weight`
    backward_weight: float  # seconds of W
    own_forward: float  # seconds of the own ops of F (and R), without exchanges and waits
    own_backward: float  # the same of B, or of I and W
    kept: float  # bytes from F to B (or I): activations, received and handed-on tensors
    left: float  # bytes from F to R where R recomputes the whole stage
    for_weights: float  # bytes from I to W
    memory: PassMemory  # of its passes besides these
    away: float = 0.0  # bytes from F to B (or I) in the host's memory


@dataclass(frozen=True, slots=True)
class _InGroup:
    """Seconds of F, I and W of a split group, whose devices wait for one another."""

    seconds: tuple[float, float, float]  # of the slowest, with exchanges
    own: tuple[tuple[float, float, float], ...]  # per position, of its own ops


_InMemory = tuple[tuple[float, float, float], tuple[PassMemory, Passes, frozenset[str]], float]
"""Bytes of `Work`: kept, left and for_weights; memory, with its passes and the parameters whose gradients are in no bucket; away."""


@dataclass(eq=False)
class Works:
    """The work of the stages of plans of one graph on one cluster, cached."""

    prices: Prices
    state_of: Callable[[str], ParameterState]  # the forms of a parameter or buffer, by name
    bucketed: frozenset[str]  # parameters whose gradients lie in buckets
    _known: dict[Hashable, Work] = field(default_factory=dict, init=False)
    _memory: dict[tuple[StageKey, int, int, tuple[FetchedWeights, ...]], _InMemory] = field(default_factory=dict, init=False)
    _groups: dict[tuple[StageKey, tuple[Device, ...], tuple[Link, ...], int], _InGroup] = field(default_factory=dict, init=False)
    _repeats: dict[StageKey, RepeatedBridges] = field(default_factory=dict, init=False)

    def of(
        self,
        key: StageKey,
        group: Sequence[str],
        position: int,
        num_rows: int,
        fetched: tuple[FetchedWeights, ...] = (),
        sums: tuple[SummedGradients, ...] = (),
        *,
        is_only: bool = False,
    ) -> Work:
        """The work of one device.

        Args:
            key: the stage.
            group: the devices of its split group; itself where the stage is not split.
            position: its own in the group.
            num_rows: that the group takes.
            fetched: weights that its passes fetch.
            sums: of gradients, that start in its last backward pass.
            is_only: whether there is one micro-batch, so that the first backward pass is the last.
        """
        kinds, links = self.likeness(group)
        own = first_alike(key.shards, position, kinds) if key.shards else position
        question = key, kinds, links, own, num_rows, fetched, sums, is_only and bool(sums)
        if question not in self._known:
            self._known[question] = self._work(key, group, own, num_rows, fetched, sums, is_only=is_only)
        return self._known[question]

    def _work(
        self,
        key: StageKey,
        group: Sequence[str],
        position: int,
        num_rows: int,
        fetched: tuple[FetchedWeights, ...],
        sums: tuple[SummedGradients, ...],
        *,
        is_only: bool,
    ) -> Work:
        if key.shards:
            together = self._in_group(key, group, num_rows)
            seconds, own = together.seconds, together.own[position]
        else:
            seconds = _at(self._alone(self.prices, key, group[0], num_rows), num_rows)
            own = seconds
        there = key, first_alike(key.shards, position), num_rows, fetched
        if there not in self._memory:  # which the devices have no part in
            self._memory[there] = self._in_memory(*there)
        forward, inputs, weights = seconds
        (kept, left, for_weights), (memory, passes, apart), away = self._memory[there]
        if sums:
            field, summing = ("weights", passes.weights) if key.defers_weights else ("backward", passes.summing)
            fullest, peaks = summing(apart if is_only else ()).fullest(num_rows, sums), getattr(memory, field)
            memory = replace(memory, **{field: replace(peaks, first=fullest if is_only else peaks.first, last=fullest)})
        return Work(forward, inputs, weights, own[0], own[1] + own[2], kept, left, for_weights, memory, away)

    def _in_memory(self, key: StageKey, position: int, num_rows: int, fetched: tuple[FetchedWeights, ...]) -> _InMemory:
        prices = self._prices(key, position)
        copies, forms = Line(), tuple[BridgedTensor, ...]()
        if key.shards:
            repeated = self._repeating(key)
            copies, forms = repeated.copies(position), repeated.forms(position)
        away = 0.0
        if prices.training and key.offloads:
            away = self._away(prices, key, position).at(num_rows)
            copies, forms = Line(), tuple(replace(form, is_kept=False) for form in forms)
        return _kept(prices, key, num_rows, copies), self._pass_memory(prices, key, num_rows, forms, fetched), away

    def _in_group(self, key: StageKey, group: Sequence[str], num_rows: int) -> _InGroup:
        """`_together`, cached."""
        question = key, *self.likeness(group), num_rows
        if question not in self._groups:
            self._groups[question] = self._together(key, group, num_rows)
        return self._groups[question]

    def likeness(self, group: Sequence[str]) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
        """Equal for equivalent groups: the types of their devices, and the links between neighbours."""
        kinds = tuple(self.prices.kinds[name] for name in group)
        return kinds, tuple(self.prices.link(a, b) for a, b in pairwise(group))

    def _prices(self, key: StageKey, position: int) -> Prices:
        """Prices of a device's own part of the ops."""
        return self.prices.local(key.part.ops, key.shards, position) if key.shards else self.prices

    def _away(self, prices: Prices, key: StageKey, position: int) -> Line:
        """Bytes that a device keeps on the host for one micro-batch, by rows; `prices` are of its own part of the ops."""
        return prices.away(key.part, key.segments) + (self._repeating(key).copies(position) if key.shards else Line())

    def _alone(self, prices: Prices, key: StageKey, device: str, num_rows: int, position: int = 0) -> tuple[Started, Started, Started]:
        """F, I and W of the ops alone."""
        found = prices.seconds(prices.cluster.by_name[device], float(num_rows))
        index = prices.positions(key.part.ops)
        weights = prices.weight_shares[index]
        repeated = found.forward(prices.positions(name for run in key.segments for name in run))
        waiting = prices.waiting(prices.cluster.by_name[device], num_rows) * (int(np.count_nonzero(weights)) if key.defers_weights else 0)
        inputs, forward = found.backward(index, 1 - weights) + repeated + waiting, found.forward(index) + waiting
        if key.offloads and prices.training:
            copies = prices.copying(prices.cluster.by_name[device], self._away(prices, key, position))
            inputs, forward = inputs + copies, forward + copies
        return forward, inputs, found.backward(index, weights) + waiting

    def _together(self, key: StageKey, group: Sequence[str], num_rows: int) -> _InGroup:
        bridges, repeated_bridges = self._bridges(key), tuple(self._repeating(key).exchanged())
        collective_costs = CollectiveCosts(self.prices, StagePlace((tuple(group),), num_rows, 1, 1))
        passes, own = [], []
        for place, name in enumerate(group):
            device = self.prices.cluster.by_name[name]
            (there, back), (repeated, _) = collective_costs.started(bridges, device), collective_costs.started(repeated_bridges, device)
            alone = self._alone(self._prices(key, place), key, name, num_rows, place)
            own.append(_at(alone, num_rows))
            passes.append((alone[0] + there, alone[1] + (back + repeated), alone[2]))
        forward, inputs, weights = (_slowest(each, num_rows) for each in zip(*passes, strict=True))
        if not key.overlap:
            return _InGroup(_at((forward, inputs, weights), num_rows), tuple(own))
        messages = messages_of(collective_costs, bridges)
        forward = halved(forward, messages.forward, messages.num_forward, messages.num_gaps, num_rows)
        both = halved(inputs + weights, messages.backward, messages.num_backward, messages.num_gaps, num_rows)
        there_seconds, back_seconds, late = _at((forward, both, weights), num_rows)
        return _InGroup((there_seconds, back_seconds - late, late), tuple(own))

    def _pass_memory(
        self, prices: Prices, key: StageKey, num_rows: int, forms: tuple[BridgedTensor, ...], fetched: tuple[FetchedWeights, ...]
    ) -> tuple[PassMemory, Passes, frozenset[str]]:
        """Bytes of passes besides what is kept; the passes; and the parameters whose gradients are in no bucket."""
        part, training = key.part, prices.training
        states = {
            name: state_bytes(prices.graph.parameter_by_name[name], self.state_of(name), training=training) for name in part.parameters
        }
        passes, held = prices.passes(
            part,
            {name: float(state.gradient) for name, state in states.items() if state.gradient},
            segments=key.segments,
            recomputes=key.recomputes,
            defers_weights=key.defers_weights,
            offloads=key.offloads,
            forms=forms,
            divided=self._divided(key),
            fetched=fetched,
            in_halves=key.overlap,
        )
        forward = float(bytes_at(held.forward, num_rows).max())
        if not training:
            return PassMemory(forward=forward), passes, frozenset()
        apart = {name: passes.parameter_bytes[name] for name in passes.uses if name not in self.bucketed}
        first = passes.backward(stay=apart, defers_weights=key.defers_weights) if apart else held.later
        recompute = float(bytes_at(held.recompute, num_rows).max()) if key.recomputes else 0.0
        backward, weights = Peaks(first.fullest(num_rows), held.later.fullest(num_rows)), Peaks()
        if key.defers_weights:
            weights = Peaks(*(passes.weights(stay).states.fullest(num_rows) for stay in (apart, ())))
        return PassMemory(sum(apart.values()), forward, recompute, backward, weights), passes, frozenset(apart)

    def _divided(self, key: StageKey) -> frozenset[str]:
        """The losses whose classes are cut."""
        if not key.shards:
            return frozenset()
        work, axes = self.prices.labels(key.part.ops, key.shards).work, self.prices.axes.ops
        return frozenset(name for name, axis in work.items() if axes[name].roles[axis].combine == "softmax")

    def _bridges(self, key: StageKey) -> tuple[Bridge, ...]:
        return self.prices.bridges(key.part.ops, key.shards, key.part.returned(self.prices.graph))

    def _repeating(self, key: StageKey) -> RepeatedBridges:
        if key not in self._repeats:
            labels = self.prices.labels(key.part.ops, key.shards)
            self._repeats[key] = RepeatedBridges(self.prices, labels, self._bridges(key), key.segments, key.part.crossing)
        return self._repeats[key]


def first_alike(shards: Sequence[Shard], position: int, kinds: Sequence[Device] = ()) -> int:
    """The first position of a split group with equal parts, and with an equal device type where `kinds` are given."""

    def look(each: int) -> Hashable:
        return tuple(shard.sizes[each] for shard in shards), kinds[each] if kinds else None

    return next((each for each in range(position) if look(each) == look(position)), position)


def _at(passes: tuple[Started, Started, Started], num_rows: int) -> tuple[float, float, float]:
    """Seconds of F, I and W at a number of rows."""
    forward, inputs, weights = passes
    return forward.line(num_rows).at(num_rows), inputs.line(num_rows).at(num_rows), weights.line(num_rows).at(num_rows)


def _slowest(passes: Iterable[Started], num_rows: int) -> Started:
    """The pass of devices that wait for one another: the slowest device, and the slowest host."""
    found = tuple(passes)
    return Started(max((each.device for each in found), key=lambda line: line.at(num_rows)), max(each.host for each in found))


def _kept(prices: Prices, key: StageKey, num_rows: int, copies: Line) -> tuple[float, float, float]:
    """Bytes of `Work`: kept, left, for_weights; `copies`: that its split group makes and keeps."""
    held = prices.held_tensors(key.part, key.segments, is_away=key.offloads)
    lines = (
        held.bytes_there(prices.graph, prices.outputs) + copies,
        size_line(prices.outputs, held.crossing),
        size_line(prices.outputs, held.for_weights),
    )
    kept, left, for_weights = (line.at(num_rows) if prices.training else 0.0 for line in lines)
    return kept, left, for_weights
