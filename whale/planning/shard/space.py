"""What can be cut in a stage: its axes, why others cannot, which are equivalent, and which the user insists on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from whale.axes import Axes, Role
from whale.errors import AnnotationError, WhaleError, first_few, raise_faults
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH
from whale.ir.scope import Scope, SourceLine


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an axis is not cut in a stage."""

    reason: str  # with both values where there are two
    where: SourceLine | None = None  # the user's line
    hint: str = ""  # what to do; "" where nothing helps


@dataclass(frozen=True)
class Scene:
    """One stage as the sharding pass sees it; scenes of one model with equal names are equal."""

    graph: ModelGraph = field(compare=False, repr=False)
    axes: Axes = field(compare=False, repr=False)
    ops: tuple[str, ...]  # the calls of the stage, in graph order
    received: frozenset[str] = frozenset()  # ops of other stages whose values it reads
    handed_on: frozenset[str] = frozenset()  # ops whose values other stages read; these are made whole, as the graph's outputs
    shared: frozenset[str] = frozenset()  # its parameters that another stage on the same devices reads too, which are held in one way
    rows_arriving: frozenset[str] = frozenset()  # those of `received` from a stage on the same devices which divides the rows
    rows_leaving: frozenset[str] = frozenset()  # those of `handed_on` that only such stages read

    @property
    def has_rows_apart(self) -> bool:
        """Whether a neighbour on the same devices divides the rows: then ops may work on the local rows."""
        return bool(self.rows_arriving or self.rows_leaving)

    @cached_property
    def calls(self) -> tuple[Op, ...]:
        """The ops that have axes."""
        return tuple(self.graph.by_name[name] for name in self.ops if name in self.axes.ops)

    @cached_property
    def returned(self) -> frozenset[str]:
        """Values that leave the stage: they are made whole."""
        terms = (name for term in self.graph.loss for name in (term.sum, term.weight) if name)
        return frozenset(self.ops).intersection((*self.handed_on, *self.graph.outputs, *terms))

    @cached_property
    def members(self) -> dict[str, tuple[Op, ...]]:
        """Per axis the ops that meet it; of the batch only where a neighbour divides the rows."""
        found: dict[str, list[Op]] = {}
        for op in self.calls:
            for axis in self.axes.ops[op.name].roles:
                if axis != BATCH or self.has_rows_apart:
                    found.setdefault(axis, []).append(op)
        return {axis: tuple(ops) for axis, ops in found.items()}

    def role(self, op: str, axis: str) -> Role:
        return self.axes.ops[op].roles[axis]

    def may_work(self, op: Op, axis: str) -> bool:
        """Whether an op could work on parts of an axis that it meets."""
        return self.axes.ops[op.name].roles[axis].kind != "whole"

    def axes_in(self, name: str) -> frozenset[str]:
        return self.axes.in_results(name)


@dataclass(frozen=True)
class ShardSpace:
    """What can be cut."""

    axes: tuple[str, ...]  # that can, in the model's order
    refused: Mapping[str, Refusal]  # that cannot, with the reason
    kinds: tuple[tuple[str, ...], ...]  # sets of equivalent axes, no two of which meet in one op

    @cached_property
    def kind_of(self) -> dict[str, int]:
        return {axis: index for index, kind in enumerate(self.kinds) for axis in kind}


def find_shard_space(scene: Scene, width: int, num_rows: float, only: Collection[str] | None = None) -> ShardSpace:
    """Finds what can be cut over groups of `width` devices.

    Args:
        num_rows: that a group takes.
        only: axes that a written plan allows; None for all.
    """
    refused: dict[str, Refusal] = {}
    for axis in scene.members:
        size = num_rows if axis == BATCH else scene.axes.by_name[axis].size
        refusal = _refusal(scene, axis, size, width) if only is None or axis in only or axis == BATCH else OTHER_AXES
        if refusal is not None:
            refused[axis] = refusal
    allowed = tuple(axis.name for axis in scene.axes.axes if axis.name in scene.members and axis.name not in refused)
    return ShardSpace(allowed, refused, _fold(scene, allowed, _meetings(scene, frozenset(allowed))))


OTHER_AXES = Refusal("the written plan cuts other axes", hint="axes and more_axes of the plan say which are cut")


def whole_refusal(op: Op, role: Role) -> Refusal:
    return Refusal(f"{op.target} {role.reason} (%{op.name})", op.where, _hint(op, role.reason))


