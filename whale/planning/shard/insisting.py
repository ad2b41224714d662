"""The axis that a user insists on: found by name or suffix, or the one reason why it cannot be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from whale.errors import AnnotationError, WhaleError, first_few, raise_faults
from whale.ir.plan import BATCH
from whale.ir.scope import Scope
from whale.planning.shard.space import Refusal, Scene, ShardSpace, find_shard_space, whole_refusal

MAX_NAMES = 5
"""At most this many names are listed in an error."""


def find_insisted(scene: Scene, space: ShardSpace, scopes: Sequence[Scope], width: int) -> tuple[tuple[int, ...], list[WhaleError]]:
    """The kinds that the scopes ask for by `axis`, and what is wrong with what they ask."""
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
                    f"axis={scope.axis!r} stands for one axis, or for alike ones of several blocks "
                    f"(it fits {first_few(allowed, MAX_NAMES)})",
                    where=scope.where,
                    hint="write more of the name",
                )
            )
        kinds |= dict.fromkeys(sorted(own))
    return tuple(kinds), faults


def check_axes(scene: Scene, scopes: Sequence[Scope]) -> None:
    """Checks the axes that splits ask for where they have one device: what is wrong there would be wrong on several.

    Raises:
        AnnotationError: an axis that is not there, or cannot be cut.
    """
    _, faults = find_insisted(scene, find_shard_space(scene, 1), scopes, 1)
    raise_faults(faults)


def written_axes(wanted: Iterable[str], scene: Scene) -> tuple[str, ...]:
    """The axes of a stage that a written plan names; a name may fit several, in one block or in all of them."""
    names = [axis for axis in scene.members if axis != BATCH]
    return tuple(dict.fromkeys(found for name in wanted for found in matches(name, names) or _holding(name, scene)))


def matches(wanted: str, names: Iterable[str]) -> list[str]:
    """The axes of that name, else those whose name ends in it after a dot."""
    known = list(names)
    if wanted in known:
        return [wanted]
    return [name for name in known if name.endswith(f".{wanted}")]


def _holding(wanted: str, scene: Scene) -> list[str]:
    """The axis that is a dimension of a parameter, told as ``parameter:dimension``, where it has another name."""
    return [axis for axis in scene.members if axis != BATCH and wanted in scene.axes.held_by.get(axis, ())]


class NothingToCut(AnnotationError):
    """A stage that is to be split has no axis that can be cut."""


def no_axis_fault(scene: Scene, space: ShardSpace, scopes: Sequence[Scope], width: int) -> NothingToCut:
    """Nothing at all can be cut."""
    held = [axis for axis in space.refused if scene.axes.held_by.get(axis)] or list(space.refused)
    reasons = first_few([f"{axis}: {_text(space.refused[axis])}" for axis in held], MAX_NAMES, separator="; ")
    return NothingToCut(
        f"a split over {width} devices needs an axis that can be cut ({reasons or 'its ops have none'})",
        where=next((scope.where for scope in scopes), None),
        hint=next((refusal.hint for refusal in space.refused.values() if refusal.hint), None)
        or "whale axes shows every axis and what keeps it whole; use replicate here, or put more of the model under the split",
    )


def _without_rule(scene: Scene, axis: str) -> Refusal | None:
    """An op that meets an axis and has no rule, or a user's own that does not fit: nobody can tell what it does with parts."""
    for op in scene.members[axis]:
        role = scene.role(op.name, axis)
        misfits = "does not fit" in role.reason and not op.target.startswith("aten.")
        if role.kind == "whole" and ("no rule" in role.reason or misfits):
            return whole_refusal(op, role)
    return None


def _unknown(scope: Scope, scene: Scene) -> AnnotationError:
    assert scope.axis is not None
    if scope.axis == BATCH:
        return AnnotationError(
            "a split cuts another axis than the batch (axis='batch')", where=scope.where, hint="replicate is what cuts the batch"
        )
    last = {name.rpartition(".")[2]: name for name in reversed(list(scene.members))}
    near = get_close_matches(scope.axis, [*scene.members, *last], MAX_NAMES, 0.5)
    names = list(dict.fromkeys(last.get(name, name) if name not in scene.members else name for name in near))
    return AnnotationError(
        f"the ops of a split have the axis that it asks for (axis={scope.axis!r}: none of that name)",
        where=scope.where,
        hint=f"nearest: {first_few(names, MAX_NAMES)}" if names else f"there are {first_few(list(scene.members), MAX_NAMES)}",
    )


def _refused(scope: Scope, axis: str, refusal: Refusal, width: int) -> AnnotationError:
    text = refusal.reason if refusal.reason.startswith("split over") else f"{axis} cannot be cut: {_text(refusal)}"
    return AnnotationError(text, where=scope.where, hint=refusal.hint or "another axis, or none: whale axes shows which may be cut")


def _text(refusal: Refusal) -> str:
    return refusal.reason + (f" at {refusal.where}" if refusal.where else "")
