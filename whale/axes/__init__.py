"""Logical axes: what every tensor dimension of a model is made of, what may be cut, and why the rest may not."""

from whale.axes.batch import batch_axes
from whale.axes.discover import discover
from whale.axes.operators import register_rule
from whale.axes.values import Axes, Axis, Concatenation, Dimension, Mixing, OpAxes, Role, WholeReason, axes_of, show_dimension

__all__ = [
    "Axes", "Axis", "Concatenation", "Dimension", "Mixing", "OpAxes", "Role", "WholeReason", "axes_of", "batch_axes", "discover",
    "register_rule", "show_dimension",
]  # fmt: skip
