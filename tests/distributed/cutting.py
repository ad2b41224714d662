"""The law of lowered cuts on one rank: a captured model on parts gives the loss and the gradients of the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tests.parts import cut_out, put_in
from whale.axes import Axes, Dimension, axes_of, discover
from whale.axes.labels import may_scatter
from whale.axes.values import may_lie_in_parts
from whale.capture import CapturedProgram, capture
from whale.comm import Groups, connect
from whale.deferred import WeightQueue
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Shard
from whale.ir.writes import MemoryWrites
from whale.runtime.program.lowering import StageProgram, StageShards, lower
from whale.runtime.program.shard import GROUP, Group, ShardProgram, lower_shards
from whale.runtime.program.shard.communication import enter

T = TypeVar("T")
AnyGroup = TypeVar("AnyGroup", bound=Group)


@dataclass(frozen=True)
class Captured:
    """A model in float64, captured, and what it gives in one process.

    Attributes:
        model, program: as captured, every float32 rewritten to float64.
        axes: discovered.
        stage: all ops as one stage.
        batch: the example.
        loss, gradients: of the uncut program.
    """

    model: ModelGraph
    program: CapturedProgram
    axes: Axes
    stage: StageProgram
    batch: Any
    loss: Tensor
    gradients: Mapping[str, Tensor]


@cache
def captured(builder: str, mode: str) -> Captured:
    """Captures what a builder (``module:function``) makes: ``(model, batch)`` or ``(model, batch, loss)``."""
    module, _, function = builder.partition(":")
    made = getattr(import_module(module), function)()
    network: nn.Module = made[0].double()
    network.train(mode == "train")
    batch = _doubled(made[1])
    model, program = capture(network, batch, *made[2:], mode=mode)
    for node in program.graph.nodes:
        _double(node)
    stage = whole_stage(model, program)
    loss, gradients = run(stage.module, stage, model, program, batch, dict(program.tensors))
    return Captured(model, program, discover(model), stage, batch, loss, gradients)


def _doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_doubled, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _double(node: fx.Node) -> None:
    """Models compute parts in float32; in float64 throughout the law holds to rounding."""

    def changed(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    node.args = tuple(map(changed, node.args))
    node.kwargs = {key: changed(value) for key, value in node.kwargs.items()}


def whole_stage(model: ModelGraph, program: CapturedProgram) -> StageProgram:
    """All ops as one stage that returns the loss terms, or the outputs."""
    ops = [op.name for op in model.ops if op.kind == "call"]
    terms = [name for term in model.loss for name in (term.sum, term.weight) if name is not None]
    return lower(program.graph, model, ops, (), terms or list(dict.fromkeys(model.outputs)), torch.device("cpu"))


def run(
    module: nn.Module,
    stage: StageProgram,
    model: ModelGraph,
    program: CapturedProgram,
    batch: Any,
    tensors: Mapping[str, Tensor],
    *first: object,
    after: Callable[[], None] = lambda: None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (or the outputs, flat) and the gradients of a program on these tensors; `after` follows the backward pass."""
    leaves: dict[str, Any] = {**program.batch.leaves(batch), "num_rows": program.batch.rows(batch)}
    trained = {parameter.name for parameter in model.parameters if parameter.kind == "parameter" and parameter.trainable}
    own = {name: value.detach().clone().requires_grad_(name in trained) for name, value in tensors.items()}
    arguments = [own[program.sources[name]] if name in program.sources else leaves[name] for name in stage.inputs]
    values = module(*first, *arguments)
    if not model.loss:
        return torch.cat([value.detach().reshape(-1).double() for value in values]), {}
    named = dict(zip(stage.outputs, values, strict=True))
    loss = torch.zeros((), dtype=torch.float64)
    for term in model.loss:
        weight = 1.0 if term.weight is None else named[term.weight] + term.offset
        weight = weight if term.minimum is None else torch.as_tensor(weight).clamp(min=term.minimum)
        loss = loss + term.coefficient * named[term.sum] / weight
    torch.autograd.backward(loss)
    after()
    return loss.detach(), {name: value.grad for name, value in own.items() if value.grad is not None}


def choose(axes: Axes, num_parts: int, seed: int, *, in_order: bool = False) -> tuple[Shard, ...]:
    """A maximal set of axes of which no op meets two, in random order, cut in random uneven sizes."""
    draw = random.Random(seed)
    names = [axis.name for axis in axes.axes if axis.may_be_cut and axis.name != BATCH and axis.size >= num_parts]
    if not in_order:
        draw.shuffle(names)
    chosen: dict[str, None] = {}
    for name in names:
        if not any(name in op.roles and chosen.keys() & op.roles.keys() for op in axes.ops.values()):
            chosen[name] = None
    return tuple(Shard(name, _sizes(axes.by_name[name].size, num_parts, draw)) for name in chosen)


