"""The ops of a graph with equal ones together, and their times on kinds of devices: tens of numbers however deep the model is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whale.estimate import OpTable, op_seconds
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.planning.structure.structure import Structure

NUM_SUMS = 16
"""Of so many parts of the gradients it is known when in a backward pass they are whole."""


MARGIN = 1.01
"""Between the numbers of rows for which shares are worked out they are larger by no more than this."""


class Times(NamedTuple):
    """Seconds per column for one micro-batch.

    Attributes:
        forward, backward: on the device.
        started_forward, started_backward: of the host that starts the kernels, beside it.
    """

    forward: Floats
    backward: Floats
    started_forward: Floats
    started_backward: Floats


@dataclass(eq=False)
class Columns:
    """The ops of a graph that run in every replica, equal ones together.

    Attributes:
        prices: of the graph.
        table: the figures of one of each.
        firsts: their places in the graph.
        counts: how many there are.
        trained: bytes of trainable parameters that it is the first to read.
        names: of the ops, in graph order.
        of: per op, in that order, its column.
        first_trained: per op, likewise, its bytes of `trained`.
    """

    prices: Prices
    table: OpTable
    firsts: NDArray[np.int64]
    counts: Floats
    trained: Floats
    names: tuple[str, ...]
    of: NDArray[np.int64]
    first_trained: Floats
    _known: dict[tuple[Device, float], Times] = field(default_factory=dict, init=False)
    _last_sums: dict[Device, tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    def seconds(self, kind: Device, rows: float) -> Times:
        """Times of every column for a micro-batch of so many rows; without training nothing runs backward."""
        key = kind, rows
        if key not in self._known:
            found, training = op_seconds(self.table, kind, rows, self.prices.costs), self.prices.training
            adding = self.prices.adding(kind)[self.firsts]
            self._known[key] = Times(
                found.forward_fixed + rows * found.forward_per_row,
                (found.backward_fixed + rows * found.backward_per_row + adding) * training,
                found.forward_host,
                found.backward_host * training,
            )
        return self._known[key]

    def last_sums(self, kind: Device, num_rows: int) -> tuple[Floats, Floats]:
        """Of some numbers of the gradients that are whole last: their bytes, and the share of a backward pass that is left then at most.

        All of them are the last in a share of 1. A gradient is whole when the backward pass has come to the first op that reads it.

        Args:
            num_rows: of a micro-batch at most: the shares are the largest of any number of rows.
        """
        if kind not in self._last_sums:
            num_bytes = np.cumsum(self.first_trained)
            wanted = np.linspace(1 / NUM_SUMS, 1.0, NUM_SUMS) * num_bytes[-1]
            places = np.minimum(np.searchsorted(num_bytes, wanted * (1 - 1e-9)), len(num_bytes) - 1)
            share = np.zeros(NUM_SUMS)
            for rows in {float(num_rows), *(2.0**power for power in range(num_rows.bit_length()))}:
                backward = self.seconds(kind, rows).backward[self.of]
                share = np.maximum(share, (np.cumsum(backward) - backward)[places] / max(float(backward.sum()), 1e-30))
            self._last_sums[kind] = num_bytes[places], np.minimum(1.0, MARGIN * share)
        return self._last_sums[kind]


def columns_of(prices: Prices, structure: Structure) -> Columns:
    """Reduces a graph to its columns; where times were measured each op has its own."""
    graph, table = prices.graph, prices.table
    trained = np.zeros(len(graph.ops))
    ops, seen = [op for op in graph.ops if op.name in structure.atom_of], set[str]()
    for op in ops:
        for parameter in graph.parameters_among(op.inputs):
            if parameter.kind == "parameter" and parameter.name not in seen:
                seen.add(parameter.name)
                trained[table.position[op.name]] += parameter.spec.num_bytes * parameter.trainable
    names = tuple(op.name for op in ops)
    own = prices.positions(names)
    arrays = {
        each.name: getattr(table, each.name) for each in dataclasses.fields(table) if isinstance(getattr(table, each.name), np.ndarray)
    }
    told = [values[own].astype(np.float64) for name, values in arrays.items() if name != "op" or prices.costs.measured is not None]
    looks = np.stack([*told, trained[own], prices.adding(prices.cluster.devices[0])[own]], axis=1)
    _, first, inverse, counts = np.unique(looks, axis=0, return_index=True, return_inverse=True, return_counts=True)
    kept = own[first]
    reduced = dataclasses.replace(table, **{name: values[kept] for name, values in arrays.items()})
    return Columns(prices, reduced, kept, counts.astype(float), trained[kept], names, inverse.reshape(-1).astype(np.int64), trained[own])
