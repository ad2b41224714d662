"""The warning that a plan computes otherwise than one device, since it keeps samples apart that the model mixes."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from whale.comm import World
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning.explain.mixing import mixed_apart, warn_of_mixing


def warn_where_apart(plan: Plan, graph: ModelGraph, world: World) -> None:
    """Says once, on rank 0, which lines mix samples of which the plan computes some by themselves.

    Args:
        plan: for the graph.
        graph: the captured mode.
        world: of the ranks.
    """
    if world.rank == 0 and (text := warn_of_mixing(mixed_apart(plan, graph), plan, graph)):
        warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames up the user's own code is, as `warnings.warn` counts from its caller."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("whale."):
        frame, level = frame.f_back, level + 1
    return level
