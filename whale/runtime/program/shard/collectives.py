"""Asynchronous collectives of a split group on parts of different sizes, without gradients.

Gloo gathers equal parts only, by way of copies, and has no reduce-scatter: there an all-to-all sends the pieces, which moves
no more bytes. What no backend sums (booleans, int16) is summed as a type that all do. Where the devices compute in unlike half-precision
types, what is in these travels in float32, which holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import as_moved, rounded
from whale.runtime.program.shard.group import Arrival, Group
from whale.runtime.program.shard.slots import Slots

_SUMMED_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}
_HALVES = (torch.bfloat16, torch.float16)


class Pending:
    """A value in flight.

    Args:
        finish: makes the value from what arrived; keeps the buffers alive meanwhile.
        arrival: waits for it; None where nothing is sent.
    """

    def __init__(self, finish: Callable[[], Tensor], arrival: Arrival | None = None) -> None:
        self._finish, self._arrival = finish, arrival

    def wait(self) -> Tensor:
        """The value; raises as `Waits.wait`."""
        if self._arrival is not None:
            self._arrival()
        return self._finish()


def ready(value: Tensor) -> Pending:
    """A value without communication."""
    return Pending(lambda: value)


def _is_widened(value: Tensor, group: Group) -> bool:
    return group.is_unlike and value.dtype in _HALVES


def _narrowed(pending: Pending, dtype: torch.dtype, *, of_gradient: bool) -> Pending:
    """A value, or gradient, that travels in float32, rounded to this device's type."""
    return Pending(lambda: pending.wait().to(dtype) if of_gradient else rounded(pending.wait(), dtype))


def all_reduce(value: Tensor, group: Group, what: str, how: Any = dist.ReduceOp.SUM, *, of_gradient: bool = False) -> Pending:
    """The devices' values combined, in new memory."""
    if _is_widened(value, group):
        return _narrowed(all_reduce(value.float(), group, what, how), value.dtype, of_gradient=of_gradient)
    own = value.to(_SUMMED_AS.get(value.dtype, value.dtype))
    whole = torch.empty_like(own, memory_format=torch.contiguous_format)
    return Pending(lambda: whole.to(value.dtype), group.all_reduce(whole, own, how, f"all-reduce of {what}"))


def gathered(value: Tensor, group: Group) -> list[Tensor]:
    """The devices' values, of one shape, by position, without gradient."""
    if _is_widened(value, group):
        return [rounded(each, value.dtype) for each in gathered(value.float(), group)]
    own = value.detach().contiguous()
    received = [torch.empty_like(own) for _ in range(group.size)]
    in_order = [received[device] for device in group.order]
    group.all_gather(in_order, own, "all-gather")()
    return received


def all_gather(value: Tensor, slots: Slots, group: Group, what: str, *, of_gradient: bool = False) -> Pending:
    """The whole tensor from the devices' parts."""
    if _is_widened(value, group):
        return _narrowed(all_gather(value.float(), slots, group, what), value.dtype, of_gradient=of_gradient)
    shapes = [slots.shape(value, slots.counts[slots.position], device) for device in range(group.size)]
    if group.is_gloo:
        return _swap([value] * group.size, shapes, slots.put_together, group, f"all-gather of {what}")
    own = value.contiguous()
    received = [own.new_empty(shape) for shape in shapes]
    wires = [as_moved(received[device]) for device in group.order]
    return Pending(lambda: slots.put_together(received), group.all_gather(wires, as_moved(own), f"all-gather of {what}"))


def reduce_scatter(value: Tensor, slots: Slots, group: Group, what: str, *, of_gradient: bool = False) -> Pending:
    """This device's part of the sum of the devices' values."""
    if _is_widened(value, group):
        return _narrowed(reduce_scatter(value.float(), slots, group, what), value.dtype, of_gradient=of_gradient)
    pieces = [slots.take(value, device) for device in range(group.size)]
    own = pieces[slots.position]
    if group.is_gloo:
        return _swap(pieces, [tuple(own.shape)] * group.size, _sum, group, f"reduce-scatter of {what}")
    total = torch.empty_like(own, memory_format=torch.contiguous_format)
    in_order = [pieces[device].contiguous() for device in group.order]
    return Pending(lambda: total, group.reduce_scatter(total, in_order, f"reduce-scatter of {what}"))


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0) if len(values) > 2 else (values[0] + values[1]).contiguous()


def all_to_all(value: Tensor, leaving: Slots, arriving: Slots, group: Group, what: str, *, of_gradient: bool = False) -> Pending:
    """Parts along one axis as parts along another.

    Args:
        leaving: per device, what of the own part goes there.
        arriving: per device, the place in the new part of what comes from there.
    """
    if _is_widened(value, group):
        return _narrowed(all_to_all(value.float(), leaving, arriving, group, what), value.dtype, of_gradient=of_gradient)
    pieces = [leaving.take(value, device) for device in range(group.size)]
    shapes = [_arriving_shape(value, leaving, arriving, device) for device in range(group.size)]
    return _swap(pieces, shapes, arriving.put_together, group, f"all-to-all of {what}")


def _arriving_shape(value: Tensor, leaving: Slots, arriving: Slots, device: int) -> tuple[int, ...]:
    """The shape of what a device sends: this device's part of the newly cut dimension, the sender's part of the other."""
    if leaving.dim == arriving.dim and leaving.rows_outside == arriving.rows_outside:
        return arriving.shape(value, leaving.units, device)
    shape = list(arriving.shape(value, arriving.counts[arriving.position], device))
    shape[leaving.dim] = shape[leaving.dim] * leaving.counts[leaving.position] // leaving.units
    return tuple(shape)


def _swap(
    pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], join: Callable[[Sequence[Tensor]], Tensor], group: Group, what: str
) -> Pending:
    """Sends a piece to each device, and joins the pieces of the given shapes that they send; the own one is not sent."""
    own, others = pieces[group.position], [device for device in group.order if device != group.position]
    sizes = [0 if device == group.position else prod(shapes[device]) for device in group.order]
    flat = [pieces[device].reshape(-1) for device in others]
    leaving = torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()
    received = torch.empty(sum(sizes), dtype=own.dtype, device=leaving.device)
    sent = [0 if device == group.position else pieces[device].numel() for device in group.order]
    wire = as_moved(received)
    each = own.itemsize // wire.itemsize  # elements there
    arrival = group.all_to_all(wire, as_moved(leaving), [each * size for size in sizes], [each * size for size in sent], what)

    def finish() -> Tensor:
        arrived = dict(zip(group.order, torch.split(received, sizes), strict=True))
        arrived[group.position] = own
        return join([arrived[device].reshape(shape) for device, shape in enumerate(shapes)])

    return Pending(finish, arrival)
