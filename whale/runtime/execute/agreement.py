"""The agreement of all ranks on a step: the batch's rows and contents, the weights of the loss, and the state that they have in common."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, cast

import torch

import whale.runtime.execute.call_check as call_check
import whale.runtime.execute.equal_copies as equal_copies
from whale.comm import Launched
from whale.errors import BatchError, WhaleError, first_few
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime.execute.batch import BITS, BatchView, SharedPiece, balance, check_rows, combined, digests, on_host, shared_pieces
from whale.runtime.execute.call_check import WorldSums
from whale.runtime.execute.equal_copies import EqualCopies
from whale.runtime.execute.loss import WeightProgram
from whale.runtime.execute.rank_stages import RankStages
from whale.runtime.execute.roster import Roster
from whale.units import listed

DEVICE_STEPS = 3
"""Steps in which batches on a device are compared by content, for which the host waits."""

_KNOWN_BY = (
    "A batch of engine.loader is recognised by its tensors: where all are replaced (x.to(device), which the engine does for you), replace "
    "them inside the batch that the loader gave"
)
_NUM_OF_BATCH = call_check.NUM_REPORTED - equal_copies.NUM_REPORTED
_CALLS: Mapping[str, call_check.Call] = {"train": "step", "eval": "evaluate", "predict": "predict", "eval_predict": "evaluate"}


@dataclass(frozen=True)
class _Report:
    """What this rank reports of its batch."""

    num_rows: float  # NaN if it refuses the batch
    is_whole: bool = False  # whether it has all rows, so that it can compute the weights of the loss alone
    # a digest of its capture, since ranks with different batch sizes would run different ones; None if it has no part of the batch
    capture: int | None = None
    contents: Mapping[str, int] | None = None  # a digest of each tensor of a global batch, or of `place`; None if not compared
    place: str | None = None  # which batch of a loader it is (`BatchView.place`)
    beside: str | None = None  # which of a loader's the script has in hand instead (`BatchView.beside`)
    balance: int | None = None  # of rows that other ranks read too (`shared_pieces`); None if not compared
    copies: tuple[float, ...] = (0.0,) * equal_copies.NUM_REPORTED  # of weights and settings that others have too (`EqualCopies.report`)
    refusal: str | None = None  # why it refuses the batch

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rows, their square, whether all are here; for capture and contents: whether there is one, its value, its square; for the
        balance the first two; copies. Sums over all ranks are exact in float64.
        """
        values = (self.capture, None if self.contents is None else combined(self.contents))
        found = [number for one in values for number in (one is not None, one or 0, (one or 0) ** 2)]
        return self.num_rows, self.num_rows**2, self.is_whole, *found, self.balance is not None, self.balance or 0, *self.copies


@dataclass(frozen=True)
class PendingAgreement:
    """An agreement in progress."""

    # the measured weights of the global batch if they are known at once (on ranks that count their terms); None if `finish` returns them
    weights: list[torch.Tensor] | None
    finish: Callable[[], list[torch.Tensor]]  # waits, and returns the summed weights; raises `BatchError` if ranks differ


