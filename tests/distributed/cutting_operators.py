"""The law of lowered cuts, operator by operator: each call that the rules are tried on, cut along each of its axes."""

from __future__ import annotations

import operator
import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tests.distributed.cutting import everyone
from tests.parts import cut_out, put_in
from tests.unit.axes.law import Case, Law, results
from tests.unit.axes.test_rules_alone import bits, ids, labels, x
from whale.axes import Axes, discover
from whale.ir.graph import ModelGraph, Op, Parameter, Ref
from whale.ir.plan import Shard
from whale.runtime.program.shard import Group, ShardProgram, lower_shards


@dataclass(frozen=True)
class Single:
    """One call of an operator as a captured model: its tensors are parameters where they have gradients, else inputs.

    Attributes:
        model, graph: of the call.
        tensors: its tensors, ``t0 t1 ...``.
        trained: whether float tensors are parameters.
    """

    model: ModelGraph
    graph: fx.Graph
    tensors: tuple[Tensor, ...]
    trained: bool


def single(case: Case) -> Single:
    """The model of one case."""
    law = Law(case)
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"t{index}") for index in range(len(law.tensors))]
    args, kwargs = law._with(placeholders)
    node = graph.create_node("call_function", law.call, tuple(args), kwargs, name="op")
    is_float = [tensor.is_floating_point() and case.grad for tensor in law.tensors]
    specs = [law.reading.graph.by_name[f"t{index}"].outputs for index in range(len(law.tensors))]
    sources = [
        Op(f"t{i}", "parameter" if is_float[i] else "input", f"t{i}", outputs=specs[i], requires_grad=is_float[i])
        for i in range(len(law.tensors))
    ]
    tags = set(law.op.tags) | ({"random"} if torch.Tag.nondeterministic_seeded in law.call.tags else set())
    calls = [replace(law.op, requires_grad=any(is_float), tags=frozenset(tags))]
    returned = [node]
    if not isinstance(law.call(*law._with(law.tensors)[0], **law._with(law.tensors)[1]), Tensor):
        returned = []
        for index, spec in enumerate(law.op.outputs):
            returned.append(graph.create_node("call_function", operator.getitem, (node, index), {}, name=f"item{index}"))
            calls.append(Op(f"item{index}", "call", "operator.getitem", (Ref("op"), index), (), (spec,), requires_grad=any(is_float)))
    graph.output(tuple(returned))
    parameters = tuple(Parameter(f"t{i}", specs[i][0]) for i, wanted in enumerate(is_float) if wanted)
    return Single(ModelGraph((*sources, *calls), parameters, 2), graph, tuple(law.tensors), case.grad)


