"""Lowerings of ops that combine parts: products, convolutions, attention, reductions, losses, statistics.

product          x and w cut along the summed axis   partial = x_own w_own;   y = leave(partial) + b
batch norm       samples cut                         own sums -> leave, enter -> mean -> own squares -> leave, enter -> variance
cross-entropy    classes cut                         own maximum, sum of exponentials, target's logit -> one all-gather
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.communication import Group, enter, gathered, largest, leave, leave_each, smallest
from whale.runtime.program.shard.draws import draw, numbered
from whale.runtime.program.shard.pieces import localize
from whale.runtime.program.shard.slots import own_part
from whale.sharding.index_sets import Runs


def part_max(value: Tensor, dims: list[int], keepdim: bool, group: Group) -> Tensor:
    """The maximum along dimensions of which one is cut; the gradient is divided evenly among ties, as in torch."""
    return _extreme(value, value.amax(dims, keepdim=True), dims, keepdim, largest, group)


def part_min(value: Tensor, dims: list[int], keepdim: bool, group: Group) -> Tensor:
    """The minimum; as `part_max`."""
    return _extreme(value, value.amin(dims, keepdim=True), dims, keepdim, smallest, group)


def _extreme(value: Tensor, own: Tensor, dims: list[int], keepdim: bool, choose: Callable[[Tensor, Group], Tensor], group: Group) -> Tensor:
    best = choose(own, group)
    if not value.requires_grad:
        return best if keepdim else best.squeeze(dims)
    is_best = value == best
    share = 1 / leave(is_best.sum(dims, keepdim=True), group).to(value.dtype)
    mean = (value.where(is_best, 0) * share).sum(dims, keepdim=True)  # carries the gradient; its value is `best` up to rounding
    whole = leave(mean, group)
    return whole if keepdim else whole.squeeze(dims)


def part_prod(own: Tensor, group: Group) -> Tensor:
    """The product of the parts' products: each device's factor carries its own gradient, the value is equal on all."""
    factors = gathered(own, group)
    others = [*factors[: group.position], *factors[group.position + 1 :]]
    own_way = own * torch.stack(others).prod(0) if others else own
    return own_way + (torch.stack(factors).prod(0) - own_way).detach()


FINISHES: dict[str, Callable[[Any, Any], Tensor]] = {"any": largest, "all": smallest, "prod": part_prod}
"""Per way to combine, except sums: the whole result from a device's partial one."""


