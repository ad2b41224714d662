"""Where a model can be cut into stages, and what crosses at each place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.line import Floats
from whale.estimate.memory.held import kept_by_maker
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.planning.structure.structure import Structure, floating_ops

MAX_UNITS = 320  # ops are bundled into at most this many units, cut where least crosses; halved: none of 22 plans differs

Span = tuple[int, int, int, int]
"""The pieces that start between two bounds and end between two others, all included; -1: the last bound."""


@dataclass(frozen=True, slots=True)
class FarRead:
    """A tensor by the units that make and read it: these in order, with its fixed bytes, those per row, and messages, all both ways."""

    made: int
    read: tuple[int, ...]
    payload: tuple[float, float, float]

    @property
    def arrives(self) -> Iterator[Span]:
        """The pieces that receive it: those that read it and do not make it."""
        for before, unit in pairwise((self.made, *self.read)):
            yield before + 1, unit, unit + 1, -1

    @property
    def passes(self) -> Iterator[Span]:
        """The pieces that it passes: it is made before and read only after them."""
        for before, unit in pairwise((self.made, *self.read)):
            yield before + 1, unit, 0, unit

    def returns(self, read: int) -> Span:
        """The pieces that make it and receive its gradient from a unit."""
        return 0, self.made, self.made + 1, read


@dataclass(frozen=True, eq=False)
class PieceBytes:
    """What a device holds of the pieces of a model, by the units where they begin and end.

    Sums of the lines of `PartCost`: of parameters once in each piece that reads them; of what is kept in the piece that makes it, so that
    what arrives comes besides.
    """

    parameters: Floats  # ``[i, j]``: bytes of the parameters that units i to j - 1 read, with gradients and optimizer state
    kept: Floats  # per bound, bytes kept for backward by all ops before it, as lines by rows: ``[2, bounds]``

    def kept_at(self, num_rows: float) -> Floats:
        """Per bound, with so many rows."""
        found: Floats = self.kept[0] + self.kept[1] * num_rows
        return found

    @property
    def state(self) -> float:
        """Bytes of all parameters, with gradients and optimizer state."""
        return float(self.parameters[0, -1])

    def whole_at(self, num_rows: float) -> float:
        """Bytes of the whole model with a micro-batch of so many rows."""
        return self.state + float(self.kept_at(num_rows)[-1])

    def with_kept(self, more: Floats) -> PieceBytes:
        return PieceBytes(self.parameters, self.kept + more)


@dataclass(frozen=True)
class CutPoints:
    """The ops in order, bundled into units."""

    structure: Structure  # of the graph
    spine: tuple[str, ...]  # the ops that are computed once, in graph order
    floating: frozenset[str]  # those without parameters and gradients, which run where they are read
    bounds: NDArray[np.int64]  # index into `spine` where each unit starts, and its length
    crossing_fixed: Floats  # per bound, bytes that cross both ways
    crossing_per_row: Floats  # the same, per row
    messages: Floats  # per bound, the number of these tensors and gradients
    held: PieceBytes  # of one device
    far: tuple[FarRead, ...]  # tensors that are read beyond the next unit: they may pass a stage that does not read them

    @property
    def num_units(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def far_ends(self) -> NDArray[np.int64]:
        """The units that make each of `far`, and the last that read it: ``[2, tensors]``."""
        found: NDArray[np.int64] = np.array([(each.made, each.read[-1]) for each in self.far], dtype=np.int64).reshape(-1, 2).T
        return found

    def skips(self, units: Sequence[int]) -> Iterator[tuple[FarRead, int, Sequence[int]]]:
        """The tensors that are read beyond the piece after the one that makes them; with that piece, and that of each unit that reads them.

        `units`: where each piece starts, and the end.
        """
        for index in self._skipping(units):
            far = self.far[index]
            made, *read = (bisect_right(units, unit) - 1 for unit in (far.made, *far.read))
            yield far, made, read

    def are_skipped(self, units: Sequence[int]) -> bool:
        """Whether there are any of `skips`."""
        return bool(self._skipping(units))

    def _skipping(self, units: Sequence[int]) -> list[int]:
        ends = np.searchsorted(np.array(units), self.far_ends, side="right")
        found: list[int] = np.flatnonzero(ends[1] - ends[0] > 1).tolist()
        return found

    @cached_property
    def received(self) -> Floats:
        """Of each piece, what it reads and others make: fixed bytes, those per row, and messages, all both ways: ``[3, starts, ends]``."""
        passing = [(span, far.payload) for far in self.far for span in far.passes]
        return self._crossing[:, :, None] - over_pieces(self.num_units, 3, passing)

    @cached_property
    def returned(self) -> Floats:
        """The same of what it makes and others read."""
        before: list[tuple[Span, Sequence[float]]] = [((far.made + 1, -1, 0, far.read[-1]), far.payload) for far in self.far]
        return self._crossing[:, None, :] - over_pieces(self.num_units, 3, before)

    @property
    def _crossing(self) -> Floats:
        return np.stack([self.crossing_fixed, self.crossing_per_row, self.messages])

    @cached_property
    def read_again(self) -> float:
        """Bytes of the parameters that several units read, in each but the first of them."""
        return float(np.diagonal(self.held.parameters, 1).sum() - self.held.state)

    def read_twice(self, first: tuple[int, int], second: tuple[int, int]) -> float:
        """Bytes of the parameters that two pieces both read, and none between them: summed over pairs, what the pieces count too often."""
        (start, end), (begin, stop), known = first, second, self.held.parameters
        return float(known[start, begin] + known[end, stop] - known[start, stop] - known[end, begin])

    def read_apart(self, units: Sequence[int], ranks: Sequence[int]) -> float:
        """`read_twice` of all pairs of pieces on different ranks: bytes of the parameters whose gradients one rank sends another.

        Args:
            units: where each piece starts, and the end.
            ranks: of each piece.
        """
        start, end, own, known = np.array(units[:-1]), np.array(units[1:]), np.array(ranks), self.held.parameters
        pairs = [(start, start, 1.0), (end, end, 1.0), (start, end, -1.0), (end, start, -1.0)]
        twice = sum(sign * known[np.ix_(first, second)] for first, second, sign in pairs)
        return float(np.sum(np.triu(twice, 1) * (own[:, None] != own[None, :])))


def of_piece(num_units: int, start: int, end: int, spans: Iterable[tuple[Span, float]]) -> float:
    """The sum of the figures of all spans that a piece is in."""
    return sum(
        own
        for (low, high, first, last), own in spans
        if low <= start <= (num_units if high < 0 else high) and first <= end <= (num_units if last < 0 else last)
    )


def over_pieces(num_units: int, num_figures: int, spans: Sequence[tuple[Span, Sequence[float]]]) -> Floats:
    """Per piece, the sums of the figures of all spans that it is in: ``[figures, starts, ends]``."""
    steps = np.zeros((num_figures, num_units + 2, num_units + 2))
    corners = np.array([span for span, _ in spans], dtype=np.int64).reshape(-1, 4).T
    figures = np.array([own for _, own in spans], dtype=np.float64).reshape(-1, num_figures).T
    start, stop, first, last = np.where(corners < 0, num_units, corners)
    for step, own in zip(steps, figures, strict=True):
        for rows, columns, sign in ((start, first, 1), (start, last + 1, -1), (stop + 1, first, -1), (stop + 1, last + 1, 1)):
            np.add.at(step, (rows, columns), sign * own)
    found: Floats = steps.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1]
    return found


def find_cut_points(structure: Structure, prices: Prices, kept: Mapping[str, tuple[str, ...]], budget: Budget = ALL) -> CutPoints:
    """Finds the units of a graph; `kept`: per op, what it keeps for backward."""
    graph = prices.graph
    spine = tuple(op.name for op in graph.ops if op.name in structure.atom_of)
    position = {name: index for index, name in enumerate(spine)}
    floating = floating_ops(graph, structure)
    crossing, forbidden = _crossing(graph, structure, prices, spine, position, floating)
    for names in structure.atoms:
        if len(names) > 1:
            places = [position[name] for name in names]
            forbidden[min(places) + 1 : max(places) + 1] = True
    forbidden |= _without_own_ops(spine, floating)
    bounds = lightest_bounds(crossing[:2].sum(axis=0), forbidden)
    read = [[(own.name, prices.parameter_bytes(own.name, budget)) for own in graph.parameters_among(structure.inputs[op])] for op in spine]
    made = prices.kept_by_maker if kept is prices.kept_there else kept_by_maker(graph, [prices.outputs[op.name] for op in graph.ops], kept)
    held = piece_bytes(read, made[:, [graph.position[name] for name in spine]], bounds)
    fixed, per_row, messages = crossing[:, bounds]
    far = tuple(_far(graph, prices, spine, position, floating, bounds))
    return CutPoints(structure, spine, floating, bounds, fixed, per_row, messages, held, far)


def _crossing(
    graph: ModelGraph, structure: Structure, prices: Prices, spine: Sequence[str], position: dict[str, int], floating: frozenset[str]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Per place between two ops, the bytes alive across it (fixed, per row), their messages, and whether no cut is allowed there."""
    steps = np.zeros((3, len(spine) + 1))
    mixed = np.zeros(len(spine) + 1)
    for index, name in enumerate(spine):
        readers = [position[user] for user in graph.users[name] if user in position]
        last = max(readers, default=index)
        if last == index or name in floating:
            continue
        payload = _payload(prices, name)
        steps[:, index + 1] += payload
        steps[:, last + 1] -= payload
        if graph.by_name[name].has_own_size:
            mixed[index + 1] += 1
            mixed[last + 1] -= 1
    return np.maximum(np.cumsum(steps, axis=1), 0.0), np.cumsum(mixed) > 0