def run(module: fx.GraphModule, tensors: list[Tensor], trained: bool, *first: object) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results and gradients on some seeds."""
    leaves = [t.detach().clone().requires_grad_(trained and t.is_floating_point()) for t in tensors]
    torch.manual_seed(3)
    values = results(module(*first, *leaves))
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(v.shape, dtype=v.dtype, generator=generator) if v.is_floating_point() else None for v in values]
    pairs = [(v, s) for v, s in zip(values, seeds, strict=True) if s is not None and v.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [s for _, s in pairs])
    return [v.detach() for v in values], [leaf.grad for leaf in leaves]


Results = tuple[list[Tensor], list[Tensor | None]]


@cache
def _read(module: str, name: str) -> list[tuple[Case, Single, Axes, Results]]:
    """The cases of a list in a module, as models, with the results and gradients of the whole call."""
    found = []
    for case in getattr(import_module(module), name):
        whole = single(case)
        expected = run(fx.GraphModule(nn.Module(), whole.graph), list(whole.tensors), whole.trained)
        found.append((case, whole, discover(whole.model), expected))
    return found


def prepare_cases(module: str, name: str) -> None:
    """Reads the cases of a list in a module where it is called, and for processes forked from it."""
    _read(module, name)


@dataclass(frozen=True)
class Attempt:
    """A call on this rank's parts.

    Attributes:
        program: as lowered.
        made, gradients: of this rank.
        error: the traceback, or "".
    """

    program: ShardProgram | None
    made: list[Tensor]
    gradients: list[Tensor | None]
    error: str = ""


def failures(rank: int, num_ranks: int, module: str, name: str) -> list[str]:
    """What goes wrong for the cases of a list in a module, cut along every axis in turn."""
    group: Group = everyone()
    tried: list[Any] = []
    for case, whole, axes, expected in _read(module, name):
        for axis, role in axes.ops["op"].roles.items():
            if role.kind == "whole" or axes.by_name[axis].size < num_ranks:
                continue
            draw = random.Random(str(case) + axis)
            ends = [0, *sorted(draw.sample(range(1, axes.by_name[axis].size), num_ranks - 1)), axes.by_name[axis].size]
            shard = Shard(axis, tuple(b - a for a, b in pairwise(ends)))
            tried.append((f"{case} {role} {shard}", expected, axes, shard, _try(whole, axes, shard, rank, group)))
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, [(attempt.error, attempt.gradients) for *_, attempt in tried])  # once: it takes longer than a try
    found = []
    for (title, expected, axes, shard, attempt), of_ranks in zip(tried, zip(*gathered, strict=True), strict=True):
        if text := _fault(attempt, of_ranks, expected, axes, shard, rank):
            found.append(f"{title}: {text}")
    return [f"{len(tried)} tried", *found]


def _try(whole: Single, axes: Axes, shard: Shard, rank: int, group: Group) -> Attempt:
    model, shards = whole.model, (shard,)
    try:
        program = lower_shards(whole.graph, model, axes, shards, rank)
    except Exception:
        return Attempt(None, [], [], traceback.format_exc(limit=-3))
    local = [
        cut_out(t, axes.ops[f"t{i}"].outputs[0], axes, shards, rank) if model.by_name[f"t{i}"].kind == "parameter" else t
        for i, t in enumerate(whole.tensors)
    ]
    try:
        return Attempt(program, *run(fx.GraphModule(nn.Module(), program.graph), local, whole.trained, group))
    except Exception:
        return Attempt(program, [], [], traceback.format_exc(limit=-3))


def _fault(attempt: Attempt, of_ranks: Sequence[Any], expected: Results, axes: Axes, shard: Shard, rank: int) -> str:
    if any(error for error, _ in of_ranks):
        return str([error for error, _ in of_ranks])
    results, gradients = expected
    for value, right in zip(attempt.made, results, strict=True):
        if not _close(value, right):
            return f"value {value} instead of {right}"
    return _compare_gradients(attempt.program, [own for _, own in of_ranks], gradients, axes, (shard,), rank)


def _compare_gradients(program: Any, pieces: list[Any], gradients: list[Tensor | None], axes: Axes, shards: Any, rank: int) -> str:
    for index, right in enumerate(gradients):
        name = f"t{index}"
        if right is None:
            continue
        mine = [torch.zeros(()) if piece[index] is None else piece[index] for piece in pieces]
        if name in program.parameters:
            made = torch.full_like(right, torch.nan)
            for position, piece in enumerate(mine):
                put_in(made, piece, program.parameters[name], axes, shards, position)
        else:
            made = sum(mine, torch.zeros(())) if name in program.partial else mine[rank]
        if not _close(made + torch.zeros_like(right), right):
            return f"gradient of {name}: {made} instead of {right}"
    return ""


def _close(value: Tensor, right: Tensor) -> bool:
    if value.shape != right.shape or value.dtype != right.dtype:
        return False
    if value.is_complex():
        value, right = torch.view_as_real(value), torch.view_as_real(right)
    tolerance = 1e-5 if right.dtype == torch.float32 else 1e-11
    return torch.allclose(value.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


MORE = [
    Case("addmm.default", (x(7), x(3, 5), x(5, 7)), {}, {"alpha": 0.5, "beta": 2.0}),
    Case("baddbmm.default", (x(1, 3, 7), x(2, 3, 5), x(2, 5, 7)), {}, {"alpha": 0.5, "beta": 2.0}),
    Case("linear.default", (x(2, 3, 5), x(1, 5), x(1)), {}),
    Case("embedding.default", (x(11, 5), ids(11, 2, 3), 4), {}),
    Case("embedding.default", (x(11, 5), ids(11, 2, 3), 10, True), {}),
    Case("index.Tensor", (x(5, 7, 4), [None, ids(7, 2, 3)]), {}),
    Case("index.Tensor", (x(5, 7, 4, 3), [ids(5, 2, 1), None, ids(4, 6)]), {}),
    Case("index.Tensor", (x(5, 7), [torch.tensor([-1, 0, -5, 3])]), {}),
    Case("index_select.default", (x(3, 7, 2), -2, ids(7, 5)), {}),
    Case("gather.default", (x(3, 7, 2), -2, ids(7, 3, 5, 2)), {}),
    Case("cross_entropy_loss.default", (x(5, 7), x(5, 7).softmax(1), None, 1), {}),
    Case("cross_entropy_loss.default", (x(5, 7, 4), ids(7, 5, 4), None, 1), {}),
    Case("cross_entropy_loss.default", (x(5, 7), labels(), x(7).abs(), 1), {}, grad=False),
    Case("cross_entropy_loss.default", (x(7), torch.tensor(3)), {}),
    Case("nll_loss.default", (x(5, 4), labels(), x(4).abs(), 1), {}, grad=False),
    Case("cross_entropy_loss.default", (x(5, 7).float(), ids(7, 5), None, 2, 3), {}),
    Case("amax.default", (x(2, 7).round(),), {}),
    Case("amin.default", (x(2, 7, 3).round(), [-2, 0]), {}),
    Case("prod.default", (x(2, 7),), {}),
    Case("prod.dim_int", (torch.tensor([[0.0, 2.0, 3.0], [0.0, 0.0, 1.0]]).double(), 1), {}),
    Case("mean.dim", (x(2, 3, 5), [0, 1]), {}),
    Case("binary_cross_entropy_with_logits.default", (x(5, 3), x(5, 3).sigmoid(), x(5, 3).abs(), x(3).abs(), 0), {}, grad=False),
    Case("squeeze.default", (x(2, 1, 3, 1),), {}),
    Case("squeeze.dims", (x(2, 1, 3, 1), [0, 1]), {}),
    Case("squeeze.dim", (x(2, 3), 0), {}),
    Case("tile.default", (x(3, 5), [4]), {}),
    Case("tile.default", (x(3, 5), [2, 1, 3]), {}),
    Case("repeat_interleave.self_int", (x(3, 5), 4, 0), {}, {"output_size": 12}),
    Case("chunk.default", (x(2, 7), 3, 1), {}),
    Case("tensor_split.sections", (x(2, 7), 3, 1), {}),
    Case("view.default", (x(2, 24), [2, 2, -1, 3]), {}),
    Case("expand.default", (x(3, 1), [2, -1, 5]), {}),
    Case("expand.default", (x(1, 5), [7, 5]), {}),
    Case("conv2d.default", (x(2, 6, 5, 5), x(4, 3, 3, 3), x(4), [1, 1], [1, 1], [1, 1], 2), {}),
    Case("conv_transpose2d.input", (x(2, 6, 5, 5), x(6, 3, 3, 3), x(6), [2, 2], [1, 1], [1, 1], 2), {}),
    Case("convolution.default", (x(2, 6, 7), x(4, 3, 3), None, [1], [0], [1], False, [0], 2), {}),
    Case("pixel_shuffle.default", (x(2, 27, 3, 5), 3), {}),
    Case("arange.start_step", (1, 14, 2), {}),
    Case("linspace.default", (0.0, 1.0, 7), {}),
    Case("eye.m", (4, 7), {}),
    Case("randn.default", ([3, 5],), {}),
    Case("randint.default", (9, [3, 5]), {}),
    Case("one_hot.default", (ids(7, 3), 7), {}),
    Case("searchsorted.Tensor", (torch.arange(6.0).double(), x(4, 3)), {}, grad=False),
    Case("where.self", (bits(1, 3), x(2, 3), x(1, 1)), {}),
    Case("dropout.default", (x(2, 3), 0.5, False), {}),
]  # fmt: skip
"""What the rules need not be tried on, and lowerings do; the expected roles are left to the tests of the rules."""
