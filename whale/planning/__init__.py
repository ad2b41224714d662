"""The planner: ordered passes from a ModelGraph, a Cluster and a Config to a Plan, without torch."""

from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.plan import make_plan
from whale.planning.retarget import carry_plan, retarget_plan
from whale.planning.simulation import EvenShares, Simulation, even_shares
from whale.planning.written import write_plan

__all__ = [
    "EvenShares",
    "MemoryShortage",
    "Simulation",
    "carry_plan",
    "even_shares",
    "make_plan",
    "retarget_plan",
    "write_plan",
]
