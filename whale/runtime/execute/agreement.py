"""What ranks must agree on before a step's first message: the rows of the batch, and the weights of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from whale.comm import Launched
from whale.errors import BatchError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime.execute.batch_view import BatchView
from whale.runtime.execute.everyone import Everyone
from whale.runtime.execute.loss import WeightProgram
from whale.runtime.execute.rank_batch import check_rows
from whale.runtime.execute.roster import Roster
from whale.runtime.execute.seat_stages import SeatStages


@dataclass(frozen=True)
class Pending:
    """An agreement under way.

    Attributes:
        weights: the measured weights of the global batch where they are known at once (on ranks that count their terms);
            None where `finish` brings them.
        finish: waits, and gives the weights that were summed; raises `BatchError` where ranks differ.
    """

    weights: list[torch.Tensor] | None
    finish: Callable[[], list[torch.Tensor]]


class Agreement:
    """Checks the batch and sums the measured weights in one small all-reduce that hides behind the first forward.

    Args:
        plan: how rows are divided.
        model: the captured model.
        weights: the loss terms whose weights the batch decides.
        stages: of this rank.
        tensors: what weights may read beside the batch.
        roster: who is who.
        everyone: sums over all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelGraph,
        weights: WeightProgram,
        stages: SeatStages,
        tensors: Mapping[str, torch.Tensor],
        roster: Roster,
        everyone: Everyone,
    ) -> None:
        self._plan, self._weights, self._tensors = plan, weights, tensors
        self._loss_stages, self._held_terms = stages.loss_stages(model), stages.held_terms(model)
        self._seat, self._world, self._everyone = roster.seat, roster.world, everyone
        self._divided: dict[int, tuple[tuple[int, int], ...]] = {}

    def micro_batches(self, num_rows: int) -> tuple[tuple[int, int], ...]:
        """Global row intervals of this rank's micro-batches.

        Raises:
            BatchError: the batch is too small for the plan.
        """
        if num_rows not in self._divided:
            check_rows(self._plan, num_rows)
            self._divided[num_rows] = () if self._seat is None else self._plan.micro_batch_rows(self._seat.replica, num_rows)
        return self._divided[num_rows]

    def begin(self, batch: BatchView) -> Pending:
        """Starts the agreement. Where this rank alone refuses the batch, the others learn that ranks differ.

        Raises:
            BatchError: the batch is too small for the plan, or its rows differ between ranks.
        """
        try:
            self.micro_batches(batch.num_rows)
        except BatchError as refusal:
            self._end(self._start(batch.num_rows, self._none()), batch.num_rows)
            raise refusal
        if batch.is_global:
            parts = self._start(batch.num_rows, self._none())
            return Pending(self._measure_whole(batch), lambda: self._end(parts, batch.num_rows))
        parts = self._start(batch.num_rows, self._measure(batch))
        return Pending(None, lambda: self._end(parts, batch.num_rows))

    def refuse(self) -> None:
        """Takes part where this rank has found its batch bad, so that no other rank waits for it."""
        with suppress(BatchError):  # this rank's own error says more
            self._end(self._start(math.nan, self._none()), 0)

    def answers_for(self, term: int) -> bool:
        """Whether this rank is the one that tells all others a term's weight."""
        seat = self._seat
        return seat is not None and seat.replica == 0 and seat.position == 0 and bool(self._loss_stages[term])

    def _none(self) -> torch.Tensor:
        return torch.zeros(len(self._weights.measured), dtype=torch.float64, device=self._world.device)

    def _start(self, num_rows: float, measured: torch.Tensor) -> list[tuple[torch.Tensor, Launched | None]]:
        """Sums over all ranks; the rows stay off a GPU, which is not to be waited for."""
        if self._world.is_alone:
            return [(measured, None)]
        rows = torch.tensor([num_rows, num_rows**2], dtype=torch.float64)
        vectors = [torch.cat([rows, measured])] if measured.device.type == "cpu" else [rows, measured]
        return [(vector, self._everyone.start(vector)) for vector in vectors]

    def _end(self, parts: list[tuple[torch.Tensor, Launched | None]], num_rows: int) -> list[torch.Tensor]:
        for _, work in parts:
            self._everyone.finish(work, "comparing the batch")
        if self._world.is_alone:
            return list(parts[0][0])
        count, squares = parts[0][0][:2].tolist()
        if math.isnan(count):
            raise BatchError("every rank needs a good batch (another rank has refused its own)", hint="see that rank's error")
        if abs(self._world.size * squares - count**2) > 0.5:
            raise BatchError(
                f"the batch must have the same rows on every rank (here {num_rows}, {count / self._world.size:g} on average)",
                hint="give every rank the same global batch, or use engine.loader",
            )
        return list(parts[0][0][2:] if len(parts) == 1 else parts[1][0])

    def _measure_whole(self, batch: BatchView) -> list[torch.Tensor]:
        """The weights of a batch that is here as a whole: nobody has to be asked."""
        rows, device = [(0, batch.num_rows)], self._world.device
        return [
            self._weights.measure(position, batch, rows, self._tensors, device) if index in self._held_terms else torch.zeros(())
            for position, index in enumerate(self._weights.measured)
        ]

    def _measure(self, batch: BatchView) -> torch.Tensor:
        """This rank's part of the weights that the batch decides: over its own rows, in the stages that hold the terms."""
        total = self._none()
        for position, index in enumerate(self._weights.measured):
            for stage in self._loss_stages[index]:
                rows = self._own_rows(stage, batch.num_rows)
                total[position] += self._weights.measure(position, batch, rows, self._tensors, self._world.device)
        return total

    def _own_rows(self, stage: int, num_rows: int) -> list[tuple[int, int]]:
        assert self._seat is not None, "an idle rank counts nothing"
        held = self._plan.replicas[self._seat.replica].stages[stage]
        pieces = self.micro_batches(num_rows)
        return [held.row_intervals(stop - start, start)[self._seat.position] for start, stop in pieces]
