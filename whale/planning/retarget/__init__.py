"""A plan carried over to another capture of its model: evaluation, prediction, other sizes."""

from whale.planning.retarget.retarget import retarget_plan
from whale.planning.retarget.sizes import carry_plan

__all__ = ["carry_plan", "retarget_plan"]
