"""The warning that a plan computes otherwise than one device, since it keeps samples apart that the model mixes."""

from __future__ import annotations

from whale.comm import World
from whale.errors import warn
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
        warn(text)
