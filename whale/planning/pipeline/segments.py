"""Runs of a stage's ops that may be recomputed: blocks of any model, and attention cores.

A recomputed segment keeps only what it reads from outside. It may contain no op that writes memory made outside (a
BatchNorm's running statistics would move twice), and memory made inside may not be changed outside later (recomputation
would miss the change).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whale.axes.operators import operator_of
from whale.config.keys import ByName
from whale.estimate import Line
from whale.estimate.costs.line import Floats
from whale.estimate.prices.part import Segment
from whale.ir.graph import ModelGraph
from whale.ir.patterns import module_match
from whale.ir.writes import written_storages
from whale.planning.pipeline.cut_points import lightest_bounds

NUM_SIZES = 12
"""Block sizes that are tried. Of 20 searches of examples/benchmarks/constants.py in short memory, halved: one is 11.5 % slower, one 2.5 %
faster; doubled: one is 4.6 % faster, with 0.5 % more estimates.
"""


@dataclass(frozen=True)
class Ground:
    """Where segments may lie among the ops of a stage."""

    ops: Sequence[str]  # of the stage, in order
    islands: tuple[tuple[int, int], ...]  # the longest runs (start, stop) of ops that may be recomputed
    closed: NDArray[np.bool_]  # per place between two ops, whether no segment may start or end there

    def obstacle(self, start: int, stop: int) -> str | None:
        """The first op that prevents recomputing a run (start, stop); None where it may be."""
        island = next((own for own in self.islands if own[0] <= start < own[1]), (start, start))
        if stop > island[1]:
            return self.ops[island[1]]
        return next((self.ops[place] for place in (start, stop) if self.closed[place]), None)


def find_ground(graph: ModelGraph, ops: Sequence[str]) -> Ground:
    position = {name: index for index, name in enumerate(ops)}
    last_write: dict[str, int] = {}
    for index, name in enumerate(ops):
        for storage in written_storages(graph, graph.by_name[name]):
            last_write[storage] = index
    closed = np.zeros(len(ops) + 1, dtype=np.bool_)
    barred = np.zeros(len(ops), dtype=np.bool_)
    for storage, last in last_write.items():
        if storage in position:
            closed[position[storage] + 1 : last + 1] = True
            continue
        for index in range(last + 1):
            op = graph.by_name[ops[index]]
            barred[index] |= storage in {graph.storage[name] for name in (op.name, *op.inputs)}
    for start, stop in _runs(closed):  # what may not be cut apart is left out as a whole
        if barred[start - 1 : stop].any():
            barred[start - 1 : stop] = True
    return Ground(ops, tuple(_runs(~barred)), closed)


def _runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The runs (start, stop) of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def find_blocks(
    graph: ModelGraph, sizes: Mapping[str, Line], ops: Sequence[str], kept: Mapping[str, tuple[str, ...]], in_flight: int, num_rows: float
) -> tuple[Segment, ...]:
    """Cuts a stage into the blocks that leave least in memory when all are recomputed.

    That is the tensors that enter each block, for every micro-batch in flight, and once what the largest block keeps. For each
    of several sizes dynamic programming finds the cheapest cuts; the best size is taken.

    Args:
        sizes: per op, the bytes of its outputs.
        kept: per op, what it keeps for backward.
        in_flight: micro-batches.
        num_rows: rows of one on a device.
    """
    ground = find_ground(graph, ops)
    entering, inside = _profile(graph, sizes, ops, kept, num_rows)
    units = [start + lightest_bounds(entering[start : stop + 1], ground.closed[start : stop + 1]) for start, stop in ground.islands]
    best: list[NDArray[np.int64]] = []
    least = np.inf
    for size in np.geomspace(1 / 64, 1.0, NUM_SIZES) * inside[-1]:
        bounds = [unit[_cut(entering[unit], inside[unit], float(size))] for unit in units]
        largest = max((float(np.diff(inside[bound]).max()) for bound in bounds), default=0.0)
        total = in_flight * sum(float(entering[bound[:-1]].sum()) for bound in bounds) + largest
        if total < least:
            best, least = bounds, total
    blocks = [tuple(ops[start:stop]) for bound in best for start, stop in pairwise(bound.tolist()) if inside[stop] > inside[start]]
    return tuple(blocks)


def _profile(
    graph: ModelGraph, sizes: Mapping[str, Line], ops: Sequence[str], kept: Mapping[str, tuple[str, ...]], num_rows: float
) -> tuple[Floats, Floats]:
    """Per place, the bytes alive across it, and the bytes kept for backward of all before it."""
    position = {name: index for index, name in enumerate(ops)}
    last_use: dict[str, int] = {}
    for index, name in enumerate(ops):
        for source in graph.by_name[name].inputs:
            if graph.by_name[graph.storage[source]].kind == "call":
                last_use[graph.storage[source]] = index
    steps, made = np.zeros(len(ops) + 1), np.zeros(len(ops) + 1)
    for name, last in last_use.items():
        size = sizes[name].at(num_rows)
        steps[position[name] + 1 if name in position else 0] += size
        steps[last + 1] -= size
    for name in {name for op in ops for name in kept.get(op, ())}.intersection(position):
        made[position[name] + 1] += sizes[name].at(num_rows)
    alive: Floats = np.maximum(np.cumsum(steps), 0.0)
    before: Floats = np.cumsum(made)
    return alive, before


def _cut(entering: Floats, inside: Floats, size: float) -> list[int]:
    """The bounds with the least sum of bytes that enter the pieces, none of which keeps more than `size` if it can be cut smaller."""
    entered = entering.tolist()
    firsts = np.minimum(np.searchsorted(inside, inside - size, side="left"), np.arange(-1, len(entered) - 1)).tolist()
    choice, total = [0] * len(entered), 0.0
    window: deque[tuple[int, float]] = deque()  # the starts that may still be best for some end, the best first
    for end in range(1, len(entered)):
        sum_from = total + entered[end - 1]
        while window and window[-1][1] > sum_from:
            window.pop()
        window.append((end - 1, sum_from))
        while window[0][0] < firsts[end]:
            window.popleft()
        choice[end], total = window[0]
    bounds = [len(entering) - 1]
    while bounds[-1] > 0:
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def find_regions(graph: ModelGraph, ops: Sequence[str]) -> tuple[Segment, ...]:
    """The runs of ops that the model itself checkpoints (`torch.utils.checkpoint`), without ops that must not be recomputed."""
    return _runs_of(graph, ops, [graph.by_name[name].region for name in ops])


def find_modules(graph: ModelGraph, ops: Sequence[str], by_name: ByName) -> tuple[Segment, ...]:
    """The runs of ops of each module that is recomputed by its name (`recompute` or `keep`), without ops that must not be recomputed."""
    words, region_of = dict(by_name), dict[str, str | None]()
    for path in {graph.by_name[name].module for name in ops}:
        pattern, module = module_match(words, path)
        region_of[path] = module if words[pattern] == "recompute" else None
    return _runs_of(graph, ops, [region_of[graph.by_name[name].module] for name in ops])


def _runs_of(graph: ModelGraph, ops: Sequence[str], regions: Sequence[str | None]) -> tuple[Segment, ...]:
    """The runs of ops of one region, by the region of each op."""
    if all(region is None for region in regions):
        return ()
    ground = find_ground(graph, ops)
    found = []
    for region in dict.fromkeys(name for name in regions if name is not None):
        for start, stop in _runs(np.array([name == region for name in regions])):
            for low, high in ground.islands:
                places = [place for place in range(max(low, start), min(high, stop) + 1) if not ground.closed[place]]
                if len(places) > 1:
                    found.append((places[0], places[-1]))
    return tuple(tuple(ops[start:stop]) for start, stop in sorted(found))


def find_cores(graph: ModelGraph, ops: Sequence[str], activations: Collection[str]) -> tuple[Segment, ...]:
    """The attention cores of a stage: from the product of two activations through softmax to the next product, by kinds of ops.

    `activations`: ops whose values depend on the batch.
    """
    position = {name: index for index, name in enumerate(ops)}
    found: list[tuple[int, int]] = []
    for name in ops:
        op = graph.by_name[name]
        core = operator_of(op).core
        if core == "all":
            found.append((position[name], position[name] + 1))
        elif core == "softmax":
            before = _nearest(name, position, lambda n: graph.by_name[n].inputs, graph, activations)
            after = _nearest(name, position, lambda n: graph.users[n], graph, activations)
            if before and after:
                found.append((min(before), max(after) + 1))
    ground = find_ground(graph, ops)
    return tuple(tuple(ops[start:stop]) for start, stop in _merge(found) if ground.obstacle(start, stop) is None)


def _nearest(
    name: str, position: Mapping[str, int], step: Callable[[str], Sequence[str]], graph: ModelGraph, activations: Collection[str]
) -> list[int]:
    """Positions of the nearest contractions of two activations, not passing another contraction or a parameter."""
    found: list[int] = []
    pending, seen = [name], {name}
    while pending:
        for other in step(pending.pop()):
            if other in seen or other not in position or other not in activations:
                continue
            seen.add(other)
            op = graph.by_name[other]
            contracts = operator_of(op).core in ("product", "all")
            if contracts and sum(source in activations for source in op.inputs) >= 2:
                found.append(position[other])
            elif all(graph.by_name[source].kind != "parameter" for source in op.inputs) and not contracts:
                pending.append(other)
    return found


def _merge(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges overlapping runs."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