def _payload(prices: Prices, name: str) -> tuple[float, float, float]:
    """Fixed bytes of a tensor and of its gradient, those per row, and their number."""
    forward, backward = prices.payload((name,))
    return forward.fixed + backward.fixed, forward.per_row + backward.per_row, 1 + prices.num_gradients((name,))


def _far(
    graph: ModelGraph, prices: Prices, spine: Sequence[str], position: dict[str, int], floating: frozenset[str], bounds: NDArray[np.int64]
) -> Iterator[FarRead]:
    units = (np.searchsorted(bounds, np.arange(len(spine)), side="right") - 1).tolist()
    for index, name in enumerate(spine):
        read = {units[position[user]] for user in graph.users[name] if user in position}
        if name not in floating and max(read, default=0) > units[index] + 1:
            yield FarRead(units[index], tuple(sorted(read - {units[index]})), _payload(prices, name))


def _without_own_ops(spine: Sequence[str], floating: frozenset[str]) -> NDArray[np.bool_]:
    """Per place, whether a piece that ends or starts there may have only floating ops: these leave it, and nothing remains."""
    floats = np.array([name in floating for name in spine], dtype=np.bool_)
    after = np.concatenate((floats, [False]))  # all ops from a place on
    after[:-1] = np.logical_and.accumulate(floats[::-1])[::-1]
    return np.concatenate(([False], floats)) | after


