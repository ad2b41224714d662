"""Where a model can be cut into stages, and what crosses at each place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.line import Floats
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.planning.structure.structure import Structure, floating_ops

MAX_UNITS = 320  # ops are bundled into at most this many units, cut where least crosses


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
    kept_fixed: Floats  # per bound, bytes kept for backward by all ops before it
    kept_per_row: Floats  # the same, per row
    parameters: Floats  # ``[i, j]``: bytes of the parameters that units i to j - 1 read, each once

    @property
    def num_units(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def read_again(self) -> float:
        """Bytes of the parameters that several units read, in each but the first of them."""
        return float(np.diagonal(self.parameters, 1).sum() - self.parameters[0, -1])

    def read_twice(self, first: tuple[int, int], second: tuple[int, int]) -> float:
        """Bytes of the parameters that two pieces both read, and none between them: summed over pairs, what the pieces count too often."""
        (start, end), (begin, stop), known = first, second, self.parameters
        return float(known[start, begin] + known[end, stop] - known[start, stop] - known[end, begin])


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
    sums = _kept(prices, kept, spine, position)
    parameters = _parameters(graph, structure, partial(prices.parameter_bytes, budget=budget), spine, bounds)
    fixed, per_row, messages = crossing[:, bounds]
    return CutPoints(structure, spine, floating, bounds, fixed, per_row, messages, sums[0][bounds], sums[1][bounds], parameters)


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
        forward, backward = prices.payload((name,))
        payload = (forward.fixed + backward.fixed, forward.per_row + backward.per_row, 1 + prices.num_gradients((name,)))
        steps[:, index + 1] += payload
        steps[:, last + 1] -= payload
        if any(factor < 0 for spec in graph.by_name[name].outputs for factor in spec.row_factors):
            mixed[index + 1] += 1
            mixed[last + 1] -= 1
    return np.maximum(np.cumsum(steps, axis=1), 0.0), np.cumsum(mixed) > 0


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


def _kept(prices: Prices, kept: Mapping[str, tuple[str, ...]], spine: Sequence[str], position: dict[str, int]) -> Floats:
    sums = np.zeros((2, len(spine) + 1))
    for name in dict.fromkeys(name for names in kept.values() for name in names):
        if name in position:
            line, _ = prices.payload((name,))
            sums[:, position[name] + 1] += (line.fixed, line.per_row)
    result: Floats = np.cumsum(sums, axis=1)
    return result


def _parameters(
    graph: ModelGraph, structure: Structure, bytes_of: Callable[[str], int], spine: Sequence[str], bounds: NDArray[np.int64]
) -> Floats:
    """Bytes of parameters by piece; one that several units read counts once in a piece that holds them all."""
    uses: dict[str, list[int]] = {}
    units = np.searchsorted(bounds, np.arange(len(spine)), side="right") - 1
    for index, name in enumerate(spine):
        for parameter in graph.parameters_among(structure.inputs[name]):
            uses.setdefault(parameter.name, []).append(int(units[index]))
    per_unit = np.zeros(len(bounds))
    shared_bytes = np.zeros((len(bounds), len(bounds)))
    for name, where in uses.items():
        num_bytes = bytes_of(name)
        distinct = sorted(set(where))
        per_unit[[unit + 1 for unit in distinct]] += num_bytes
        for first, second in pairwise(distinct):
            shared_bytes[: first + 1, second + 1 :] += num_bytes
    total = np.cumsum(per_unit)
    result: Floats = total[None, :] - total[:, None] - shared_bytes
    return result
