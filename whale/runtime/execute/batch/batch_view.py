"""The rows of the global batch that this rank has in hand, cut by global row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class BatchView:
    """A batch, or a rank's rows of one.

    Attributes:
        leaves: tensors by the name of their input op.
        with_rows: names of the leaves whose dimension 0 is the batch; the others are whole.
        num_rows: rows of the global batch.
        held: global row intervals that the leaves hold, ascending.
        is_own: whether this rank has read them for itself; else all ranks were given the same batch.
    """

    leaves: Mapping[str, torch.Tensor]
    with_rows: frozenset[str]
    num_rows: int
    held: tuple[tuple[int, int], ...]
    is_own: bool = False

    @property
    def is_global(self) -> bool:
        """Whether every row is here."""
        return self.held == ((0, self.num_rows),)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A leaf's rows ``start:stop`` of the global batch, or all of a leaf without rows."""
        leaf = self.leaves[name]
        if name not in self.with_rows:
            return leaf
        offset = 0
        for low, high in self.held:
            if low <= start and stop <= high:
                return leaf.narrow(0, offset + start - low, stop - start)
            offset += high - low
        raise AssertionError(f"rows {start}:{stop} are not among {self.held}")

    def picked(self, names: Iterable[str], rows: tuple[tuple[int, int], ...], move: Callable[[torch.Tensor], torch.Tensor]) -> BatchView:
        """Some leaves with some rows alone, and where they lie in host memory, moved.

        Args:
            names: of the leaves.
            rows: global row intervals, ascending, each within one that is held.
            move: takes each leaf elsewhere.
        """
        leaves = {}
        for name in names:
            pieces = [self.rows(name, start, stop) for start, stop in rows] if name in self.with_rows else [self.leaves[name]]
            leaf = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            leaves[name] = move(leaf) if leaf.device.type == "cpu" else leaf
        return replace(self, leaves=leaves, held=rows)

    def rows_on(self, device: torch.device, name: str, start: int, stop: int) -> torch.Tensor:
        """What `rows` gives, on a device: there already, or on its way from pinned memory, so that the host does not wait for the copy."""
        rows = self.rows(name, start, stop)
        if device.type == "cuda" and rows.device.type == "cpu":
            rows = rows.pin_memory()
        return rows.to(device, non_blocking=True)