def _refusal(scene: Scene, axis: str, size: float, width: int) -> Refusal | None:
    """Why an axis is cut nowhere: no op can work on its parts, it is too short, or a parameter would be held in two ways."""
    members = scene.members[axis]
    if not any(scene.may_work(op, axis) for op in members):
        return whole_refusal(members[0], scene.role(members[0].name, axis))
    silent = next((op for op in scene.calls if axis in scene.axes_in(op.name) and axis not in scene.axes.ops[op.name].roles), None)
    if silent is not None:
        return Refusal(f"{silent.target} has no rule for it (%{silent.name})", silent.where)
    if axis != BATCH and axis in scene.axes.of_rows:
        return Refusal(f"the size of {axis} depends on the number of rows, which changes from batch to batch", members[0].where)
    if size < width:
        return Refusal(f"{axis} has size {size:g}, less than the {width} devices of the split")
    return _sharing(scene, axis)


def _hint(op: Op, reason: str) -> str:
    if "does not fit" in reason and not op.target.startswith("aten."):
        return "correct the rule that whale.register_rule was given"
    if "no rule" not in reason:
        return ""
    return f"whale.register_rule({op.target.rpartition('.')[0] or op.target!r}, ...) states what the op does with its axes"


def _sharing(scene: Scene, axis: str) -> Refusal | None:
    """A device holds a parameter in one way, so one that its other stages read too stays whole."""
    holders = {holder.rpartition(":")[0] for holder in scene.axes.held_by[axis]} & scene.shared
    if not holders:
        return None
    return Refusal(f"another TaskGraph on the same devices reads {sorted(holders)[0]} whole")


def _meetings(scene: Scene, allowed: frozenset[str]) -> tuple[frozenset[str], ...]:
    """The sets of axes that meet in one op."""
    found = (allowed.intersection(scene.axes.ops[op.name].roles) for op in scene.calls)
    return tuple(dict.fromkeys(meeting for meeting in found if len(meeting) > 1))


