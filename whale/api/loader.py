"""Batches of a dataset, of which every rank reads its own rows only.

order of the epoch (on all ranks)    7 2 9 0 | 4 1 8 3 | 6 5
the plan gives rank 0 rows 0:3       of the second batch rank 0 reads samples 4 1 8, rank 1 reads sample 3
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text
from torch.utils.data import DataLoader, IterableDataset, default_collate

from whale.api.rank_batch import ORIGINS, RankBatch, RankRows, living, mark, recognized
from whale.api.row_source import Collate, Division, IndexedSource, IterableSource, RowSource, Share
from whale.errors import BatchError, CheckpointError
from whale.ir.plan import Plan
from whale.runtime.program.randomness import seed_of
from whale.runtime.state.engine_state import EngineState

_OWN_OPTIONS = frozenset({"batch_size", "batch_sampler", "sampler", "generator", "collate_fn"})
_OWN_ORDER = (
    "let dataset[i] be the sample that comes i-th, as torch.utils.data.Subset(dataset, order) does; or pass batches of a DataLoader with "
    "this {name}= to the engine, each the whole global batch and the same on every rank"
)
_IN_PLACE_OF = {name: _OWN_ORDER.format(name=name) for name in ("sampler", "batch_sampler")}


def make_loader(
    dataset: Any,
    *,
    global_batch_size: int | None,
    plan: Plan,
    rank: int | None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    collate: Collate | None = None,
    num_workers: int = 0,
    progress: Callable[[], str] | None = None,
    whole_batches: bool = False,
    **options: Any,
) -> Loader:
    """Makes a loader of a rank's rows.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; or a `torch.utils.data.IterableDataset` that yields the same samples on every rank,
            of which each rank reads all and keeps its own, with at most one worker.
        global_batch_size: rows of a batch over all ranks; None is an error that says so.
        plan: says which rows a rank needs.
        rank: this rank's number in the plan; a rank outside it (None) reads the first row of each batch, so that the script sees its form.
        shuffle: a new order in every epoch, equal on all ranks; not for an iterable dataset.
        seed: of the order, and of the workers' random numbers.
        drop_last: leaves out a smaller last batch, which otherwise is divided again in proportion.
        collate: makes a batch of a list of samples, dimension 0 of its tensors being the samples; torch's default otherwise.
        num_workers: processes that read ahead.
        progress: the text next to a progress bar per epoch on standard error, on the plan's rank 0; None for no bar.
        whole_batches: every rank reads all rows of each batch: for a collate function that must see them all (padding to the longest row).
        **options: of `torch.utils.data.DataLoader`: ``pin_memory``, ``prefetch_factor``, ``worker_init_fn``, ``timeout`` ...

    Raises:
        BatchError: full batches, or the short last one, are too small for the plan; or the options contradict one another.
    """
    for name in sorted(_OWN_OPTIONS & options.keys()):
        raise BatchError(
            f"engine.loader does not take {name}=", hint=_IN_PLACE_OF.get(name, "use global_batch_size, shuffle, seed and collate")
        )
    if global_batch_size is None or global_batch_size < 1:
        raise BatchError(f"global_batch_size={global_batch_size} is not at least 1")
    division = Division(global_batch_size, plan, rank, drop_last, collate or default_collate, whole_batches)
    source: RowSource
    if isinstance(dataset, IterableDataset):
        if shuffle or num_workers > 1:
            raise BatchError(
                f"shuffle={shuffle}, num_workers={num_workers} for an iterable dataset, which is read in its own order by at most one "
                "worker"
            )
        source = IterableSource(dataset, division)
    else:
        source = IndexedSource(dataset, division, shuffle, seed)
    source.check()
    return Loader(source, seed, {"num_workers": num_workers, **options}, progress=progress if rank == 0 else None)


def leave_group(init: Callable[[int], None] | None, worker: int) -> None:
    """Starts a worker in a process group of its own: torchrun's SIGTERM to the group of a rank would end it, and the rank would fail."""
    os.setpgid(0, 0)
    if init is not None:
        init(worker)