def part_batch_norm(
    value: Tensor,  # the own samples, ``[n channels ...]``
    weight: Tensor | None,  # per channel, as the next three
    bias: Tensor | None,
    running_mean: Tensor | None,  # updated in place, as in torch
    running_var: Tensor | None,
    momentum: float,  # of the running statistics
    eps: float,  # added to the variance
    share: float,  # of all samples that this part has
    group: Group,
) -> Tensor:
    """``batch_norm`` in training, on a part of the samples."""
    precise = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    dims = [dim for dim in range(value.dim()) if dim != 1]
    num_elements = round(value.numel() / value.shape[1] / share)
    mean = _over_all(precise.sum(dims), group) / num_elements
    centred = precise - _along(mean, value)
    variance = _over_all(centred.square().sum(dims), group) / num_elements
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (num_elements / max(num_elements - 1, 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    made = centred * _along((variance + eps).rsqrt(), value)
    made = made if weight is None else made * _along(weight, value)
    made = made if bias is None else made + _along(bias, value)
    return made.to(value.dtype)


def _over_all(own: Tensor, group: Group) -> Tensor:
    """The sum over the group, which each part uses by itself: so its gradients are summed too."""
    return enter(leave(own, group, "statistics"), group, "statistics")


def _along(channels: Tensor, value: Tensor) -> Tensor:
    return channels.reshape(-1, *(1,) * (value.dim() - 2))


NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for reductions of losses."""


class _Losses(torch.autograd.Function):
    """Per target ``log(sum of exponentials) - own logit``; backward is softmax minus one at the target, part by part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, local: Tensor, held: Tensor, group: Group) -> Tensor:
        precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        greatest = _rowwise_max(precise, dim)
        shift = greatest.masked_fill(greatest == -torch.inf, 0)  # a part may be masked out altogether
        exponentials = (precise - shift.unsqueeze(dim)).exp_()
        own = precise.gather(dim, local.unsqueeze(dim)).squeeze(dim) if logits.shape[dim] else torch.zeros_like(greatest)
        numbers = torch.stack([greatest, exponentials.sum(dim), own.masked_fill(~held, 0)])
        maxima, sums, chosen = torch.stack(gathered(numbers, group)).unbind(1)
        top = maxima.amax(0)
        total = (sums * (maxima - top).exp()).sum(0)
        ctx.dim, ctx.dtype = dim, logits.dtype
        ctx.save_for_backward(exponentials, (greatest - top).exp() / total, local, held)
        return total.log() + top - chosen.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, scale, local, held = ctx.saved_tensors
        own = exponentials * (scale * gradients[0]).unsqueeze(ctx.dim)
        if exponentials.shape[ctx.dim]:
            own.scatter_add_(ctx.dim, local.unsqueeze(ctx.dim), -gradients[0].masked_fill(~held, 0).unsqueeze(ctx.dim))
        return own.to(ctx.dtype), None, None, None, None


def part_cross_entropy(logits: Tensor, target: Tensor, reduction: int, ignored: int, runs: Runs, size: int, group: Group) -> Tensor:
    """``cross_entropy`` with class numbers as targets, without class weights or label smoothing.

    Args:
        logits: of the classes held, ``[n classes ...]`` or ``[classes]``.
        target: class numbers, ``[n ...]`` or a scalar.
        reduction: torch's number.
        ignored: the target that is ignored.
        runs: the classes held.
    """
    counts = target != ignored
    local, held = localize(torch.where(counts, target, 0), runs, size)
    found: Tensor = _Losses.apply(logits, min(1, logits.dim() - 1), local, held, group)  # type: ignore[no-untyped-call]
    losses = found.masked_fill(~counts, 0).to(logits.dtype)
    if reduction == NONE:
        return losses
    return losses.sum() if reduction == SUM else losses.sum() / counts.sum()


def _rowwise_max(logits: Tensor, dim: int) -> Tensor:
    if logits.shape[dim]:
        return logits.amax(dim)
    return logits.new_full([s for index, s in enumerate(logits.shape) if index != dim], -torch.inf)


def target_weight(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """The sum of the weights of class numbers: the divisor of their mean."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return weight[torch.where(counts, target, 0)].masked_fill(~counts, 0).sum()


aten = torch.ops.aten


def same(call: Call) -> fx.Node:
    """The same op on the parts; results of a contraction are combined over the group."""
    return finish(call, call.same())


def finish(call: Call, made: fx.Node) -> fx.Node:
    """The whole result from partial ones; for other roles than contracted, the part of the result."""
    if call.role.kind != "contracted":
        return made
    if "in_place" in call.op.tags:
        call.refuse("it works in place, and parts are combined in a new tensor", hint="use the form that is not in place")
    combine = call.role.combine
    if len(call.op.outputs) > 1:
        if combine != "sum":
            call.refuse(f"combining several results by {combine} is not supported")
        return call.emit(leave_each, made, call.writer.group, what="leave")
    if combine == "mean":
        share = call.emit(aten.mul.Tensor, made, _share(call), what="share")
        return call.leave(share)
    if combine == "sum":
        return call.leave(made)
    if combine not in FINISHES:
        call.refuse(f"combining parts by {combine} is not supported here")
    return call.emit(FINISHES[combine], made, call.writer.group, what=combine)


def _share(call: Call) -> float:
    """This device's share of the elements along the contracted axis."""
    for value in call.raw.values():
        for source in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(source, fx.Node) and call.has_part(source):
                dimensions = call.layout.dimensions(source.name)
                held = call.held(dimensions[call.cut_dim(dimensions) or 0])
                return held.count / held.units
    raise AssertionError(call.op)


def with_bias(call: Call) -> fx.Node:
    """``linear``, ``bilinear``: under a contraction the bias is added to the sum."""
    if call.role.kind != "contracted" or call.raw["bias"] is None:
        return same(call)
    return call.emit(aten.add.Tensor, finish(call, call.same(bias=None)), call.value("bias"), what="biased")


def added_product(call: Call) -> fx.Node:
    """``addmm``, ``baddbmm``: ``beta * self + alpha * (a @ b)``."""
    if call.role.kind != "contracted":
        return same(call)
    batched = call.op.operator == "baddbmm"
    names = ("batch1", "batch2") if batched else ("mat1", "mat2")
    product = call.emit(aten.bmm.default if batched else aten.mm.default, *(call.value(name) for name in names))
    whole = _scaled(call, finish(call, product), call.raw["alpha"])
    return call.emit(aten.add.Tensor, whole, _scaled(call, call.value("self"), call.raw["beta"]), what="biased")


def _scaled(call: Call, value: fx.Node, factor: Any) -> fx.Node:
    factor = call.writer.raw(factor)
    return value if factor == 1 else call.emit(operator.mul, value, factor, what="scaled")


def grouped_product(call: Call) -> fx.Node:
    """``_grouped_mm``: no bias under a contraction."""
    if call.role.kind == "contracted" and call.raw.get("bias") is not None:
        call.refuse("its bias would be added once per device")
    return same(call)


def convolution(call: Call) -> fx.Node:
    """Convolutions: groups may be cut with the channels; under a contraction the bias is added to the sum."""
    weight = call.dimensions("weight")
    num_spatial = len(weight) - 2
    transposed = call.op.operator.startswith("conv_transpose") or call.raw.get("transposed") is True
    dimensions = call.result if transposed else call.dimensions("input")
    channels, inner = call.held(dimensions[len(dimensions) - num_spatial - 1]), call.held(weight[1])
    groups = channels.count // inner.count
    if call.role.kind != "contracted" or call.raw["bias"] is None:
        return finish(call, call.same(groups=groups))
    bias = call.emit(aten.reshape.default, call.value("bias"), [-1, *(1,) * num_spatial], what="bias")
    return call.emit(aten.add.Tensor, finish(call, call.same(bias=None, groups=groups)), bias, what="biased")


def extreme(call: Call) -> fx.Node:
    """``amax``, ``amin``, ``max``, ``min`` over a cut axis."""
    if call.role.kind != "contracted":
        return same(call)
    rank = len(call.dimensions("self"))
    dims = list(call.raw.get("dim") or range(rank))
    target = part_max if call.role.combine == "max" else part_min
    return call.emit(target, call.value("self"), dims, call.raw.get("keepdim", False), call.writer.group)


def class_loss(call: Call) -> fx.Node:
    """Cross-entropy and negative log-likelihood, with the classes or another axis cut."""
    combine = call.role.combine
    if combine == "softmax":
        dimensions = call.dimensions("self")
        held = call.held(dimensions[min(1, len(dimensions) - 1)])
        values = (call.value("self"), call.value("target"), call.raw["reduction"], call.raw["ignore_index"])
        return call.emit(part_cross_entropy, *values, held.runs, held.units, call.writer.group)
    if combine != "weighted_mean":
        return same(call)
    assert call.raw["reduction"] == MEAN
    if len(call.op.outputs) != 1:
        call.refuse("it has two results")
    if len(call.dimensions("target")) == len(call.dimensions("self")):  # probabilities: all samples have equal weight
        return call.leave(call.emit(aten.mul.Tensor, call.same(), _share(call), what="share"))
    total = call.leave(call.same(reduction=SUM))
    weight = call.emit(target_weight, call.value("target"), call.value("weight"), call.raw["ignore_index"], what="weight")
    return call.emit(aten.div.Tensor, total, call.leave(weight), what="mean")


def attention(call: Call) -> fx.Node:
    """Attention: heads are independent, and so are queries, each of which reads all keys, or under a causal mask those up to it."""
    if not call.is_sharded(call.result[-2]):
        return same(call)
    held = call.held(call.result[-2])
    if call.raw["is_causal"] is True:
        settings = (call.raw[name] for name in ("dropout_p", "scale", "enable_gqa"))
        args = (*map(call.value, ("query", "key", "value")), held.runs, *settings)
        return call.emit(drawn_part, 0, call.layout.position, *args) if "random" in call.op.tags else call.emit(causal_part, *args)
    mask = call.raw["attn_mask"]
    if mask is None or not call.is_sharded(call.dimensions("attn_mask")[-2]):
        return same(call)
    rows = call.emit(own_part, call.value("attn_mask"), held.slots(len(call.dimensions("attn_mask")) - 2), what="rows")
    return call.same(attn_mask=rows)


def causal_part(query: Tensor, key: Tensor, value: Tensor, runs: Runs, dropout_p: float, scale: float | None, enable_gqa: bool) -> Tensor:
    """Attention of the queries at some positions to all keys up to them.

    Args:
        query: ``[... positions head_dim]``, of the positions in `runs`, in order.
        key, value: of all positions.
    """
    found, done = [], 0
    ends = [min(stop, key.shape[-2]) for _, stop in runs]
    masks = [_causal_mask(query, *run, end) for run, end in zip(runs, ends, strict=True)]
    has_mask = any(isinstance(mask, Tensor) and not isinstance(mask, CausalBias) for mask in masks)
    if enable_gqa:
        from whale.runtime.program import grouped  # needed here alone

        if not grouped.has_grouped_kernel(query.dtype, query.device, has_mask=has_mask):
            repeats = query.shape[-3] // key.shape[-3]
            key, value, enable_gqa = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3), False
    for (start, stop), end, mask in zip(runs, ends, masks, strict=True):
        own = query.narrow(-2, done, stop - start)
        done += stop - start
        keys, values = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        attend = torch.nn.functional.scaled_dot_product_attention
        found.append(attend(own, keys, values, mask, dropout_p, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(found, -2)


def _causal_mask(query: Tensor, start: int, stop: int, end: int) -> Tensor | None:
    """The mask of queries at these positions over the first `end` keys; None where the op's own is that, or as large."""
    if start == 0:
        return None
    if query.is_cuda and end == stop:  # kernels make a mask that ends in a triangle themselves
        return None if isinstance(query, FakeTensor) else causal_lower_right(stop - start, end)  # a dry run's has no values
    return torch.ones(stop - start, end, dtype=torch.bool, device=query.device).tril(start)


@numbered
def drawn_part(number: int, position: int, *args: Any) -> Tensor:
    """`causal_part` whose dropout has numbers of its own."""
    found: Tensor = draw(number, position, causal_part, *args)
    return found


def group_norm(call: Call) -> fx.Node:
    """Group normalisation: cut channels are whole groups."""
    name = "num_groups" if "num_groups" in call.raw else "group"
    channels = call.held(call.dimensions("input")[1])
    return call.same(**{name: call.raw[name] * channels.count // channels.units})


def batch_norm(call: Call) -> fx.Node:
    """Batch normalisation: where its samples are cut, the statistics are of all parts."""
    if call.role.kind != "pooled":
        return same(call)
    held = call.held(call.dimensions("input")[0])
    names = ("input", "weight", "bias", "running_mean", "running_var")
    values = [call.value(name) for name in names]
    return call.emit(part_batch_norm, *values, call.value("momentum"), call.raw["eps"], held.count / held.units, call.writer.group)
