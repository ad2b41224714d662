"""Where a loader's rows come from: indexed datasets, and streams.

Both read a whole share of a batch at once, in the worker process if there is one: `torch.utils.data.DataLoader` only fetches.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from whale.errors import BatchError
from whale.ir.plan import Plan
from whale.runtime.execute.batch import Rows, check_rows, rank_rows
from whale.runtime.program.randomness import seed_of
from whale.units import counted

Collate = Callable[[list[Any]], Any]
Share = tuple[int, Any, int]
"""Rows of the global batch, this rank's part of it, and a digest of the epoch's first sample: of the first batch, if ranks compare it."""


class Sized(Protocol):
    """A dataset with samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Division:
    """How batches are divided.

    Attributes:
        batch_size: rows of a full global batch.
        plan, rank: say which rows are read; rank None reads none.
        drop_last: whether a short last batch is left out.
        collate: makes a batch of samples.
        whole_batches: whether a rank of the plan reads all rows of each batch, though it needs its own only.
    """

    batch_size: int
    plan: Plan
    rank: int | None
    drop_last: bool
    collate: Collate
    whole_batches: bool = False

    @cached_property
    def _known_rows(self) -> dict[int, Rows]:
        return {}

    def rows(self, num_rows: int) -> Rows:
        """Intervals of a global batch's rows that this rank reads; cached by number of rows.

        A rank of the plan without rows of its own reads the first: from its form it knows what the others train.
        """
        if num_rows not in self._known_rows:
            own: Rows = ()
            if self.rank is not None:
                own = rank_rows(self.plan.fitting(num_rows), self.rank, num_rows) or ((0, 1),)
            self._known_rows[num_rows] = ((0, num_rows),) if own and self.whole_batches else own
        return self._known_rows[num_rows]

    def check(self, num_rows: int) -> None:
        """Raises a BatchError where the plan cannot divide batches of so many rows."""
        check_rows(self.plan.fitting(num_rows), num_rows)

    def positions(self, num_rows: int) -> Iterator[int]:
        """Row numbers of a global batch that this rank reads, ascending: the first where it needs none, for the script to see its form."""
        return itertools.chain.from_iterable(itertools.starmap(range, self.rows(num_rows) or ((0, 1),)))

    def share(self, num_rows: int, samples: list[Any], digest: int = 0) -> Share:
        return num_rows, self.collate(samples), digest


@dataclass(frozen=True)
class IndexedSource:
    """Rows of a dataset with ``__getitem__`` and ``__len__``, in order or shuffled."""

    dataset: Sized
    division: Division
    shuffle: bool
    seed: int

    def check(self) -> None:
        """Checks every batch size of an epoch against the plan.

        Raises:
            BatchError: the dataset has no batch, or full batches or the last one are too small.
        """
        self.division.check(self.division.batch_size)
        rest = len(self.dataset) % self.division.batch_size
        if self.num_batches() == 0:
            raise BatchError(
                f"the dataset has {counted(len(self.dataset), 'sample')}, fewer than one batch of {self.division.batch_size}",
                hint="use a smaller global_batch_size, or drop_last=False",
            )
        if rest and not self.division.drop_last:
            self.division.check(rest)

    @property
    def identity(self) -> dict[str, int]:
        """What must be equal for a position in one loader to mean the same in another."""
        return {"samples": len(self.dataset), "shuffle": int(self.shuffle), "seed": self.seed}

    def num_batches(self) -> int:
        """Batches of an epoch; a TypeError where that is unknown."""
        size, length = self.division.batch_size, len(self.dataset)
        return length // size if self.division.drop_last else -(-length // size)

    def read(self, epoch: int, row: int) -> dict[str, Any]:
        """Arguments of a `DataLoader` that yields the shares of an epoch from a row on."""
        shares = _IndexedShares(self.dataset, self.division, ("sample", self.seed, epoch))
        return {"dataset": shares, "sampler": _Requests(self, epoch, row)}

    def order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        generator = torch.Generator().manual_seed(seed_of("shuffle", self.seed, epoch))
        return torch.randperm(len(self.dataset), generator=generator)


@dataclass(frozen=True)
class _Requests:
    """Per batch of an epoch, its number of rows and the samples that this rank reads."""

    source: IndexedSource
    epoch: int
    row: int

    def __iter__(self) -> Iterator[tuple[int, list[int], int | None]]:
        division, order = self.source.division, self.source.order(self.epoch)
        compared = int(order[0]) if len(division.plan.devices) > 1 and len(order) else None
        for batch in torch.split(order[self.row :], division.batch_size):
            num_rows = len(batch)
            if num_rows and not (division.drop_last and num_rows < division.batch_size):
                yield num_rows, batch[list(division.positions(num_rows))].tolist(), compared
            compared = None


