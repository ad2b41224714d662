"""The predicted or measured times of a schedule's actions."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.schedule import Action


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end, in the unit of the costs it was made from (seconds, as a rule)."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans per pipeline rank.

    Attributes:
        ranks: per rank, compute spans in order of start.
        peak_in_flight: per rank, the most chunk activations alive at once.
        exposed_sync: gradient synchronisation that no computation hides.
    """

    ranks: tuple[tuple[Span, ...], ...]
    peak_in_flight: tuple[int, ...] = ()
    exposed_sync: float = 0.0

    @property
    def makespan(self) -> float:
        """End of the last action of all."""
        return max((span.end for spans in self.ranks for span in spans), default=0.0)
