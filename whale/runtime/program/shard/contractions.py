"""Lowerings of ops that combine parts: products, convolutions, attention, reductions, losses, statistics.

y = x w + b,  x and w cut along what is summed:      partial = x_own w_own;   y = leave(partial) + b
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.communication import leave_each
from whale.runtime.program.shard.losses import MEAN, SUM, part_cross_entropy, target_weight
from whale.runtime.program.shard.reductions import FINISHES, part_max, part_min
from whale.runtime.program.shard.statistics import part_batch_norm

aten = torch.ops.aten


def same(call: Call) -> fx.Node:
    """The same op on the parts; results of a contraction are combined over the group."""
    return finish(call, call.same())


def finish(call: Call, made: fx.Node) -> fx.Node:
    """The whole result from results of parts; for other roles than contracted, the part of the result."""
    if call.role.kind != "contracted":
        return made
    if "in_place" in call.op.tags:
        call.refuse("parts are combined in a new tensor", hint="use the form that is not in place")
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
    """``linear``, ``bilinear``: under a contraction the bias waits for the sum."""
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
    """``_grouped_mm``: without a bias under a contraction."""
    if call.role.kind == "contracted" and call.raw.get("bias") is not None:
        call.refuse("its bias would be added once per device")
    return same(call)


def convolution(call: Call) -> fx.Node:
    """Convolutions: groups may be cut with the channels; under a contraction the bias waits for the sum."""
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
    if len(call.dimensions("target")) == len(call.dimensions("self")):  # probabilities: every sample counts alike
        return call.leave(call.emit(aten.mul.Tensor, call.same(), _share(call), what="share"))
    total = call.leave(call.same(reduction=SUM))
    weight = call.emit(target_weight, call.value("target"), call.value("weight"), call.raw["ignore_index"], what="weight")
    return call.emit(aten.div.Tensor, total, call.leave(weight), what="mean")


def attention(call: Call) -> fx.Node:
    """Attention: heads are independent; queries too, unless their places in the whole decide what they see."""
    if call.raw["is_causal"] is True and call.is_sharded(call.result[-2]):
        call.refuse("a causal mask is made from the positions of the queries", hint="pass the mask as attn_mask")
    return same(call)


def group_norm(call: Call) -> fx.Node:
    """Group normalisation: where the channels are cut, whole groups are."""
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