class _IndexedShares(Dataset[Share]):
    """Reads samples, each with its own random numbers, so that random transforms are equal on all ranks that read a sample."""

    def __init__(self, dataset: Sized, division: Division, place: tuple[str, int, int]) -> None:
        self.dataset, self.division, self.place = dataset, division, place

    def __getitem__(self, request: tuple[int, list[int], int | None]) -> Share:
        num_rows, indices, compared = request
        with own_random_numbers() as numbers:
            digest = 0 if compared is None else self._digest(compared, numbers)
            return self.division.share(num_rows, self._samples(indices, numbers), digest)

    def _digest(self, index: int, numbers: OwnNumbers) -> int:
        """Of one sample, the same on all ranks; 0 if it is another each time that it is read."""
        once, again = (_digest(self._samples([index], numbers)) for _ in range(2))
        return once if once == again else 0

    def _samples(self, indices: list[int], numbers: OwnNumbers) -> list[Any]:
        fetch_all = getattr(self.dataset, "__getitems__", None)  # torch's protocol for reading several at once
        if fetch_all is not None:
            numbers.seed(seed_of(*self.place, indices[0]))
            found = list(fetch_all(indices))
            if len(indices) == 1 or not numbers.were_drawn():
                return found
        return list(itertools.chain.from_iterable(self._one_by_one(indices, numbers, fetch_all)))

    def _one_by_one(self, indices: list[int], numbers: OwnNumbers, fetch_all: Callable[[list[int]], Any] | None) -> Iterator[Any]:
        """Each sample in a list, with random numbers that do not depend on the other samples of the read."""
        for index in indices:
            numbers.seed(seed_of(*self.place, index))
            yield [self.dataset[index]] if fetch_all is None else fetch_all([index])


@dataclass(frozen=True)
class IterableSource:
    """Rows of a stream that is the same on every rank; each rank reads all of it and keeps its own."""

    dataset: Iterable[Any]
    division: Division

    @property
    def identity(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        self.division.check(self.division.batch_size)

    def num_batches(self) -> int:
        raise TypeError("a loader of an iterable dataset has no len()")

    def read(self, epoch: int, row: int) -> dict[str, Any]:
        return {"dataset": _StreamShares(self.dataset, self.division, row)}


class _StreamShares(IterableDataset[Share]):
    def __init__(self, dataset: Iterable[Any], division: Division, row: int) -> None:
        self.dataset, self.division, self.row = dataset, division, row

    def __iter__(self) -> Iterator[Share]:
        stream = itertools.islice(iter(self.dataset), self.row, None)
        while samples := list(itertools.islice(stream, self.division.batch_size)):
            num_rows = len(samples)
            if not (self.division.drop_last and num_rows < self.division.batch_size):
                yield self.division.share(num_rows, [samples[position] for position in self.division.positions(num_rows)])


def _digest(sample: Any) -> int:
    """Of the tensors, arrays, numbers and text in a sample; other objects count by their types."""
    return reduce(lambda found, leaf: zlib.crc32(_content(leaf), found), pytree.tree_leaves(sample), 0)


def _content(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
        return bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if type(value).__module__ == "numpy":
        return bytes(value.tobytes())
    return repr(value if isinstance(value, (str, bytes, int, float, complex, type(None))) else type(value).__name__).encode()


RowSource = IndexedSource | IterableSource
"""What a loader reads its rows from."""


class OwnNumbers:
    """The global random numbers, while they are lent."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")  # who draws from it has imported it
        self._before = self._state()
        self._seeded = self._before

    def seed(self, number: int) -> None:
        random.seed(number)
        torch.default_generator.manual_seed(number)
        if self._numpy is not None:
            self._numpy.random.seed(number % 2**32)
        self._seeded = self._state()

    def were_drawn(self) -> bool:
        """Whether somebody drew since they were seeded."""
        (python, of_torch, numpy), now = self._seeded, self._state()
        is_same = numpy is None or (numpy[2:] == now[2][2:] and (numpy[1] == now[2][1]).all())
        return not (is_same and python == now[0] and torch.equal(of_torch, now[1]))

    def put_back(self) -> None:
        random.setstate(self._before[0])
        torch.default_generator.set_state(self._before[1])
        if self._numpy is not None:
            self._numpy.random.set_state(self._before[2])

    def _state(self) -> tuple[Any, torch.Tensor, Any]:
        numpy = None if self._numpy is None else self._numpy.random.get_state()
        return random.getstate(), torch.default_generator.get_state(), numpy


@contextmanager
def own_random_numbers() -> Iterator[OwnNumbers]:
    """Lends the global random numbers, and puts them back at the end."""
    numbers = OwnNumbers()
    try:
        yield numbers
    finally:
        numbers.put_back()
