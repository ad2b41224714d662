"""The cuts of a plan for another capture of the model: axes are the same where they are the same part of a parameter.

Axes take their names from what the graph does with them, so one axis may have another name where the loss is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

from whale.axes import Axes
from whale.axes.values import Concatenation, Dimension
from whale.errors import PlanError
from whale.ir.plan import Cut


def same_axes(ours: Axes, theirs: Axes) -> dict[str, str]:
    """Per axis of one capture its name in the other: by the parameters that have it, else by name and size."""
    names: dict[str, str] = {}
    for parameter, dimensions in ours.parameters.items():
        for own, other in zip(dimensions, theirs.parameters.get(parameter, ()), strict=False):
            for axis, name in _pairs(own, other):
                names.setdefault(axis, name)
    for known in ours.axes:
        like = theirs.by_name.get(known.name)
        if like is not None and like.size == known.size:
            names.setdefault(known.name, known.name)
    return names


def _pairs(own: Dimension, other: Dimension) -> Iterator[tuple[str, str]]:
    if len(own) != len(other):
        return
    for a, b in zip(own, other, strict=True):
        if isinstance(a, str) and isinstance(b, str):
            yield a, b
        elif isinstance(a, Concatenation) and isinstance(b, Concatenation) and len(a.pieces) == len(b.pieces):
            for piece, partner in zip(a.pieces, b.pieces, strict=True):
                yield from _pairs(piece, partner)


def carry_cuts(cuts: tuple[Cut, ...], names: dict[str, str], mode: str) -> tuple[Cut, ...]:
    """Cuts under the names of another capture.

    Raises:
        PlanError: an axis that is cut has no counterpart.
    """
    lost = [cut.axis for cut in cuts if cut.axis not in names]
    if lost:
        raise PlanError(
            f"an axis that is cut in training is one in {mode} too ({', '.join(lost)}: not found there)",
            hint="the model computes something else there; insist on another axis with whale.split(axis=...)",
        )
    return tuple(Cut(names[cut.axis], cut.sizes) for cut in cuts)
