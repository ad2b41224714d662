"""Scaling of gradients: by the loss scale of float16 training, and to a largest global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch

from whale.runtime.program.shard.pieces import Index, on_device, part
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.sparse_sums import dense_part
from whale.runtime.state.updates import as_real

GROWTH_STEPS = 2000
"""Consecutive steps with finite gradients after which the scale doubles, as in `torch.amp.GradScaler`."""


_GRADIENT, _DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("grad", "device", "dtype", "layout"))


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor on the loss that keeps float16 gradients from underflow."""

    value: float = 2.0**16  # a power of two, so that dividing gradients by it is exact
    num_finite: int = 0  # steps with finite gradients since it last changed

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next step: half after non-finite gradients, double after many finite ones."""
        if not is_finite:
            return LossScale(self.value / 2)
        done = self.num_finite + 1
        return LossScale(self.value * 2) if done == GROWTH_STEPS else LossScale(self.value, done)


def scale(factor: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Multiplies gradients in place by a 0-dim factor, which is not read on the host; one call per type and device."""
    for gradients in gradients_of(parameters):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.Tensor]]:
    """The gradients that there are, of sparse ones their values, by device and type."""
    found = [gradient for gradient in map(_GRADIENT, parameters) if gradient is not None]
    forms = set(zip(map(_DEVICE, found), map(_DTYPE, found), map(_LAYOUT, found), strict=True))
    if len(forms) == 1 and torch.strided in next(iter(forms)):  # nearly always
        return [found]
    return [own for (own,) in by_type((dense_part(gradient),) for gradient in found)]


def unscale(factor: torch.Tensor, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.Tensor:
    """`scale` by a power of two, which also finds whether all gradients are finite, as `torch.amp.GradScaler` does in one pass.

    Returns:
        1 where some gradient is not, else 0: 0-dim, float32, on `device`.
    """
    found = torch.zeros((), dtype=torch.float32, device=device)
    for (gradients,) in by_type((as_real(dense_part(parameter.grad)),) for parameter in parameters if parameter.grad is not None):
        own, place = found, gradients[0].device
        if place != device:
            own = torch.zeros((), dtype=torch.float32, device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, own, factor.to(place, torch.float32))
        if own is not found:
            found = torch.maximum(found, own.to(device))
    return found


def by_type(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors as columns, grouped by device and type of the first."""
    found: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        found.setdefault((row[0].device, row[0].dtype), []).append(row)
    return [tuple(map(list, zip(*own, strict=True))) for own in found.values()]


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
        self._whole: list[torch.nn.Parameter] = []
        self._parts: list[tuple[torch.nn.Parameter, tuple[Index, ...]]] = []
        for name, value in parameters.items():
            for index in () if rank is None else holdings.answered_for(name, rank):
                if index is None:
                    self._whole.append(value)
                else:
                    self._parts.append((value, on_device(index, value.device)))

    def norm(self) -> torch.Tensor:
        """The 2-norm over all gradients of the model, equal on every rank: 0-dim float64."""
        parts = ((part(dense_part(p.grad), index),) for p, index in self._parts if p.grad is not None)
        counted = [*gradients_of(self._whole), *(own for (own,) in by_type(parts))]
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)]
        for gradients in counted:
            if gradients[0].is_complex():
                gradients = list(map(as_real, gradients))
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
