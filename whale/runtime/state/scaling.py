"""Scaling of gradients: by the loss scale of float16 training, and to a largest global norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import torch

from whale.errors import RuntimeFault
from whale.runtime.program.shard.pieces import Index, on_device, part
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.host_copies import LateNumber
from whale.runtime.state.sparse_sums import dense_part
from whale.runtime.state.updates import as_real

MOST_LEFT_OUT = 20
"""Steps in turn that may be left out at a scale that never changes: a dynamic one would be at 1 by then."""
_LARGEST = 2.0**127
"""Largest power of two in float32."""


_GRADIENT, _DEVICE, _DTYPE, _LAYOUT = map(attrgetter, ("grad", "device", "dtype", "layout"))


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How a loss scale begins and changes, as `torch.amp.GradScaler` and DeepSpeed have it."""

    first: float = 2.0**16  # a power of two, so that dividing gradients by it is exact
    growth_steps: int | None = 2000  # consecutive steps with finite gradients after which it doubles; None: it never changes
    hysteresis: int = 1  # number of non-finite steps since it last doubled from which on each halves it


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor on the loss that keeps float16 gradients from underflow."""

    value: float
    num_finite: int = 0  # steps with finite gradients since it last changed, or since some were not
    num_tolerated: int = 0  # non-finite steps that have not halved it: since it last doubled; in turn, if it never changes

    def is_least(self, rule: ScaleRule) -> bool:
        """Whether a further step that is not finite is an error."""
        return self.value <= 1 or (rule.growth_steps is None and self.num_tolerated + 1 >= MOST_LEFT_OUT)

    def after(self, rule: ScaleRule, *, is_finite: bool) -> LossScale:
        """The scale of the next step."""
        if rule.growth_steps is None:
            return LossScale(self.value, 0, 0 if is_finite else self.num_tolerated + 1)
        if not is_finite and self.num_tolerated + 1 < rule.hysteresis:
            return LossScale(self.value, 0, self.num_tolerated + 1)
        if not is_finite:
            return LossScale(self.value / 2, 0, self.num_tolerated)
        done = self.num_finite + 1
        return LossScale(min(self.value * 2, _LARGEST)) if done == rule.growth_steps else LossScale(self.value, done, self.num_tolerated)


class LossScaling:
    """The loss scale from step to step. A device may be ahead of the host: it adapts its own scale, and the host reads verdicts later."""

    def __init__(self, rule: ScaleRule = ScaleRule()) -> None:
        self._rule = rule
        self._verdicts: deque[tuple[int, torch.Tensor, LateNumber]] = deque()  # number of a step, its loss, whether it was left out
        self.restore(LossScale(rule.first))

    def restore(self, scale: LossScale) -> None:
        """Goes on with a scale, for weights that have been replaced; one that never changes is that of the rule."""
        self._verdicts.clear()
        self._scale = LossScale(self._rule.first) if self._rule.growth_steps is None else scale
        self._was_skipped = False
        self._on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # the fields of `LossScale`

    @property
    def scale(self) -> LossScale:
        """That of the next step; waits for the device."""
        return self._ahead()[0]

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was left out; waits for the device."""
        return self._ahead()[1]

    @property
    def is_least(self) -> bool:
        """Whether a further step that is not finite is an error; waits for the device."""
        return self.scale.is_least(self._rule)

    def _ahead(self) -> tuple[LossScale, bool]:
        """The scale after all verdicts, and the last of them. One rank may ask for it alone: verdicts stay for `look`."""
        scale, was_skipped = self._scale, self._was_skipped
        for *_, verdict in self._verdicts:
            was_skipped = bool(verdict.read())
            scale = scale.after(self._rule, is_finite=not was_skipped)
        return scale, was_skipped

    def take(self, *, is_finite: bool) -> None:
        """Goes on after a step of which the host knows the verdict; raises as `look`."""
        self.look()
        self._scale, self._was_skipped, self._on_device = self._scale.after(self._rule, is_finite=is_finite), not is_finite, None

    def on(self, device: torch.device) -> torch.Tensor:
        """The scale of the next step on a device: 0-dim float32, changed in place by `update`."""
        if self._on_device is None:
            now = self.scale
            finite, tolerated = (torch.full((), count, dtype=torch.int32, device=device) for count in (now.num_finite, now.num_tolerated))
            self._on_device = torch.full((), now.value, dtype=torch.float32, device=device), finite, tolerated
        return self._on_device[0]

    def update(self, step_number: int, loss: torch.Tensor, found: torch.Tensor) -> None:
        """Goes on after a step of which the device knows the verdict, without waiting for it.

        Args:
            loss: of the step, for a message.
            found: 1 if the step was left out, else 0: 0-dim float32, as `on` is.
        """
        self.on(found.device)
        assert self._on_device is not None
        _update(self._rule, *self._on_device, found)
        self._verdicts.append((step_number, loss, LateNumber.of(found)))

    def look(self, num_left: int = 0) -> None:
        """Takes up the verdicts except the last `num_left`; all ranks do so at the same time.

        Raises:
            RuntimeFault: a step was not finite at the least scale.
        """
        while len(self._verdicts) > num_left:
            step_number, loss, verdict = self._verdicts.popleft()
            self._was_skipped = bool(verdict.read())
            if self._was_skipped and self._scale.is_least(self._rule):
                self._on_device = None
                self._verdicts.clear()  # the steps since had less than the least scale
                raise too_large(step_number, self._scale, f"loss {float(loss):g}")
            self._scale = self._scale.after(self._rule, is_finite=not self._was_skipped)


