"""Groups the ops of a stage into classes of equivalent ones, each with its possible labels: the sharding pass decides once per class.

Ops are equivalent if they compute the same from the same shapes along axes of the same kinds, and so are their producers
and readers. 48 equal blocks become a first, a middle and a last one. Prices stay exact, since each op and tensor counts;
coarse classes only exclude choices that treat equivalent ops differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.axes.labels import may_scatter
from whale.axes.operators import added_operand, gathered_operands
from whale.estimate.memory.memory import keeps_read
from whale.ir.graph import Op, Ref
from whale.ir.plan import BATCH, Shard
from whale.ir.writes import MemoryWrites
from whale.planning.shard.space import Scene, ShardSpace
from whale.sharding.bridges import Bridge

WHOLE = -1  # in place of a kind: along no axis

Use = tuple[int, bool]
"""How an op needs an operand: the kind of axis along which it is cut, or `WHOLE`; whether it enters work on parts."""


@dataclass(frozen=True, slots=True)
class Label:
    """What the ops of a class do."""

    work: int = WHOLE  # kind of axis along which they work on parts; of parameters, along which they are held
    scattered: int = WHOLE  # kind along which their sums are scattered


@dataclass(frozen=True)
class Node:
    """A class of equivalent ops; items of their results belong to them."""

    ops: tuple[Op, ...]  # the members, without items of their results
    labels: tuple[Label, ...]  # possible ones; the first is whole, except for values that arrive by rows

    @property
    def first(self) -> Op:
        return self.ops[0]


@dataclass(frozen=True)
class User:
    """A class that reads a tensor."""

    node: int  # index of the class; -1 for values that leave the stage
    uses: tuple[Use, ...]  # per label of it, how it needs the tensor
    has_gradient: bool  # whether it returns a gradient
    keeps: bool  # whether it keeps the tensor for backward
    is_rigid: bool  # whether it needs the tensor itself, not a copy: it writes into it or returns a view of written memory


@dataclass(frozen=True)
class Tensors:
    """Equivalent tensors with equivalent readers."""

    node: int  # index of the class that makes them
    ops: tuple[Op, ...]  # that make them
    forms: tuple[int, ...]  # per label of the class, the kind along which they lie
    users: tuple[User, ...]  # that read them

    @property
    def first(self) -> Op:
        return self.ops[0]

    @property
    def count(self) -> int:
        return len(self.ops)


class Classes:
    """The classes of a stage.

    Args:
        kept: per op, the tensors that it keeps for backward, by owner of their storage.
    """

    def __init__(self, scene: Scene, space: ShardSpace, kept: Mapping[str, tuple[str, ...]]) -> None:
        self.scene, self.space, self._kept = scene, space, kept
        self._writes = MemoryWrites(scene.graph, scene.ops)
        self._added = {name: added_operand(scene.graph.by_name[name]) for name in scene.ops}
        self._kinds_in: dict[str, frozenset[int]] = {}
        self.cuts: dict[tuple[int, ...], tuple[Shard, ...]] = {}  # by label of each class, once they were asked for (`cuts_of`)
        self._head_of = self._heads()
        colours = self._colours()
        found: dict[int, list[Op]] = {}
        for name, head in self._head_of.items():
            if name == head:
                found.setdefault(colours[name], []).append(scene.graph.by_name[name])
        self.nodes = tuple(Node(tuple(ops), tuple(self._labels(ops[0]))) for ops in found.values())
        index = {op.name: number for number, node in enumerate(self.nodes) for op in node.ops}
        self.node_of = {name: index[head] for name, head in self._head_of.items()}

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """Per op that stands for others, itself and those: items of its results, further names of a parameter."""
        found: dict[str, list[str]] = {}
        for name, head in self._head_of.items():
            found.setdefault(head, []).append(name)
        return {head: tuple(names) for head, names in found.items()}

    @cached_property
    def forms(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per class and result of a member, by label the kind along which it lies."""
        return tuple(tuple(self._forms(name) for name in self.members[node.first.name]) for node in self.nodes)

    def kinds_in(self, name: str) -> frozenset[int]:
        """The kinds of axes in the results of an op."""
        known = self._kinds_in.get(name)
        if known is None:
            kind_of = self.space.kind_of
            known = self._kinds_in[name] = frozenset(kind_of[axis] for axis in self.scene.axes_in(name) if axis in kind_of)
        return known

    def work(self, name: str, label: Label) -> str | None:
        """The axis along which an op works, or a parameter is held, under a label of its class."""
        if label.work == WHOLE:
            return None
        op = self.scene.graph.by_name[name]
        known = self.scene.axes.ops.get(name)
        met = known.roles if known and op.kind == "call" else self.scene.axes_in(name)
        return next((axis for axis in met if self.space.kind_of.get(axis) == label.work), None)

    def form(self, name: str, label: Label) -> int:
        """The kind along which the results of an op lie."""
        if label.scattered != WHOLE:
            return label.scattered
        axis = self.work(name, label)
        return label.work if axis is not None and axis in self.scene.axes_in(name) else WHOLE

    def use(self, name: str, operand: str, label: Label) -> Use:
        """How an op needs an operand."""
        axis = self.work(name, label)
        if axis is None:
            return WHOLE, False
        role = self.scene.role(name, axis)
        if role.kind == "contracted" and self._added[name] == operand:
            return self._cut(operand, label.scattered)
        if role.gathers and operand in gathered_operands(self.scene.graph.by_name[name], role):
            return WHOLE, True
        return self._cut(operand, label.work)

    def _cut(self, operand: str, kind: int) -> Use:
        if kind == WHOLE:
            return WHOLE, False
        return (kind, False) if kind in self.kinds_in(operand) else (WHOLE, True)

    @cached_property
    def tensors(self) -> tuple[Tensors, ...]:
        """All tensors of the stage that something reads."""
        found: dict[Hashable, list[Op]] = {}
        users: dict[Hashable, tuple[User, ...]] = {}
        for name, node in self.node_of.items():
            own = tuple(dict.fromkeys(self._user(name, reader) for reader in self.readers.get(name, ())))
            if name in self.scene.returned:
                op = self.scene.graph.by_name[name]
                rows = self.space.kind_of.get(BATCH, WHOLE) if name in self.scene.rows_leaving else WHOLE
                own = (*own, User(-1, ((rows, False),), op.requires_grad, False, False))
            op = self.scene.graph.by_name[name]
            if own and len(op.outputs) == 1:
                key = node, self._forms(name), frozenset(own), op.outputs
                found.setdefault(key, []).append(op)
                users.setdefault(key, own)
        return tuple(Tensors(self.node_of[ops[0].name], tuple(ops), self._forms(ops[0].name), users[key]) for key, ops in found.items())

    @cached_property
    def bridges(self) -> tuple[Mapping[tuple[int, Use], Bridge], ...]:
        """Per entry of `tensors`, its possible bridges, by the form it lies in and the use it is needed for."""
        return tuple(dict(_bridges_at(tensors)) for tensors in self.tensors)

    def _forms(self, name: str) -> tuple[int, ...]:
        return tuple(self.form(name, label) for label in self.nodes[self.node_of[name]].labels)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[str]]:
        """Per op and source of the stage, the ops that read it, in order."""
        found: dict[str, list[str]] = {}
        for name in self.scene.ops:
            op = self.scene.graph.by_name[name]
            if op.target != "operator.getitem":
                for operand in op.inputs:
                    found.setdefault(operand, []).append(name)
        return found

    def _user(self, tensor: str, reader: str) -> User:
        node = self.node_of[reader]
        op = self.scene.graph.by_name[reader]
        uses = tuple(self.use(reader, tensor, label) for label in self.nodes[node].labels)
        keeps = keeps_read(self.scene.graph, self._kept, reader, tensor)
        return User(node, uses, op.requires_grad, keeps, self._writes.need_same(tensor, reader))

    def _heads(self) -> dict[str, str]:
        """Per op and source of the stage, the op whose label it has: items belong to their tuple."""
        graph = self.scene.graph
        found: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for name in self.scene.ops:
            for operand in graph.by_name[name].inputs:
                source = graph.by_name[operand]
                if source.kind in ("parameter", "buffer"):
                    known = graph.parameter_by_name.get(source.target)
                    found[operand] = parameters.setdefault(known.name if known else operand, operand)
                elif operand not in found:
                    found[operand] = operand
            is_item = graph.by_name[name].target == "operator.getitem"
            found[name] = found[graph.by_name[name].inputs[0]] if is_item else name
        return found

    def _labels(self, op: Op) -> Iterator[Label]:
        rows = self.space.kind_of.get(BATCH)
        if rows is not None and op.name in self.scene.rows_arriving:
            yield Label(rows)
            return
        yield Label()
        if op.kind in ("parameter", "buffer"):
            known = self.scene.graph.parameter_by_name.get(op.target)
            if known is not None and known.name not in self.scene.shared:
                yield from (Label(kind) for kind in sorted(self.kinds_in(op.name)))
            return
        known_axes = self.scene.axes.ops.get(op.name)
        if op.kind != "call" or known_axes is None or op.name not in self._added:
            return
        for axis, role in known_axes.roles.items():
            kind = self.space.kind_of.get(axis)
            if kind is None or role.kind == "whole":
                continue
            yield Label(kind)
            others = {self.space.kind_of[other] for other in known_axes.roles if self._may_scatter(op, axis, other)}
            yield from (Label(kind, other) for other in sorted(others - {kind}))

    def _may_scatter(self, op: Op, axis: str, target: str) -> bool:
        return target in self.space.kind_of and target in self.scene.axes_in(op.name) and may_scatter(op, self.scene.axes, axis, target)

    def _colours(self) -> dict[str, int]:
        """Per op, the number of its class: its own figures, refined once by those of its producers and readers."""
        numbers: dict[Hashable, int] = {}
        own = {name: numbers.setdefault(self._signature(name), len(numbers)) for name in self._head_of}
        readers: dict[str, set[int]] = {}
        for name in self.scene.ops:
            for operand in self.scene.graph.by_name[name].inputs:
                readers.setdefault(operand, set()).add(own[name])
        refined: dict[Hashable, int] = {}
        found = {}
        for name, head in self._head_of.items():
            read = tuple(own[operand] for operand in self.scene.graph.by_name[name].inputs) if name in self._added else ()
            found[name] = refined.setdefault((own[name], own[head], read, frozenset(readers.get(name, ()))), len(refined))
        return found

    def _signature(self, name: str) -> Hashable:
        scene, op = self.scene, self.scene.graph.by_name[name]
        known = scene.axes.ops.get(name)
        roles = known.roles if known else {}
        kinds = frozenset((self.space.kind_of[axis], role) for axis, role in roles.items() if axis in self.space.kind_of)
        held = scene.graph.parameter_by_name[op.target].name in scene.shared if op.target in scene.graph.parameter_by_name else None
        return (
            (op.kind, op.target if op.kind == "call" else held, op.outputs, op.requires_grad, op.forward_flops, op.backward_flops),
            (kinds, self.kinds_in(name), op.tags, tuple(_shape_of(op)), name in scene.returned, name in self._added),
            (self._writes.is_written_later(name), self.scene.graph.storage[name] == name, name in self._kept.get(name, ())),
            (name in scene.rows_arriving, name in scene.rows_leaving),
        )


def _bridges_at(tensors: Tensors) -> Iterator[tuple[tuple[int, Use], Bridge]]:
    op = tensors.first
    for form in dict.fromkeys(tensors.forms):
        for use in dict.fromkeys(use for user in tensors.users for use in user.uses):
            bridge = Bridge(op.name, _name(form), _name(use[0]), use[1], has_gradient=op.requires_grad)
            if bridge.forward or bridge.backward:
                yield (form, use), bridge


def _name(kind: int) -> str | None:
    return None if kind == WHOLE else str(kind)


def _shape_of(op: Op) -> Iterator[Hashable]:
    """Which arguments are results of other ops."""
    for key, argument in (*enumerate(op.args), *op.kwargs):
        if isinstance(argument, Ref):
            yield key
        elif isinstance(argument, tuple) and any(isinstance(item, Ref) for item in argument):
            yield key, tuple(isinstance(item, Ref) for item in argument)