def _fold(scene: Scene, allowed: Sequence[str], meetings: Collection[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """Sets of equivalent axes: equal sizes, equal ops around them, and equivalent axes met there.

    Equivalent axes that meet one another stay separate: the best is then to cut every other one (layers of equal width in a row).
    """
    numbers: dict[Hashable, int] = {}
    own = {axis: numbers.setdefault(_signature(scene, axis), len(numbers)) for axis in allowed}
    neighbours: dict[str, set[int]] = {axis: set() for axis in allowed}
    separate: set[int] = set()
    for meeting in meetings:
        signs = [own[axis] for axis in meeting]
        for axis in meeting:
            neighbours[axis].update(own[other] for other in meeting if other != axis)
        separate.update(sign for sign, count in Counter(signs).items() if count > 1)
    kinds: dict[Hashable, list[str]] = {}
    for axis in allowed:
        key = axis if own[axis] in separate or axis == BATCH else (own[axis], frozenset(neighbours[axis]))
        kinds.setdefault(key, []).append(axis)
    return tuple(tuple(kind) for kind in kinds.values())


def _signature(scene: Scene, axis: str) -> Hashable:
    uses = Counter(_use(scene, axis, op) for op in scene.members[axis])
    return scene.axes.by_name[axis].size, frozenset(uses.items())


def _use(scene: Scene, axis: str, op: Op) -> Hashable:
    role = scene.axes.ops[op.name].roles[axis]
    read = tuple(_specs(scene, axis, op.inputs))
    return op.target, role, axis in scene.axes_in(op.name), op.outputs, op.requires_grad, op.forward_flops, read


def _specs(scene: Scene, axis: str, names: Iterable[str]) -> Iterator[Hashable]:
    for name in names:
        op = scene.graph.by_name[name]
        yield op.kind == "call", op.outputs, op.requires_grad, axis in scene.axes_in(name)


MAX_NAMES = 5  # listed in an error


def find_insisted(scene: Scene, space: ShardSpace, scopes: Sequence[Scope], width: int) -> tuple[tuple[int, ...], list[WhaleError]]:
    """The kinds that the scopes ask for by `axis`, and faults of what they ask."""
    kinds: dict[int, None] = {}
    faults: list[WhaleError] = []
    for scope in dict.fromkeys(scope for scope in scopes if scope.axis is not None):
        assert scope.axis is not None
        names = matches(scope.axis, (axis for axis in scene.members if axis != BATCH)) or _holding(scope.axis, scene)
        silent = next((found for name in names if (found := _without_rule(scene, name)) is not None), None)
        allowed = [axis for axis in names if axis in space.axes]
        own = {index for index, kind in enumerate(space.kinds) for axis in allowed if axis in kind}
        if not names:
            faults.append(_unknown(scope, scene))
        elif silent is not None:
            faults.append(_refused(scope, names[0], silent, width))
        elif not allowed:
            faults.append(_refused(scope, names[0], space.refused[names[0]], width))
        elif len(own) > 1:
            faults.append(
                AnnotationError(
                    f"axis={scope.axis!r} is ambiguous: it matches {first_few(allowed, MAX_NAMES)}",
                    where=scope.where,
                    hint="write more of the name",
                )
            )
        kinds |= dict.fromkeys(sorted(own))
    return tuple(kinds), faults


def check_axes(scene: Scene, scopes: Sequence[Scope]) -> None:
    """Raises AnnotationError for an axis of a split on one device that does not exist or cannot be cut: it would fail on several."""
    _, faults = find_insisted(scene, find_shard_space(scene, 1, 1), scopes, 1)
    raise_faults(faults)


def written_axes(wanted: Iterable[str], scene: Scene) -> tuple[str, ...]:
    """The axes of a stage that a written plan names; a name may match several, in one block or in all of them."""
    names = [axis for axis in scene.members if axis != BATCH]
    return tuple(dict.fromkeys(found for name in wanted for found in matches(name, names) or _holding(name, scene)))


def matches(wanted: str, names: Iterable[str]) -> list[str]:
    """The axes of that name, else those whose name ends in it after a dot."""
    known = list(names)
    if wanted in known:
        return [wanted]
    return [name for name in known if name.endswith(f".{wanted}")]


def _holding(wanted: str, scene: Scene) -> list[str]:
    """The axis given as ``parameter:dimension``, where it has another name."""
    return [axis for axis in scene.members if axis != BATCH and wanted in scene.axes.held_by.get(axis, ())]


class NothingToCut(AnnotationError):
    """A stage that is to be split has no axis that can be cut."""


def no_axis_fault(scene: Scene, space: ShardSpace, scopes: Sequence[Scope], width: int) -> NothingToCut:
    held = [axis for axis in space.refused if scene.axes.held_by.get(axis)] or list(space.refused)
    reasons = first_few([f"{axis}: {_text(space.refused[axis])}" for axis in held], MAX_NAMES, separator="; ")
    return NothingToCut(
        f"a split over {width} devices needs an axis that can be cut ({reasons or 'its ops have none'})",
        where=next((scope.where for scope in scopes), None),
        hint=next((refusal.hint for refusal in space.refused.values() if refusal.hint), None)
        or "whale doctor --axes shows every axis and what keeps it whole; use replicate here, or put more of the model under the split",
    )


def _without_rule(scene: Scene, axis: str) -> Refusal | None:
    """An op that meets an axis without a rule, or with a user's rule that does not fit: its behaviour on parts is unknown."""
    for op in scene.members[axis]:
        role = scene.role(op.name, axis)
        misfits = "does not fit" in role.reason and not op.target.startswith("aten.")
        if role.kind == "whole" and ("no rule" in role.reason or misfits):
            return whole_refusal(op, role)
    return None


def _unknown(scope: Scope, scene: Scene) -> AnnotationError:
    assert scope.axis is not None
    if scope.axis == BATCH:
        return AnnotationError("a split cannot cut the batch (axis='batch')", where=scope.where, hint="use replicate, which cuts the batch")
    last = {name.rpartition(".")[2]: name for name in reversed(list(scene.members))}
    near = get_close_matches(scope.axis, [*scene.members, *last], MAX_NAMES, 0.5)
    names = list(dict.fromkeys(last.get(name, name) if name not in scene.members else name for name in near))
    return AnnotationError(
        f"axis={scope.axis!r} of the split matches no axis of its ops",
        where=scope.where,
        hint=f"nearest: {first_few(names, MAX_NAMES)}" if names else f"there are {first_few(list(scene.members), MAX_NAMES)}",
    )


def _refused(scope: Scope, axis: str, refusal: Refusal, width: int) -> AnnotationError:
    text = refusal.reason if refusal.reason.startswith("split over") else f"{axis} cannot be cut: {_text(refusal)}"
    return AnnotationError(
        text, where=scope.where, hint=refusal.hint or "another axis, or none: whale doctor --axes shows which may be cut"
    )


def _text(refusal: Refusal) -> str:
    return refusal.reason + (f" at {refusal.where}" if refusal.where else "")