def _update(rule: ScaleRule, value: torch.Tensor, num_finite: torch.Tensor, num_tolerated: torch.Tensor, found: torch.Tensor) -> None:
    """`LossScale.after` on the device, in place."""
    if rule.growth_steps is None:
        return
    if rule.hysteresis == 1:
        torch._amp_update_scale_(value, num_finite, found, 2.0, 0.5, rule.growth_steps)
        return
    is_found, done = found > 0, num_finite + 1
    halves, doubles = is_found & (num_tolerated + 1 >= rule.hysteresis), ~is_found & (done == rule.growth_steps)
    value.copy_(torch.where(halves, value / 2, torch.where(doubles, (value * 2).clamp(max=_LARGEST), value)))
    num_finite.copy_(torch.where(is_found | doubles, 0, done))
    num_tolerated.copy_(torch.where(doubles, 0, num_tolerated + (is_found & ~halves)))


def too_large(step_number: int, scale: LossScale, figures: str) -> RuntimeFault:
    """The fault of a step that is not finite at the least scale."""
    return RuntimeFault(
        f"loss or gradients are not finite at step {step_number + 1} with a loss scale of {scale.value:g}: {figures}; the update was not "
        "applied",
        hint="float16 ends at 65,504: set precision.dtype: bf16 or float32, gradient.clip_norm or a lower learning rate, "
        "and load the last checkpoint",
    )


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


def note_non_finite(numbers: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """Sets `found` to 1 where some number, a tensor of its device and of one type, is not finite. One kernel."""
    torch._amp_foreach_non_finite_check_and_unscale_([each.detach() for each in numbers], found, _one(found.device))


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


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
        self._num_groups, self._group = len(holdings.plan.sync_members), 0 if rank is None else holdings.plan.sync_numbers[rank]
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
        """The 2-norm over all gradients of the model, equal on every rank that sums them: 0-dim float64."""
        parts = ((part(dense_part(p.grad), index),) for p, index in self._parts if p.grad is not None)
        counted = [*gradients_of(self._whole), *(own for (own,) in by_type(parts))]
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)]
        for gradients in counted:
            if gradients[0].is_complex():
                gradients = list(map(as_real, gradients))
            norms += [norm.to(self._device) for norm in torch._foreach_norm(gradients, 2, dtype=torch.float64)]
        total = torch.stack(norms).square().sum()
        if self._num_groups == 1:
            self._add(total, "summing the norm of the gradients")
            return total.sqrt()
        totals = torch.zeros(self._num_groups, dtype=total.dtype, device=total.device)
        totals[self._group] = total
        self._add(totals, "summing the norms of the gradients")
        return (totals[self._group] + (totals * 0).sum()).sqrt()  # where one is not finite, none is: all leave out a step together

    def clip(self, limit: float | None = None, factor: float = 1.0) -> torch.Tensor:
        """Scales gradients in place so that the global norm is at most the limit, as `torch.nn.utils.clip_grad_norm_`.

        Args:
            limit: instead of the configured one.
            factor: what gradients are multiplied by later; limit and norm are those of the products.

        Returns:
            The norm before: 0-dim float64, equal on every rank.
        """
        self.last = norm = self.norm() if factor == 1.0 else self.norm() * factor
        limit = self._limit if limit is None else limit
        if limit is not None:
            scale((limit / (norm + 1e-6)).clamp(max=1.0), self._parameters)
        return norm
