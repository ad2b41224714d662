"""The planner: ordered passes from a ModelGraph, a Cluster and a Config to a Plan, without torch."""

from whale.planning.balance import MemoryLimit, MemoryShortage, balance
from whale.planning.carry import carry_plan
from whale.planning.explain import explain
from whale.planning.make_plan import make_plan
from whale.planning.verify import verify

__all__ = ["MemoryLimit", "MemoryShortage", "balance", "carry_plan", "explain", "make_plan", "verify"]