class Loader:
    """Iterates over the batches of one epoch; iterate again for the next.

    An iteration starts with the epoch's first batch, or at a `position` that was set. An epoch left early starts again.

    Attributes:
        in_hand: the batch handed out last in the iteration under way, and where it comes from.
        placed: where `set_epoch` continues, since a batch was last stepped on or a checkpoint read; else None.
        left: the number of the last batch of the last complete iteration.
    """

    def __init__(self, source: RowSource, seed: int, options: Mapping[str, Any], *, progress: Callable[[], str] | None = None) -> None:
        self._source, self._seed, self._options = source, seed, dict(options)
        self._progress = progress
        self._epoch, self._row, self._resumes = 0, 0, False
        self.in_hand: tuple[Any, RankRows] | None = None
        self.placed: Mapping[str, int] | None = None
        self.left: int | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration start with the first batch of an epoch."""
        self._epoch, self._row, self._resumes = epoch, 0, False
        self.placed = self.position

    @property
    def position(self) -> dict[str, int]:
        """Where to go on after the batches handed out so far, as plain data for a checkpoint.

        Setting it raises a `CheckpointError` where it comes from a loader of other samples or another order.
        """
        return self._at(self._epoch, self._row)

    @position.setter
    def position(self, position: Mapping[str, int]) -> None:
        self.check(position)
        self._epoch, self._row, self._resumes = position["epoch"], position["row"], True

    def _at(self, epoch: int, row: int) -> dict[str, int]:
        return {"epoch": epoch, "row": row, **self._source.identity}

    def mismatch(self, position: Mapping[str, int]) -> str | None:
        """Why a position is of other samples or another order, with both values; None where it fits."""
        for key, value in self._source.identity.items():
            if position.get(key) != value:
                return f"{key} there: {position.get(key)}, here: {value}"
        return None

    def check(self, position: Mapping[str, int]) -> None:
        """Checks a position.

        Raises:
            CheckpointError: it is of a loader of other samples or another order.
        """
        if (values := self.mismatch(position)) is not None:
            raise CheckpointError(
                f"the data position belongs to a loader with other samples or another order ({values})",
                hint="make the loader with the same dataset, shuffle and seed, or start an epoch with set_epoch",
            )

    def divided(self, plan: Plan, rank: int | None) -> RowSource:
        """What it would read from under another plan.

        Raises:
            BatchError: full batches, or the short last one, are too small for it.
        """
        source = replace(self._source, division=replace(self._source.division, plan=plan, rank=rank))
        source.check()
        return source

    def read_from(self, source: RowSource) -> None:
        """Reads the rows of another rank or plan from the next batch on, in an iteration under way too."""
        self._source = source

    def __len__(self) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: of an iterable dataset without a length.
        """
        return self._source.num_batches()

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        return batches if self._progress is None else self._with_bar(batches, self._progress)

    def _with_bar(self, batches: Iterator[Any], words: Callable[[], str]) -> Iterator[Any]:
        try:
            total: int | None = len(self)
        except TypeError:  # a stream
            total = None
        with Progress(*Progress.get_default_columns(), _Words(words), console=Console(stderr=True)) as bar:
            yield from bar.track(batches, total, description=f"epoch {self._epoch + 1}")

    def _batches(self) -> Iterator[Any]:
        self._row = self._row if self._resumes else 0
        self._resumes = False
        epoch, row, source, sample = self._epoch, self._row, self._source, 0
        shares = iter(self._fetch(epoch, row))
        share = next(shares, None)
        while share is not None:
            if self._source is not source:  # under another plan since: what was read ahead is of other rows
                source, shares = self._source, iter(self._fetch(epoch, row))
                share = next(shares)
            (num_rows, data, digest), start = share, self._at(epoch, row)
            sample = digest or sample
            # The next one is read before this one is handed out, so that after the last one the position is the next epoch's start.
            share = next(shares, None)
            row += num_rows
            stop = self._at(epoch, row) if share is not None else self._at(epoch + 1, 0)
            if not self._resumes:  # else another iteration begins elsewhere, where a position says
                self._epoch, self._row = stop["epoch"], stop["row"]
            origin = RankRows(source.division.rows(num_rows), num_rows, source.division.plan, self, start, stop, sample)
            mark(data, origin)
            self.in_hand = in_hand = data, origin
            try:
                yield in_hand[0]
            finally:
                if self.in_hand is in_hand:  # it holds what is known by the loader, and so the loader
                    self.in_hand = None
            del in_hand
            if share is None:
                self.left = origin.number

    def _fetch(self, epoch: int, row: int) -> DataLoader[Share]:
        generator = torch.Generator().manual_seed(seed_of("workers", self._seed, epoch))
        return DataLoader(batch_size=None, collate_fn=_as_it_is, generator=generator, **self._source.read(epoch, row), **self._options)


def _as_it_is(share: Any) -> Any:
    return share


