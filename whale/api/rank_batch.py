"""Batches that are one rank's rows of a global batch: the user's own structure, and where it comes from.

A structure may have any type, be unpacked and rebuilt, so its tensors are marked; in a separate table, so that they pickle as others do.

    loader     {"x": X, "y": Y}                 X, Y: of batch 7
    script     {"x": X, "y": Y.long(), "m": M}  X:    of batch 7, and so is the whole
    mixed up   {"x": X, "y": Y of batch 8}      an error
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from whale.capture import tensors_of
from whale.errors import BatchError, first_few
from whale.ir.plan import Plan
from whale.runtime.execute.batch import Rows, rank_rows
from whale.units import counted


@dataclass(frozen=True)
class RankRows:
    """Where a batch of a loader comes from.

    Attributes:
        rows: which rows of the global batch this rank has in it, ascending; none on a rank outside the plan.
        num_rows: rows of the global batch.
        plan: that divided it.
        source: the loader.
        start, stop: where in the loader's data it begins, and where what follows it does.
        sample: digest of the first sample of its epoch; 0 if ranks do not compare it.
        number: of the batch among all that were handed out in this process.
    """

    rows: Rows
    num_rows: int
    plan: Plan
    source: object
    start: Mapping[str, int]
    stop: Mapping[str, int]
    sample: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def place(self) -> str:
        """Which global batch it is, in words that are the same on every rank."""
        told = {**self.start, "first sample": f"{self.sample:08x}"} if self.sample else self.start
        return ", ".join(f"{name} {value}" for name, value in told.items())

    @property
    def num_held(self) -> int:
        """How many rows this rank has."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all rows, whatever plan it is to work for."""
        return self.num_held == self.num_rows


@dataclass(frozen=True)
class RankBatch:
    """A batch of a loader, as the user gives it back.

    Attributes:
        data: in the user's form; None where the rank has no rows of it.
        origin: where it comes from.
        mixed: other places that tensors of it come from, in words; empty for none.
    """

    data: Any
    origin: RankRows
    mixed: str = ""

    def check(self, plan: Plan, rank: int | None) -> None:
        """Checks that it has what a rank needs under a plan.

        Raises:
            BatchError: its tensors are of several batches, or of rows that another plan gave to the rank.
        """
        if self.mixed:
            raise BatchError(
                f"a batch mixes tensors of two global batches of engine.loader ({self.mixed})",
                hint="take all of them from one batch; a copy (clone()) counts as a tensor of your own",
            )
        origin = self.origin
        if origin.plan is plan:
            return
        needed = rank_rows(plan.fitting(origin.num_rows), rank, origin.num_rows)
        if not all(any(low <= start and stop <= high for low, high in origin.rows) for start, stop in needed):
            raise BatchError(
                f"a batch of engine.loader has other rows than the current plan gives this rank ({origin.place}: of "
                f"{counted(origin.num_rows, 'row')} it has {_listed(origin.rows)}, needed: {_listed(needed)})",
                hint="another plan divided it: after engine.replan, or a move by runtime.rebalance, take the next batch of the loader; use "
                "whole_batches=True where a batch is used again, or engines share a loader",
            )

    def check_rows(self, num_rows: int) -> None:
        """Checks the number of rows of its tensors.

        Raises:
            BatchError: the script has removed rows, or added some.
        """
        if num_rows != self.origin.num_held:
            raise BatchError(
                f"a batch of engine.loader has {counted(num_rows, 'row')} now, not the {self.origin.num_held} that it was made with "
                f"({self.origin.place}: rows {_listed(self.origin.rows)} of {self.origin.num_rows})",
                hint="choose and repeat rows in the dataset; tensors that you add have a row for each of these",
            )


_MARKS = WeakTensorKeyDictionary()
ORIGINS: MutableMapping[Tensor, RankRows | None] = _MARKS
"""An attribute of tensors in all but place: as one it would be pickled with them."""


def living() -> list[RankRows]:
    """Where batches come from of which tensors are alive; threads may make others meanwhile."""
    return [origin for origin in list(_MARKS.data.values()) if origin is not None]


def mark(batch: Any, origin: RankRows) -> None:
    """Lets the tensors with rows of a batch be recognised while they live; not one that is in several batches."""
    for tensor in tensors_of(batch).values():
        if tensor.dim() and len(tensor) == (origin.num_held or 1):
            ORIGINS[tensor] = None if tensor in ORIGINS else origin


def recognized(batch: Any, in_hand: Iterable[tuple[Any, RankRows]] = ()) -> Any:
    """A `RankBatch` for a batch with tensors of a loader's; any other batch unchanged, as a global batch.

    Args:
        batch: of the user.
        in_hand: batches that loaders handed out last, which are recognised by identity too.
    """
    found: list[tuple[str, RankRows]] = [("", origin) for data, origin in in_hand if data is batch]
    found += [(path, origin) for path, tensor in tensors_of(batch).items() if (origin := ORIGINS.get(tensor)) is not None]
    if not found:
        return batch
    of_each = {origin.number: f"batch{path}: {origin.place}" for path, origin in found}
    origin = found[0][1]
    return RankBatch(batch if origin.rows else None, origin, first_few(list(of_each.values()), separator="; ") if len(of_each) > 1 else "")


def _listed(rows: Rows) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in rows) or "none"
