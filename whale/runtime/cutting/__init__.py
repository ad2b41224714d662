"""Cuts lowered: a stage's graph and tensors as one device of a split group computes on its parts of them."""

from whale.runtime.cutting.group import Gate, Group
from whale.runtime.cutting.lower import GROUP, CutProgram, lower_cuts
from whale.runtime.cutting.pieces import cut_out, local_indices, local_shape, put_in

__all__ = ["GROUP", "CutProgram", "Gate", "Group", "cut_out", "local_indices", "local_shape", "lower_cuts", "put_in"]
