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
        exposed_sync: gradient synchronisation that no computation hides: from the end of the last computation
            of all to the end of the last synchronisation.
        syncs: per rank, spans of SYNC actions, which occupy the rank's network and not the rank.
    """

    ranks: tuple[tuple[Span, ...], ...]
    peak_in_flight: tuple[int, ...] = ()
    exposed_sync: float = 0.0
    syncs: tuple[tuple[Span, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """End of the last action of all, synchronisation included."""
        return max((span.end for spans in (*self.ranks, *self.syncs) for span in spans), default=0.0)
