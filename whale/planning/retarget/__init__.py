"""A plan carried over to another capture of its model: evaluation, prediction, other shapes."""

from whale.planning.retarget.retarget import retarget_plan

__all__ = ["retarget_plan"]
