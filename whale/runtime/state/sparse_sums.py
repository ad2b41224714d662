"""Sums of sparse gradients: every owner gathers the rows of all, and adds those of equal index.

owner 0   rows 3 5      counts 2 3  -->  rows 3 5 | 1 5 8  -->  rows 1 3 5+5 8
owner 1   rows 1 5 8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from whale.comm import Groups, Launched


@dataclass
class RowSum:
    """The sum of the gradient of one parameter, through one step."""

    parameter: torch.nn.Parameter  # of which each owner holds all
    adds: bool  # whether this rank's gradient is a term; else it is a copy of another's
    ranks: tuple[int, ...]  # of the owners, in the world
    _own: torch.Tensor | None = field(default=None, init=False)
    counts: torch.Tensor = field(init=False)  # rows of each

    def start(self, groups: Groups) -> Launched | None:
        """Starts to gather the numbers of rows."""
        gradient, parameter = self.parameter.grad, self.parameter
        if gradient is None or not self.adds:
            nothing = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            gradient = torch.sparse_coo_tensor(
                nothing, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape, check_invariants=False
            )
        self._own, self.parameter.grad = gradient.detach().coalesce(), None
        self.counts = torch.empty(len(self.ranks), dtype=torch.int64, device=parameter.device)
        return groups.all_gather(self.counts, self.counts.new_tensor([self._own._nnz()]), self.ranks)

    def finish(self, groups: Groups, wait: Callable[[Launched | None], None]) -> None:
        """Gathers the rows, once their numbers are there, and sets the gradient to their sum."""
        assert self._own is not None, "it was started"
        own, counts = self._own, self.counts.tolist()
        self._own = None
        found = []
        for mine in (own.indices()[0], own.values()):
            filled = mine.new_zeros(max(counts), *mine.shape[1:])
            filled[: len(mine)] = mine
            all_rows = filled.new_empty(len(counts) * max(counts), *mine.shape[1:])
            wait(groups.all_gather(all_rows, filled, self.ranks))
            parts = all_rows.view(len(counts), *filled.shape)
            found.append(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
        indices, values = found
        self.parameter.grad = torch.sparse_coo_tensor(indices[None], values, own.shape, check_invariants=False).coalesce()


def dense_part(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or the values of a sparse one, to read or change in place."""
    return gradient.values() if gradient.is_sparse else gradient


def added(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients of one parameter, in place if they are dense."""
    return (gradient + other).coalesce() if gradient.is_sparse else gradient.add_(other)
