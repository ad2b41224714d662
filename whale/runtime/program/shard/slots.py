"""The parts of all devices of a group along one dimension of a tensor.

A dimension may also hold the rows of the batch, whose number programs do not know: the rest, the units, is what is cut.

    [rows*12]  heads 4 of width 3 cut 1:3      units 12   device 0: 0..3   device 1: 3..12      rows outside
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from whale.sharding.index_sets import Runs, count, count_below


class _Fields(NamedTuple):
    dim: int
    units: int
    parts: tuple[Runs, ...]
    position: int
    rows_outside: bool = True


class Slots(_Fields):
    """The parts of one dimension; a named tuple, since programs hold it and print it.

    Attributes:
        dim: which dimension.
        units: its size without the rows of the batch.
        parts: per device, its positions among the units.
        position: of this device.
        rows_outside: if the dimension also holds rows, whether they are the outer factor.
    """

    @property
    def counts(self) -> tuple[int, ...]:
        """Units of each device."""
        return _counts(self.parts)

    def _unfolded(self, value: Tensor, units: int) -> tuple[Tensor, int]:
        """The dimension as ``outer x units x inner``, and the index of the units."""
        rest = value.shape[self.dim] // units if units else 1
        shape = (rest, units, 1) if self.rows_outside else (1, units, rest)
        return value.reshape(*value.shape[: self.dim], *shape, *value.shape[self.dim + 1 :]), self.dim + 1

    def take(self, value: Tensor, device: int) -> Tensor:
        """A device's part; a view where possible."""
        split, at = self._unfolded(value, self.units)
        return _held(split, at, self.parts[device]).flatten(self.dim, self.dim + 2)

    def own(self, value: Tensor) -> Tensor:
        """This device's part."""
        return self.take(value, self.position)

    def shape(self, value: Tensor, held: int, device: int) -> tuple[int, ...]:
        """The shape of a device's part of a tensor like `value`, which has `held` units."""
        rest = value.shape[self.dim] // held if held else 1
        return (*value.shape[: self.dim], rest * self.counts[device], *value.shape[self.dim + 1 :])

    def put_together(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor from its parts."""
        if all(len(runs) < 2 for runs in self.parts) and self._is_in_order and not self._has_rows(pieces):
            return torch.cat(list(pieces), self.dim)
        sample = next((piece for piece, held in zip(pieces, self.counts, strict=True) if held), pieces[0])
        held = next((held for held in self.counts if held), 1)
        rest = sample.shape[self.dim] // held
        whole = sample.new_empty((*sample.shape[: self.dim], rest * self.units, *sample.shape[self.dim + 1 :]))
        split, at = self._unfolded(whole, self.units)
        for piece, runs, number in zip(pieces, self.parts, self.counts, strict=True):
            own = self._unfolded(piece, number)[0] if number else piece
            for start, stop in runs:
                split.narrow(at, start, stop - start).copy_(own.narrow(at, count_below(runs, start), stop - start))
        return whole

    def _has_rows(self, pieces: Sequence[Tensor]) -> bool:
        return self.rows_outside and any(piece.shape[self.dim] != number for piece, number in zip(pieces, self.counts, strict=True))

    @property
    def _is_in_order(self) -> bool:
        starts = [runs[0][0] for runs in self.parts if runs]
        return starts == sorted(starts)


@lru_cache(maxsize=4096)
def _counts(parts: tuple[Runs, ...]) -> tuple[int, ...]:
    return tuple(count(runs) for runs in parts)


def _held(value: Tensor, dim: int, runs: Runs) -> Tensor:
    """Some positions of a dimension: a view if they are one run. Needs no index tensor, for which the host would wait."""
    if len(runs) < 2:
        start, stop = runs[0] if runs else (0, 0)
        return value.narrow(dim, start, stop - start)
    bounds = [0, *(bound for run in runs for bound in run), value.shape[dim]]
    pieces = torch.split(
        value, [high - low for low, high in pairwise(bounds)], dim
    )  # gaps and runs alternate; its backward is one concatenation
    return torch.cat(pieces[1::2], dim)


def own_part(value: Tensor, slots: Slots) -> Tensor:
    return slots.own(value)