class _Words(ProgressColumn):
    """The end of a bar's line."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def render(self, task: Task) -> Text:
        return Text(self._words())


class DataPosition:
    """The loaders of one engine; `position` of its state is one that was read, until a step was fed from there."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._made: list[weakref.ref[Loader]] = []  # a script may make one for every epoch
        self._feeding: Loader | None = None
        self._fed: Mapping[str, int] | None = None
        self._number: int | None = None
        self._uses_again = False
        self._resumed: Loader | None = None

    @property
    def now(self) -> Mapping[str, int] | None:
        """Where the data goes on after the steps done, whatever else the loader has handed out; None for the start."""
        if self.state.position is not None or self._feeding is None:
            return self.state.position
        return self._feeding.placed or self._fed

    def before(self, batch: Any) -> Mapping[str, int] | None:
        """Where the data goes on if a batch, which `recognized` gave, does not count after all."""
        return batch.origin.start if isinstance(batch, RankBatch) and isinstance(batch.origin.source, Loader) else self.now

    def add(self, loader: Loader) -> None:
        self._made = [weakref.ref(each) for each in (*self._loaders(), loader)]
        self._hand_out()

    def recognized(self, batch: Any) -> Any:
        """A `RankBatch` where a batch is a loader's; any other batch unchanged."""
        in_hand = [loader.in_hand for loader in self._loaders() if loader.in_hand is not None]
        found = recognized(batch, in_hand) if in_hand or len(ORIGINS) else batch
        if isinstance(found, RankBatch) and not found.origin.is_whole:
            self._uses_again |= found.origin.number == self._number
        return found

    @property
    def in_hand(self) -> str | None:
        """The place of a batch that a loader has handed out last, in an iteration under way."""
        return next((loader.in_hand[1].place for loader in self._loaders() if loader.in_hand is not None), None)

    def feed(self, batch: RankRows) -> None:
        """Notes what the next step is given.

        Raises:
            CheckpointError: a position was read, and the batch is of a loader that does not go on from there.
        """
        if not isinstance(batch.source, Loader):
            return
        source, read = batch.source, self.state.position
        if read is not None and source.placed is None:
            self._check_goes_on(source, batch, read)
        self._feeding, self._fed, self._number, self.state.position = source, batch.stop, batch.number, None
        source.placed = None

    def _check_goes_on(self, source: Loader, batch: RankRows, read: Mapping[str, int]) -> None:
        if source is not self._resumed:
            source.check(read)
            raise CheckpointError(
                "the batch comes from another loader than the one that continues from the checkpoint's data position, the first made "
                f"of the same samples (this one is at epoch {source.epoch})",
                hint="make the training loader before other loaders of the same samples, or start an epoch with set_epoch",
            )
        if batch.start != read:
            raise CheckpointError(
                f"the batch does not follow the checkpoint's data position (checkpoint: {_place_text(read)}; the batch: "
                f"{_place_text(batch.start)})",
                hint="after engine.load start a new iteration over the loader and skip no batch, or start an epoch with set_epoch",
            )

    def check(self, position: Mapping[str, int]) -> None:
        """Checks a position before anything is done with it.

        Raises:
            CheckpointError: it is of other samples or another order than the training's loader.
        """
        if self._feeding is not None:
            self._feeding.check(position)

    def resume(self) -> None:
        """Takes up the position that has been read, if one has."""
        self._resumed = None
        for loader in self._loaders():
            loader.placed = None
        self._hand_out()

    @property
    def needed(self) -> str:
        """A batch that the script may still pass to the engine, and which another plan would make useless, in words; "" for none.

        That is a live batch other than the last one trained on, and than the last of an epoch, which a ``for`` leaves behind. A script that
        has used a batch again after training on it may do so again.
        """
        if self._uses_again:
            return "the script uses a batch of engine.loader again after training on it"
        alive = living()
        for loader in self._loaders():
            is_feeding = loader is self._feeding
            drawn = [loader.in_hand[1]] if is_feeding and loader.in_hand is not None else []
            for origin in (*drawn, *(each for each in alive if each.source is loader)):
                if not origin.is_whole and origin.number not in (self._number, None if is_feeding else loader.left):
                    return f"the script holds another batch of engine.loader than the last one it trained on ({_place_text(origin.start)})"
        return ""

    def divided(self, plan: Plan, rank: int | None) -> list[tuple[Loader, RowSource]]:
        """The loaders that the script still has, with what they would read from under another plan.

        Raises:
            BatchError: a loader's batches are too small for it.
        """
        return [(loader, loader.divided(plan, rank)) for loader in self._loaders()]

    def _loaders(self) -> list[Loader]:
        """Those that the script still has, as they were made."""
        return [loader for each in self._made if (loader := each()) is not None]

    def _hand_out(self) -> None:
        read = self.state.position
        if read is None or self._resumed is not None:
            return
        candidates = self._loaders() if self._feeding is None else [self._feeding]
        self._resumed = next((loader for loader in candidates if loader.mismatch(read) is None), None)
        if self._resumed is not None:
            self._resumed.position = read


def _place_text(position: Mapping[str, int]) -> str:
    return f"epoch {position['epoch']}, row {position['row']}"
