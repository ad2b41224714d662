"""Clipping by the global norm of the gradients; each element counts once, on the lowest rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from whale.runtime.program.shard.pieces import Index, on_device, part
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.scaling import by_type, scale
from whale.runtime.state.sparse_sums import dense_part
from whale.runtime.state.wide import as_real


class Clipping:
    """Computes the norm of all gradients, and clips those of this rank.

    Attributes:
        last: the norm before the last clipping.
    """

    def __init__(
        self,
        holdings: Holdings,
        rank: int | None,  # this rank of the plan; None if idle
        parameters: Mapping[str, torch.nn.Parameter],  # what the optimizer of this rank steps, by name
        limit: float | None,  # the largest norm; None for none
        add: Callable[[torch.Tensor, str], None],  # sums a tensor over all ranks, in place; its text names the wait
        device: torch.device,
    ) -> None:
        self._parameters, self._limit, self._device = tuple(parameters.values()), limit, device
        self._add = add
        self.last: torch.Tensor | None = None
        self._counted: list[tuple[torch.nn.Parameter, tuple[Index, ...] | None]] = []
        if rank is not None:
            self._counted = [
                (value, None if index is None else on_device(index, value.device))
                for name, value in parameters.items()
                for index in holdings.answered_for(name, rank)
            ]

    def norm(self) -> torch.Tensor:
        """The 2-norm over all gradients of the model, equal on every rank: 0-dim float64."""
        own = ((dense_part(p.grad), index) for p, index in self._counted if p.grad is not None)
        counted = (as_real(gradient if index is None else part(gradient, index)) for gradient, index in own)
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)]
        for (gradients,) in by_type((gradient,) for gradient in counted):
            norms += [norm.to(self._device) for norm in torch._foreach_norm(gradients, 2, dtype=torch.float64)]
        total = torch.stack(norms).square().sum()
        self._add(total, "summing the norm of the gradients")
        return total.sqrt()

    def clip(self, limit: float | None = None) -> torch.Tensor:
        """Scales gradients in place so that the global norm is at most the limit, as `torch.nn.utils.clip_grad_norm_`.

        Args:
            limit: instead of the configured one.

        Returns:
            The norm before: 0-dim float64, equal on every rank.
        """
        self.last = norm = self.norm()
        limit = self._limit if limit is None else limit
        if limit is not None:
            scale((limit / (norm + 1e-6)).clamp(max=1.0), self._parameters)
        return norm