def choose_labels(model: ModelGraph, axes: Axes, num_parts: int, seed: int) -> tuple[Shard, ...]:
    """Random axes, each op working along any of them that it may, or along none: bridges of every kind stand between."""
    draw = random.Random(seed)
    names = [axis.name for axis in axes.axes if axis.name != BATCH and axis.size >= num_parts]
    chosen = set(draw.sample(names, min(len(names), 6)))
    work = _random_work(model, axes, chosen, draw)
    scattered = _random_scatters(model, axes, chosen, work, draw)
    held = {
        name: draw.choice([None, *(axis for axis in sorted(chosen) if may_lie_in_parts(dims, axis))])
        for name, dims in axes.parameters.items()
    }
    held |= _written_so(model, axes, work)
    shards = []
    for name in sorted(chosen):
        met = [op.name for op in model.ops if op.kind == "call" and op.name in axes.ops and name in axes.ops[op.name].roles]
        shard = Shard(
            name,
            _sizes(axes.by_name[name].size, num_parts, draw),
            whole_in=tuple(op for op in met if work.get(op) != name),
            whole_parameters=tuple(sorted(parameter for parameter, axis in held.items() if axis != name)),
            scattered=tuple(op for op, axis in scattered.items() if axis == name),
        )
        shards.append(shard)
    return tuple(shards)


def chosen(builder: str, num_parts: int, seed: int, mode: str = "train", in_order: bool = False) -> tuple[Shard, ...]:
    """`choose` for what a builder makes."""
    return choose(captured(builder, mode).axes, num_parts, seed, in_order=in_order)


def chosen_labels(builder: str, num_parts: int, seed: int) -> tuple[Shard, ...]:
    """`choose_labels` for what a builder makes."""
    whole = captured(builder, "train")
    return choose_labels(whole.model, whole.axes, num_parts, seed)


def _written_so(model: ModelGraph, axes: Axes, work: Mapping[str, str | None]) -> dict[str, str | None]:
    """Buffers that an op writes in passing, with the axis of that op: they cannot be bridged."""
    writes = MemoryWrites(model, [op.name for op in model.ops if op.kind == "call"])
    found: dict[str, str | None] = {}
    for op in model.ops:
        for operand in op.inputs if op.kind == "call" else ():
            source = model.by_name[operand]
            if source.kind == "buffer" and op.name in work and writes.need_same(operand, op.name):
                name = model.parameter_by_name[source.target].name
                axis = work[op.name]
                found[name] = axis if axis is not None and may_lie_in_parts(axes.parameters[name], axis) else None
    return found


def _axes_in(dimensions: Sequence[Dimension]) -> set[str]:
    return {axis for dimension in dimensions for axis in axes_of(dimension)}


def _random_work(model: ModelGraph, axes: Axes, chosen: set[str], draw: random.Random) -> dict[str, str | None]:
    """The axis of each op; ops on memory that is written in place, and the results of an op of several, have one."""
    roots: dict[str, str] = {}
    tied: dict[str, list[str]] = {}
    for op in model.ops:
        follows = op.kind == "call" and (op.tags & {"view", "in_place"} or op.target == "operator.getitem") and op.inputs
        roots[op.name] = roots[op.inputs[0]] if follows else op.name
        tied.setdefault(roots[op.name], []).append(op.name)
    written = {roots[op.name] for op in model.ops if "in_place" in op.tags or op.target == "operator.getitem"}
    whole = _readers_of_written(model, roots)
    work: dict[str, str | None] = {}
    for root, members in tied.items():
        calls = [name for name in members if name in axes.ops and model.by_name[name].kind == "call"]
        for group in [calls] if root in written else [[name] for name in calls]:
            may = set.intersection(*(_may_work(axes, name, chosen) for name in group)) if group else set()
            if (root in written and model.by_name[root].kind != "call") or whole & {root, *group}:
                may = set()
            axis = draw.choice([None, *sorted(may), *sorted(may)])
            work |= dict.fromkeys(group, axis)
    return work


def _readers_of_written(model: ModelGraph, roots: Mapping[str, str]) -> set[str]:
    """Ops that must read a tensor as it lies since its memory is written, and the tensors: here all of them stay whole."""
    writes = MemoryWrites(model, [op.name for op in model.ops if op.kind == "call"])
    pairs = ((op.name, operand) for op in model.ops if op.kind == "call" for operand in op.inputs)
    apart = [(name, operand) for name, operand in pairs if roots[name] != roots[operand] and writes.need_same(operand, name)]
    return {each for name, operand in apart for each in (name, roots[name], roots[operand])}


