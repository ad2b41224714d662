"""The law of a rule: an op run on the parts of a cut axis, its results recombined, equals the op run whole.

Works on one real call of a torch operator. Every axis that the rule lets be cut is cut in two uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from whale.axes.atoms import Atoms, Dim
from whale.axes.discover import Checker, read
from whale.axes.notation import parse
from whale.axes.operators import operator_of
from whale.axes.outcome import RuleOutcome
from whale.axes.values import Role
from whale.ir.graph import Argument, ModelGraph, Op, Ref, TensorSpec

Part = tuple[int, int]
Local = Callable[["Shard"], object]


@dataclass
class Case:
    """One call of an operator.

    Attributes:
        target: without ``aten.``.
        args: tensors, lists of tensors, numbers.
        kwargs: keyword arguments.
        roles: expected, per kind, the sizes of the axes that have it.
        local: runs the op on one part, where that takes other arguments than the whole (sizes, positions).
        grad: whether gradients are compared too.
    """

    target: str
    args: tuple[object, ...]
    roles: dict[str, list[int]]
    kwargs: dict[str, object] = field(default_factory=dict)
    local: Local | None = None
    grad: bool = True

    def __str__(self) -> str:
        return self.target + "(" + ", ".join(_short(a) for a in self.args) + ")"


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape))
    return "[" + ",".join(map(_short, value)) + "]" if isinstance(value, list) else str(value)


@dataclass
class Shard:
    """One part of one axis, as `Case.local` sees it: local tensors, the local shape of the first result, the interval."""

    args: list[object]
    kwargs: dict[str, object]
    shape: tuple[int, ...]
    part: Part
    operator: Callable[..., object]


def operator(target: str) -> Any:
    packet, _, overload = target.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


class Law:
    """A case with its graph read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tensors: list[Tensor] = []
        args = tuple(self._argument(a) for a in case.args)
        kwargs = tuple((key, self._argument(value)) for key, value in case.kwargs.items())
        self.call: Any = operator(case.target)
        self.whole = results(self.call(*self._with(self.tensors)[0], **self._with(self.tensors)[1]))
        specs = tuple(_spec(t) for t in self.whole)
        sources = [Op(f"t{i}", "input", f"t{i}", outputs=(_spec(t),)) for i, t in enumerate(self.tensors)]
        tags = frozenset({"pointwise"}) if torch.Tag.pointwise in self.call.tags else frozenset()
        self.op = Op("op", "call", f"aten.{case.target}", args, kwargs, specs, tags=tags)
        self.reading, outcomes = read(ModelGraph((*sources, self.op), (), 2))
        self.outcome: RuleOutcome = outcomes["op"]
        self.operands = [outcomes[f"t{i}"].results[0] for i in range(len(self.tensors))]
        self.roles = Checker(self.reading.atoms).roles(self.outcome.letters)

    def role_sizes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for leaf, role in self.roles.items():
            found.setdefault(role.kind, []).append(self.reading.atoms.size((leaf,)))
        return {kind: sorted(sizes) for kind, sizes in sorted(found.items())}

    def check(self) -> None:
        """Every axis that may be cut and of which parts need not exchange anything, cut in two uneven parts, forward and gradient."""
        for leaf, role in self.roles.items():
            size = self.reading.atoms.size((leaf,))
            if role.kind not in ("whole", "pooled") and role.combine != "softmax" and size > 1:
                self._check_axis(leaf, role, [(0, max(1, size // 3)), (max(1, size // 3), size)])

    def _check_axis(self, leaf: int, role: Role, parts: list[Part]) -> None:
        tensors = [t.detach().clone().requires_grad_(self.case.grad and t.is_floating_point()) for t in self.tensors]
        args, kwargs = self._with(tensors)
        whole = results(self.call(*args, **kwargs))
        pieces = [self._run(leaf, role, tensors, part, index) for index, part in enumerate(parts)]
        for number, expected in enumerate(whole):
            dims = self.outcome.results[number]
            local = [piece[number] for piece in pieces]
            made = self._join(dims, leaf, local, parts, expected) if _holds(self.reading.atoms, dims, leaf) else None
            if made is None:
                made = (
                    _combine(role, local, parts, [_targets(self, leaf, tensors, p) for p in parts])
                    if role.kind == "contracted"
                    else local[0]
                )
            torch.testing.assert_close(made, expected, msg=lambda m: f"{self.case} cut {role} of {parts[-1][1]}: {m}")
            inputs = [t for t in tensors if t.requires_grad]
            if inputs and expected.is_floating_point() and expected.requires_grad:
                seed = torch.randn_like(expected)
                right = torch.autograd.grad(expected, inputs, seed, allow_unused=True, retain_graph=True)
                ours = torch.autograd.grad(made, inputs, seed, allow_unused=True, retain_graph=True)
                for a, b in zip(ours, right, strict=True):
                    zero = torch.zeros(())
                    torch.testing.assert_close(zero if a is None else a, zero if b is None else b, msg=lambda m: f"{self.case}: grad {m}")

    def _run(self, leaf: int, role: Role, tensors: list[Tensor], part: Part, index: int) -> list[Tensor]:
        local = []
        for number, (tensor, dims) in enumerate(zip(tensors, self.operands, strict=True)):
            piece = tensor
            for axis, dim in enumerate(dims):
                if _holds(self.reading.atoms, (dim,), leaf):
                    places = torch.tensor(positions(self.reading.atoms, dim, leaf, part))
                    piece = _masked(piece, axis, places) if role.combine == "lookup" else piece.index_select(axis, places)
            if role.kind == "contracted" and index > 0 and self._is_added(number):
                piece = piece * 0
            local.append(piece)
        args, kwargs = self._with(local)
        if self.case.local is None:
            return results(self.call(*args, **kwargs))
        shape = tuple(len(positions(self.reading.atoms, dim, leaf, part)) for dim in self.outcome.results[0])
        return results(self.case.local(Shard(args, kwargs, shape, part, self.call)))

    def _join(self, dims: tuple[Dim, ...], leaf: int, local: list[Tensor], parts: list[Part], like: Tensor) -> Tensor:
        made = torch.zeros_like(like)
        for piece, part in zip(local, parts, strict=True):
            places = [torch.tensor(positions(self.reading.atoms, dim, leaf, part), dtype=torch.long) for dim in dims]
            made = made.index_put(tuple(torch.meshgrid(*places, indexing="ij")), piece)
        return made

    def _is_added(self, number: int) -> bool:
        rule = operator_of(self.op).axes
        text = rule if isinstance(rule, str) or rule is None else rule(self.op, self.reading)
        if not isinstance(text, str):
            return False
        operands = parse(text).operands
        return number < len(operands) and operands[number].added

    def _argument(self, value: object) -> Argument:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Ref(f"t{len(self.tensors) - 1}")
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        return str(value) if isinstance(value, torch.dtype) else value  # type: ignore[return-value]

    def _with(self, tensors: list[Tensor]) -> tuple[list[object], dict[str, object]]:
        """The call's arguments with these tensors in place of its own."""
        queue = iter(tensors)

        def fill(value: object) -> object:
            if isinstance(value, Tensor):
                return next(queue)
            return [fill(item) for item in value] if isinstance(value, list) else value

        args = [fill(a) for a in self.case.args]
        return args, {key: fill(value) for key, value in self.case.kwargs.items()}


def positions(atoms: Atoms, dim: Dim, leaf: int, part: Part) -> list[int]:
    """The places in a dimension that a part of an axis takes; all where the dimension lacks the axis."""
    strides, runs = [], []
    leaves = atoms.leaves(dim)
    for index, atom in enumerate(leaves):
        strides.append(prod(atoms.size((a,)) for a in leaves[index + 1 :]))
        runs.append(_within(atoms, atom, leaf, part))
    return [sum(p * s for p, s in zip(place, strides, strict=True)) for place in product(*runs)]


def _within(atoms: Atoms, atom: int, leaf: int, part: Part) -> list[int]:
    if atom == leaf:
        return list(range(*part))
    pieces = atoms.pieces(atom)
    if not pieces:
        return list(range(atoms.size((atom,))))
    found, start = [], 0
    for piece in pieces:
        found += [start + place for place in positions(atoms, piece, leaf, part)]
        start += atoms.size(piece)
    return found


def _holds(atoms: Atoms, dims: tuple[Dim, ...], leaf: int) -> bool:
    return any(atom == leaf or _holds(atoms, atoms.pieces(atom), leaf) for dim in dims for atom in atoms.leaves(dim))


def _masked(tensor: Tensor, axis: int, places: Tensor) -> Tensor:
    """The tensor with all but these places zero: what a lookup that answers only for its part computes."""
    mask = torch.zeros(tensor.shape[axis], dtype=tensor.dtype)
    mask[places] = 1
    return tensor * mask.reshape([-1 if d == axis else 1 for d in range(tensor.dim())])


def _targets(law: Law, leaf: int, tensors: list[Tensor], part: Part) -> Tensor | None:
    """The targets of a classification loss that a part has."""
    integers = [i for i, t in enumerate(tensors) if not t.is_floating_point()]
    if not integers:
        return None
    target = tensors[integers[0]]
    for axis, dim in enumerate(law.operands[integers[0]]):
        target = target.index_select(axis, torch.tensor(positions(law.reading.atoms, dim, leaf, part)))
    return target


def _combine(role: Role, local: list[Tensor], parts: list[Part], targets: list[Tensor | None]) -> Tensor:
    stacked = torch.stack(local)
    sizes = [stop - start for start, stop in parts]
    match role.combine:
        case "sum" | "lookup":
            return stacked.sum(0)
        case "mean":
            return sum(piece * size for piece, size in zip(local, sizes, strict=True)) / sum(sizes)  # type: ignore[return-value]
        case "weighted_mean":
            counts = [int((t != -100).sum()) for t in targets if t is not None]
            return sum((p * n for p, n in zip(local, counts, strict=True) if n), torch.zeros(())) / sum(counts)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "any":
            return stacked.any(0)
        case "all":
            return stacked.all(0)
        case "prod":
            return stacked.prod(0)
    raise AssertionError(f"no law for {role}")


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), (0,) * tensor.dim())