def lightest_bounds(weight: Floats, forbidden: NDArray[np.bool_]) -> NDArray[np.int64]:
    """All allowed places, or, if there are too many, the lightest of each window.

    Args:
        weight: per place, 0 to the number of ops.
        forbidden: places where no bound may be.
    """
    end = len(weight) - 1
    places = np.flatnonzero(~forbidden[1:end]) + 1
    if len(places) > MAX_UNITS - 1:
        windows = np.array_split(places, MAX_UNITS - 1)
        places = np.array([window[np.argmin(weight[window])] for window in windows], dtype=np.int64)
    return np.concatenate(([0], places, [end])).astype(np.int64)


def piece_bytes(read: Sequence[Sequence[tuple[str, float]]], made: Floats, bounds: NDArray[np.int64]) -> PieceBytes:
    """What a device holds of pieces between these bounds.

    Args:
        read: per op in order, the parameters that it reads, with their bytes there.
        made: per op, what it makes and some op keeps, as lines by rows: ``[2, ops]``.
    """
    kept: Floats = np.concatenate((np.zeros((2, 1)), np.cumsum(made, axis=1)), axis=1)[:, bounds]
    uses, sizes = dict[str, list[int]](), dict[str, float]()
    units = np.searchsorted(bounds, np.arange(len(read)), side="right") - 1
    for index, own in enumerate(read):
        for name, num_bytes in own:
            uses.setdefault(name, []).append(int(units[index]))
            sizes.setdefault(name, num_bytes)
    per_unit = np.zeros(len(bounds))
    shared_bytes = np.zeros((len(bounds), len(bounds)))
    for name, where in uses.items():
        distinct = sorted(set(where))
        per_unit[[unit + 1 for unit in distinct]] += sizes[name]
        for first, second in pairwise(distinct):
            shared_bytes[: first + 1, second + 1 :] += sizes[name]
    total = np.cumsum(per_unit)
    return PieceBytes(total[None, :] - total[:, None] - shared_bytes, kept)