def _may_work(axes: Axes, name: str, chosen: set[str]) -> set[str]:
    return {axis for axis, role in axes.ops[name].roles.items() if axis in chosen and role.kind != "whole"}


def _random_scatters(
    model: ModelGraph, axes: Axes, chosen: set[str], work: Mapping[str, str | None], draw: random.Random
) -> dict[str, str]:
    found = {}
    for name, axis in work.items():
        op = model.by_name[name]
        along = [other for other in sorted(chosen) if axis is not None and may_scatter(op, axes, axis, other)]
        written = any("in_place" in model.by_name[user].tags for user in model.users[name])
        if along and not written and draw.random() < 0.7:
            found[name] = draw.choice(along)
    return found


def _sizes(total: int, num_parts: int, draw: random.Random) -> tuple[int, ...]:
    ends = [0, *sorted(draw.sample(range(1, total), num_parts - 1)), total]
    return tuple(stop - start for start, stop in pairwise(ends))


def each(rank: int, num_ranks: int, law: Callable[..., T], builder: str, cuts: Sequence[Sequence[Shard]], *more: Any) -> list[T]:
    """What a law finds for one cut after the other, on the same ranks."""
    return [law(rank, num_ranks, builder, shards, *more) for shards in cuts]


def errors(
    rank: int, num_ranks: int, builder: str, shards: Sequence[Shard], mode: str = "train", broken: bool = False, rows: int | None = None
) -> dict[str, float]:
    """Per tensor, the error of the cut program relative to its largest magnitude, with a floor from the largest gradient.

    Args:
        rank: position in the split group, which is the whole world.
        num_ranks: its size.
        builder: of the model.
        shards: of all its ops.
        mode: of the capture.
        broken: makes `enter` the identity in backward too: the negative control.
        rows: of the batch; None for all of the example's.
    """
    whole = captured(builder, mode)
    model, program, axes = whole.model, whole.program, whole.axes
    stage, batch, right, expected_gradients = whole.stage, whole.batch, whole.loss, whole.gradients
    if rows is not None:
        batch = pytree.tree_map(lambda leaf: leaf[:rows], batch)
        right, expected_gradients = run(stage.module, stage, model, program, batch, dict(program.tensors))
    lowered = lower_shards(stage.module.graph, model, axes, shards, rank)
    if broken:
        _break(lowered)
    tensors = {name: part_of(name, value, axes, shards, rank) for name, value in program.tensors.items()}
    module = fx.GraphModule(nn.Module(), lowered.graph)
    loss, gradients = run(module, stage, model, program, batch, tensors, everyone())
    found = {"loss": _error(loss, right, 0.0)}
    floor = max([0.0, *(float(value.abs().max()) for value in expected_gradients.values())]) * 1e-3
    for name, expected in expected_gradients.items():
        made = _assembled(name, gradients.get(name), expected, lowered, axes, shards, rank, num_ranks, broken)
        found[name] = _error(made, expected, floor)
    return found


def _break(lowered: ShardProgram) -> None:
    for node in lowered.graph.nodes:
        if node.target is enter:
            node.target = _identity


def _identity(value: Tensor, group: object, what: str) -> Tensor:
    return value


def everyone(kind: type[AnyGroup] = Group) -> AnyGroup:
    """All ranks as one split group."""
    world = connect(300.0)
    ranks = tuple(range(world.size))
    return kind(Groups(world, [ranks]), ranks)


def _held_so(name: str, shards: Sequence[Shard]) -> list[Shard]:
    """The cuts by which a parameter is held."""
    return [shard for shard in shards if name not in shard.whole_parameters]


def part_of(name: str, value: Tensor, axes: Axes, shards: Sequence[Shard], rank: int) -> Tensor:
    return cut_out(value, axes.parameters[name], axes, _held_so(name, shards), rank) if name in axes.parameters else value


def _assembled(
    name: str,
    gradient: Tensor | None,
    like: Tensor,
    lowered: ShardProgram,
    axes: Axes,
    shards: Sequence[Shard],
    rank: int,
    num_ranks: int,
    broken: bool,
) -> Tensor:
    """The whole gradient from the ranks' parts, partial sums, or complete copies."""
    if name in lowered.parameters:
        pieces: list[Any] = [None] * num_ranks
        dist.all_gather_object(pieces, gradient)
        whole = torch.zeros_like(like)
        for position, piece in enumerate(pieces):
            if piece is not None:
                put_in(whole, piece, lowered.parameters[name], axes, _held_so(name, shards), position)
        return whole
    own = torch.zeros_like(like) if gradient is None else gradient
    if name in lowered.partial and not broken:
        dist.all_reduce(own)
    return own