class Agreement:
    """Checks the batch in a small all-reduce behind the first forward, and sums the measured weights in a second.

    The second runs only if some rank lacks rows, and after the first: a rank in another call sums no weights.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelGraph,
        weights: WeightProgram,  # the loss terms whose weights the batch decides
        stages: RankStages,
        tensors: Mapping[str, torch.Tensor],  # what weights may read besides the batch
        roster: Roster,
        world_sums: WorldSums,
        copies: EqualCopies | None,  # None without training
    ) -> None:
        self._copies = copies
        self._plan, self._weights, self._tensors = plan, weights, tensors
        self._loss_stages, self._held_terms = stages.loss_stages(model), stages.held_terms(model)
        self._rank_place, self._world, self._world_sums = roster.rank_place, roster.world, world_sums
        self._divided: dict[int, tuple[tuple[int, int], ...]] = {}
        self._num_compared, self._compares_places = 0, False
        self._shared: dict[int, tuple[SharedPiece, ...]] = {}
        self._mode = model.mode
        self._call = _CALLS[model.mode]
        self._capture = int(model.fingerprint, 16) & ((1 << BITS) - 1)
        self._sizes = {op.target: str(op.outputs[0]) for op in model.ops if op.kind == "input" and op.outputs}

    def micro_batches(self, num_rows: int) -> tuple[tuple[int, int], ...]:
        """Global row intervals of this rank's micro-batches. Raises BatchError if the batch is too small for the plan."""
        if num_rows not in self._divided:
            check_rows(self._plan, num_rows, trains=self._mode == "train")
            self._divided[num_rows] = () if self._rank_place is None else self._plan.micro_batch_rows(self._rank_place.replica, num_rows)
        return self._divided[num_rows]

    def begin(self, batch: BatchView, call: call_check.Call | None = None) -> PendingAgreement:
        """Starts the agreement. If only this rank refuses the batch, the others learn that ranks differ.

        Args:
            call: of the engine; None for that of the mode.

        Raises:
            BatchError: the batch is too small for the plan, or its rows differ between ranks.
            RuntimeFault: ranks hold different weights of one parameter, or different settings of the optimizer.
        """
        self._call = call or _CALLS[self._mode]
        try:
            self.micro_batches(batch.num_rows)
        except BatchError as refusal:
            report = _Report(batch.num_rows)
            self._end(self._start(report), report, None)
            raise refusal
        if self._world.is_alone and batch.is_global:
            return PendingAgreement(self._measure_whole(batch), lambda: [])
        report = self._report(batch)
        if self._copies is not None:
            report = replace(report, copies=self._copies.report())
        if batch.is_global:
            first = self._start(report)
            return PendingAgreement(
                self._measure_whole(batch), lambda: self._end(first, report, self._none() if self._world.can_compare else None)
            )
        measured = self._measure(batch)
        first = self._start(report)
        return PendingAgreement(None, lambda: self._end(first, report, measured))

    def refuse(self, reason: WhaleError, call: call_check.Call | None = None) -> None:
        """Takes part although this rank refuses its batch, so that no other rank waits for it."""
        self._call = call or _CALLS[self._mode]
        with suppress(BatchError):  # this rank's own error says more
            refusal = _Report(math.nan, refusal=reason.message)
            self._end(self._start(refusal), refusal, None)

    def answers_for(self, term: int) -> bool:
        """Whether this rank reports a term's weight to all others."""
        rank_place = self._rank_place
        return rank_place is not None and rank_place.replica == 0 and rank_place.position == 0 and bool(self._loss_stages[term])

    def _none(self) -> torch.Tensor:
        return torch.zeros(len(self._weights.measured), dtype=torch.float64, device=self._world.device)

    def _report(self, batch: BatchView) -> _Report:
        """The report on a batch: digests of it if all ranks have it, else of the rows that others read too.

        Batches on a device are digested only in the first steps, and after a change between batches of a loader and others: a script may
        have lost the loader's mark.
        """
        if self._compares_places != (batch.place is not None):
            self._num_compared, self._compares_places = 0, not self._compares_places
        self._num_compared += 1
        report = _Report(batch.num_rows, batch.is_global, self._capture if batch.leaves else None)
        if not self._world.can_compare:
            return report
        if batch.place is not None:
            report = replace(report, contents={"": zlib.crc32(batch.place.encode())}, place=batch.place)
        if not (on_host(batch.leaves) or self._num_compared <= DEVICE_STEPS):
            return report
        if batch.place is None:
            return replace(report, contents=digests(batch.leaves), beside=batch.beside)
        if self._rank_place is None:
            return replace(report, balance=0)
        if batch.num_rows not in self._shared:
            self._shared[batch.num_rows] = shared_pieces(self._plan, self._rank_place, batch.num_rows)
        return replace(report, balance=balance(batch, self._shared[batch.num_rows]))

    def _start(self, report: _Report) -> tuple[torch.Tensor, Launched | None]:
        """Starts the sum, on the host so that nobody waits for a GPU."""
        return self._world_sums.report(self._call, self._world.rank, report.numbers)

    def _end(self, first: tuple[torch.Tensor, Launched | None], report: _Report, measured: torch.Tensor | None) -> list[torch.Tensor]:
        """Compares, then sums what was measured if some rank needs it; `measured` is None if this rank refuses the batch."""
        if not self._world.can_compare:
            return [] if measured is None else list(measured)
        num_whole = self._compare(first, report)
        if measured is None or not len(measured) or num_whole == self._world.size:
            return []
        self._world_sums.add(measured, "summing the weights of the loss")
        return list(measured)

    def _compare(self, first: tuple[torch.Tensor, Launched | None], report: _Report) -> int:
        """Waits for all reports and compares them; returns the number of ranks that have all rows."""
        found = self._world_sums.collect(first, self._call, "comparing the batch")
        (count, squares, num_whole, *others, num_balanced, rest), copies = found[:_NUM_OF_BATCH], found[_NUM_OF_BATCH:]
        if math.isnan(count):
            self._refuse_with_others(report)
        if not call_check.are_equal(self._world.size, count, squares):
            raise BatchError(
                f"the number of rows differs between ranks (here {report.num_rows}, {count / self._world.size:g} on average)",
                hint=f"give every rank the same global batch, or use engine.loader. {_KNOWN_BY}",
            )
        if not call_check.are_equal(*others[:3]):
            self._refuse_capture(report)
        if not call_check.are_equal(*others[3:]):
            self._refuse_contents(report)
        if rest and num_balanced == self._world.size:
            raise BatchError(
                "ranks read different values for the same sample of the dataset",
                hint="draw random numbers in a dataset from Python's, NumPy's or torch's own generators, which the loader seeds for "
                "each sample; or seed yours by the sample's index",
            )
        if self._copies is not None and not self._copies.are_equal(copies):
            self._copies.check()
        return int(num_whole)

    def _refuse_with_others(self, report: _Report) -> NoReturn:
        """Raises which ranks have refused their batch, and why the first did. A collective."""
        found = cast(list[str | None], self._world.gather_objects(report.refusal))
        refusals = {rank: reason for rank, reason in enumerate(found) if reason is not None}
        raise BatchError(
            f"the batch was refused on {listed('rank', list(refusals))}: {next(iter(refusals.values()))}",
            hint="those ranks' own errors say more",
        )

    def _refuse_capture(self, report: _Report) -> NoReturn:
        """Raises whose batch has other sizes or parts. A collective."""
        found = cast(list[Mapping[str, str] | None], self._world.gather_objects(None if report.capture is None else self._sizes))
        known = {rank: sizes for rank, sizes in enumerate(found) if sizes is not None}
        first, reference = next(iter(known.items()))
        names = dict.fromkeys(name for sizes in known.values() for name in sizes)
        odd = [
            f"{name} {sizes.get(name, 'missing')} on rank {rank}, {reference.get(name, 'missing')} on rank {first}"
            for name in names
            for rank, sizes in known.items()
            if sizes.get(name) != reference.get(name)
        ]
        if not odd:
            raise BatchError(
                "ranks captured different models for the batch's sizes: their ops differ",
                hint="start with whale run, or set PYTHONHASHSEED: the model's code may iterate over a set",
            )
        raise BatchError(
            f"the batch has different parts or sizes on different ranks (b: rows; {'; '.join(odd)})",
            hint="padding to the longest row must see all rows: use engine.loader(..., whole_batches=True), or pad to a fixed length",
        )

    def _refuse_contents(self, report: _Report) -> NoReturn:
        """Raises which tensors of the batch differ on which ranks. A collective."""
        places = self._world.gather_objects(report.place)
        if any(place is not None for place in places):
            ranks_at = {place: listed("rank", [rank for rank, each in enumerate(places) if each == place]) for place in places}
            listing = first_few([f"{ranks}: {place or 'no batch of engine.loader'}" for place, ranks in ranks_at.items()], separator="; ")
            raise BatchError(
                f"ranks step with different global batches ({listing})",
                hint="give all ranks the same dataset, skip no batch of the loader on one rank only, and step on all ranks with its "
                f"batches or on none. {_KNOWN_BY}",
            )
        found = cast(list[Mapping[str, int] | None], self._world.gather_objects(report.contents))
        known = {rank: contents for rank, contents in enumerate(found) if contents is not None}
        first, reference = next(iter(known.items()))
        names = dict.fromkeys(name for contents in known.values() for name in contents)
        odd = {name: [rank for rank, contents in known.items() if contents.get(name) != reference.get(name)] for name in names}
        listing = "; ".join(
            f"{name}: {listed('rank', ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank {first}"
            for name, ranks in odd.items()
            if ranks
        )
        if report.beside is not None:
            raise BatchError(
                f"the batch differs between ranks ({listing}), and has no tensor of the one that engine.loader gave ({report.beside})",
                hint="it counts as a global batch of your own, but was made of rows that are others on each rank: choose rows (x[mask]) in "
                f"the dataset. {_KNOWN_BY}",
            )
        raise BatchError(
            f"the batch differs between ranks ({listing})",
            hint="a DataLoader with shuffle=True gives each rank other rows unless it is seeded: pass it generator="
            "torch.Generator().manual_seed(0), and seed what is random in the dataset; or use engine.loader(dataset, shuffle=True). "
            f"{_KNOWN_BY}",
        )

    def _measure_whole(self, batch: BatchView) -> list[torch.Tensor]:
        """The weights of a batch that is here as a whole: needs no other rank."""
        rows, device = [(0, batch.num_rows)], self._world.device
        return [
            self._weights.measure(position, batch, rows, self._tensors, device) if index in self._held_terms else torch.zeros(())
            for position, index in enumerate(self._weights.measured)
        ]

    def _measure(self, batch: BatchView) -> torch.Tensor:
        """This rank's part of the weights that the batch decides: over its own rows, in the stages with the terms."""
        total = self._none()
        for position, index in enumerate(self._weights.measured):
            for stage in self._loss_stages[index]:
                rows = self._own_rows(stage, batch.num_rows)
                total[position] += self._weights.measure(position, batch, rows, self._tensors, self._world.device)
        return total

    def _own_rows(self, stage: int, num_rows: int) -> list[tuple[int, int]]:
        assert self._rank_place is not None, "an idle rank counts nothing"
        held = self._plan.replicas[self._rank_place.replica].stages[stage]
        pieces = self.micro_batches(num_rows)
        return [held.row_intervals(stop - start, start)[self._rank_place.position] for start, stop in pieces]
