"""Lowering: from the captured graph to the program of one stage, a GraphModule without state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from whale.axes import Axes
from whale.axes.batch import Halving
from whale.deferred import defer_weights
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Shard
from whale.ir.writes import written_buffers
from whale.runtime.program.marks import NUM_DIMS, OP, num_dims_of
from whale.runtime.program.overlap import overlap
from whale.runtime.program.regather import keep_parts
from whale.runtime.program.segments import Rewrite, with_segments
from whale.runtime.program.shard import GROUP, Slots, lower_shards
from whale.runtime.program.shard.draws import draw_by_place, number_draws
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.program.weight_gathers import Numbers, insert_gathers, insert_waits


@dataclass(frozen=True)
class StageProgram:
    """A pure function from a stage's inputs to its outputs."""

    module: fx.GraphModule  # takes `inputs` in order and returns a tuple in the order of `outputs`
    inputs: tuple[str, ...]  # ops whose values it takes: batch inputs, parameters, buffers, constants, received tensors
    outputs: tuple[str, ...]  # ops whose values it returns
    # per input, ``input``, ``parameter``, ``buffer``, ``constant``, ``received``, ``weight_queue``, ``transient_weights``,
    # ``awaited_weights`` or ``split_group``
    kinds: tuple[str, ...]
    keys: tuple[str, ...]  # per input, the name of its value: of the parameter or buffer, else of the op
    mutated: tuple[str, ...]  # names of the buffers that it changes in place
    is_random: bool


def lower(
    graph: fx.Graph,  # the captured program; its nodes are named as the ops
    model: ModelGraph,  # the same as a value
    ops: Collection[str],  # what the stage runs
    received: Collection[str],  # ops of earlier stages whose values it receives
    outputs: Sequence[str],  # values it returns
    device: torch.device,  # every ``device=`` argument becomes this
    *,
    splits_backward: bool = False,  # weight gradients wait in a queue (see `whale.deferred`), which the program takes as its first argument
    # runs of its ops that save only their inputs and are recomputed in the backward pass. Where there are any, other ops of a split stage
    # save their own parts of gathered tensors, and gather again
    segments: Sequence[Sequence[str]] = (),
    shards: StageShards | None = None,  # of a split stage: its program works on this device's parts, and also takes the split group
    num_rows: int = 0,  # rows of its split group, where the batch is cut
    halving: Halving | None = None,  # how a split stage computes its rows in two halves; None for all at once
    # per parameter that exists only around its readers, its buckets; the program also takes the `WeightSource`
    transient: Mapping[str, Numbers] | None = None,
    awaited: Mapping[str, Numbers] | None = None,  # per parameter that may be in flight when it is read, its buckets; likewise
    watch: Watch = NOBODY,  # called when each segment is computed
    rewrite: Rewrite | None = None,  # compiles runs of its ops; None for none
) -> StageProgram:
    """Cuts the ops of one stage out of the whole graph."""
    wanted, handed = set(ops), set(received)
    random = {name for name in wanted if "random" in model.by_name[name].tags}
    read = _reads(model, wanted, handed, outputs)
    local = _copy(graph, model, wanted, handed, read, outputs, device)
    first: tuple[str, ...] = ()
    if shards is not None:
        complete = [] if shards.terms is None else [each.name for each in model.parameters if each.name not in shards.terms]
        program = lower_shards(
            local, model, shards.axes, shards.shards, shards.position, complete=complete, gathered=shards.gathered, num_rows=num_rows
        )
        local, first = program.graph, (GROUP,)
        whole = (shards.terms or frozenset()) - program.parameters.keys() - shards.gathered.keys()
        divide_gradients(local, model, whole - program.partial, shards.width)
        if halving is not None:
            local = overlap(local, model, halving, outputs)
        number_draws(local, random, is_alike=shards.is_alike)
    if splits_backward:
        queue = _first(local, QUEUE)
        defer_weights(local, _trainable(model, read), queue, num_dims_of)
        first = (QUEUE, *first)
    if shards is not None and segments:
        keep_parts(local, model, wanted, {name for segment in segments for name in segment})
    if transient:
        weights = _first(local, TRANSIENT)
        insert_gathers(local, model, transient, weights)
        first = (TRANSIENT, *first)
    if awaited:
        weights = _first(local, AWAITED)
        insert_waits(local, model, awaited, weights)
        first = (AWAITED, *first)
    if not splits_backward:
        _sum_as_read(local, model)
    drawn = random if rewrite is None else random - draw_by_place(local, random, device)
    if any(node.kwargs.get("enable_gqa") for node in local.nodes):
        from whale.runtime.program.grouped import repeat_groups  # few models have groups of heads

        repeat_groups(local, model, device)
    kinds = tuple("received" if name in handed else model.by_name[name].kind for name in read)
    keys = tuple(model.by_name[name].target if kind in ("parameter", "buffer") else name for name, kind in zip(read, kinds, strict=True))
    return StageProgram(
        module=with_segments(local, segments, drawn, watch, rewrite),
        inputs=(*first, *read),
        outputs=tuple(outputs),
        kinds=(*first, *kinds),
        keys=(*first, *keys),
        mutated=tuple(written_buffers(model, wanted)),
        is_random=bool(random),
    )


