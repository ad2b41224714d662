"""Logical axes: what every tensor dimension of a model is made of, what may be cut, and why the rest may not."""

from whale.axes.batch import batch_axes
from whale.axes.describe import AxisRow, describe
from whale.axes.discover import discover
from whale.axes.operators import register_rule
from whale.axes.values import Axes, Axis, Concatenation, Dimension, Mixing, OpAxes, Role, Whole, axes_of, show_dimension

__all__ = [
    "Axes",
    "Axis",
    "AxisRow",
    "Concatenation",
    "Dimension",
    "Mixing",
    "OpAxes",
    "Role",
    "Whole",
    "axes_of",
    "batch_axes",
    "describe",
    "discover",
    "register_rule",
    "show_dimension",
]