def _error(made: Tensor, expected: Tensor, floor: float) -> float:
    assert made.shape == expected.shape, (made.shape, expected.shape)
    scale = max(float(expected.abs().max()), floor, 1e-30)
    return float((made - expected).abs().max()) / scale


def staged_errors(rank: int, num_ranks: int, builder: str, shards: Sequence[Shard], share: float) -> dict[str, float]:
    """`errors` with the model in two stages that hand whole tensors over: the cuts may cross the boundary.

    Args:
        rank, num_ranks, builder, cuts: as in `errors`.
        share: of the ops in the first stage.
    """
    whole = captured(builder, "train")
    model, program, axes = whole.model, whole.program, whole.axes
    calls = [op.name for op in model.ops if op.kind == "call"]
    early, late = calls[: int(len(calls) * share)], calls[int(len(calls) * share) :]
    integers = [name for name in early if not model.by_name[name].outputs]  # sizes are computed where they are needed
    crossing = [name for name in early if name not in integers and set(model.users[name]) & set(late)]
    terms = [name for term in model.loss for name in (term.sum, term.weight) if name is not None]
    assert not set(terms) & set(early)
    cpu = torch.device("cpu")
    pieces = [
        lower(program.graph, model, early, (), crossing, cpu),
        lower(program.graph, model, [*integers, *late], crossing, terms, cpu),
    ]
    shared = set.intersection(*({program.sources[name] for name in piece.inputs if name in program.sources} for piece in pieces))
    lowered = [lower_shards(piece.module.graph, model, axes, shards, rank, complete=shared) for piece in pieces]
    modules = [fx.GraphModule(nn.Module(), item.graph) for item in lowered]

    class Both(nn.Module):
        def forward(self, group: object, *arguments: Any) -> Any:
            values = dict(zip(inputs, arguments, strict=True))
            values |= zip(crossing, modules[0](group, *(values[name] for name in pieces[0].inputs)), strict=True)
            return modules[1](group, *(values[name] for name in pieces[1].inputs))

    inputs = tuple(dict.fromkeys(name for piece in pieces for name in piece.inputs if name not in crossing))
    stage = replace(pieces[1], inputs=inputs)
    tensors = {name: part_of(name, value, axes, shards, rank) for name, value in program.tensors.items()}
    loss, gradients = run(Both(), stage, model, program, whole.batch, tensors, everyone())
    found = {"loss": _error(loss, whole.loss, 0.0)}
    floor = max(float(value.abs().max()) for value in whole.gradients.values()) * 1e-3
    together = ShardProgram(fx.Graph(), {**lowered[0].parameters, **lowered[1].parameters}, lowered[0].partial | lowered[1].partial)
    for name, expected in whole.gradients.items():
        made = _assembled(name, gradients.get(name), expected, together, axes, shards, rank, num_ranks, False)
        found[name] = _error(made, expected, floor)
    return found


def composed_errors(rank: int, num_ranks: int, builder: str, shards: Sequence[Shard]) -> dict[str, float]:
    """`errors` of a program whose ops are recomputed in three segments and whose weight gradients wait."""
    whole = captured(builder, "train")
    model, program, axes = whole.model, whole.program, whole.axes
    calls = [op.name for op in model.ops if op.kind == "call"]
    third = len(calls) // 4
    terms = [name for term in model.loss for name in (term.sum, term.weight) if name is not None]
    stage = lower(
        program.graph,
        model,
        calls,
        (),
        terms,
        torch.device("cpu"),
        splits_backward=True,
        segments=[calls[:third], calls[third : 2 * third], calls[2 * third : 3 * third]],
        shards=StageShards(axes, tuple(shards), rank),
    )
    lowered = lower_shards(whole.stage.module.graph, model, axes, shards, rank)
    queue = WeightQueue()
    given: dict[str, Any] = {"weight_queue": queue, GROUP: everyone()}
    first = [given[name] for name in stage.inputs if name in given]
    tensors = {name: part_of(name, value, axes, shards, rank) for name, value in program.tensors.items()}
    rest = replace(stage, inputs=tuple(name for name in stage.inputs if name not in given))
    loss, gradients = run(stage.module, rest, model, program, whole.batch, tensors, *first, after=queue.run)
    found = {"loss": _error(loss, whole.loss, 0.0)}
    floor = max(float(value.abs().max()) for value in whole.gradients.values()) * 1e-3
    for name, expected in whole.gradients.items():
        made = _assembled(name, gradients.get(name), expected, lowered, axes, shards, rank, num_ranks, False)
        found[name] = _error(made, expected, floor)
    return found