@dataclass(frozen=True)
class StageShards:
    """The cuts of a split stage, for one device."""

    axes: Axes
    shards: tuple[Shard, ...]
    position: int  # of the device in its split group
    width: int = 1  # devices of the group
    # whole parameters of whose gradients each device has a term, by what the training sums; None to follow the cuts alone
    terms: frozenset[str] | None = None
    # parameters and buffers that the program needs whole but the device holds in part, and where the parts belong
    gathered: Mapping[str, Slots] = field(default_factory=dict)
    is_alike: bool = True  # whether equal seeds give equal random numbers on all devices of the group

    @property
    def divides_rows(self) -> bool:
        """Whether the batch is cut: then a program serves one number of rows only."""
        return any(shard.axis == BATCH for shard in self.shards)


def _first(graph: fx.Graph, name: str) -> fx.Node:
    """Adds a placeholder before all others."""
    with graph.inserting_before(next(iter(graph.nodes))):
        return graph.placeholder(name)


def _copy(
    graph: fx.Graph,
    model: ModelGraph,
    wanted: set[str],
    handed: set[str],
    read: Iterable[str],
    outputs: Sequence[str],
    device: torch.device,
) -> fx.Graph:
    """The wanted ops as a separate graph, on a device, its nodes marked."""
    local = fx.Graph()
    copies = {name: local.placeholder(name) for name in read}
    for node in graph.nodes:
        if node.op == "call_function" and node.name in wanted:
            copied = local.node_copy(node, lambda argument: copies[argument.name])
            copied.meta[OP] = node.name
            place(copied, device)
            if handed and copied.target is torch.ops.aten.view.default:
                copied.target = torch.ops.aten.reshape.default  # received tensors are contiguous, whatever they were at the sender
            copies[node.name] = copied
    for name, node in copies.items():
        if results := model.by_name[name].outputs:
            node.meta[NUM_DIMS] = len(results[0].shape)
    local.output(tuple(copies[name] for name in outputs))
    return local


def _sum_as_read(graph: fx.Graph, model: ModelGraph) -> None:
    """Makes gradients of several uses of a cast parameter add up in the type that is read, as those of an explicit cast do."""
    for node in graph.find_nodes(op="placeholder"):
        op = model.by_name.get(str(node.target))
        if len(node.users) > 1 and op is not None and op.kind == "parameter" and model.parameter_by_name[op.target].read_as:
            with graph.inserting_after(node):
                view = graph.call_function(torch.ops.aten.alias.default, (node,))
            node.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)


QUEUE = "weight_queue"
TRANSIENT = "transient_weights"
AWAITED = "awaited_weights"


def _trainable(model: ModelGraph, names: Iterable[str]) -> set[str]:
    """The names of ops that are trainable parameters."""
    ops = (model.by_name[name] for name in names)
    return {op.name for op in ops if op.kind == "parameter" and model.parameter_by_name[op.target].trainable}


def _reads(model: ModelGraph, wanted: set[str], handed: set[str], outputs: Sequence[str]) -> dict[str, None]:
    """Values from outside the stage, in graph order."""
    names = {name for op in model.ops if op.name in wanted and op.kind == "call" for name in op.inputs} | set(outputs)
    outside = {name for name in names if name in handed or model.by_name[name].kind != "call"}
    missing = names - outside - wanted
    assert not missing, f"the stage reads {sorted(missing)}, which nothing hands to it"
    return {op.name: None for op in model.ops if op.name in outside}


def place(node: fx.Node, device: torch.device) -> None:
    """Replaces devices among the arguments of a captured op."""

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args = tuple(moved(argument) for argument in node.args)
    node.kwargs = {key: moved(argument) for key, argument in node.kwargs.items()}


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.count, None


def divided(value: torch.Tensor, count: int) -> torch.Tensor:
    """The same value; its gradient is divided by `count`."""
    result: torch.Tensor = _Divided.apply(value, count)  # type: ignore[no-untyped-call]
    return result


def divide_gradients(graph: fx.Graph, model: ModelGraph, names: Collection[str], count: int) -> None:
    """Inserts `divided` after the placeholders of some parameters, in place."""
    for node in graph.find_nodes(op="placeholder"):
        op = model.by_name.get(str(node.target))
        if op is None or op.kind != "parameter" or model.parameter_by_name[op.target].name not in names:
            continue
        with graph.inserting_after(node):
            part = graph.call_function(divided, (node, count))
        node.replace_all_uses_with(part, delete_user_cb=lambda user, part=part: user is not part)
