"""Pipeline schedules: one pure function per file that says who computes what when, and the passes over all of them."""

from whale.schedules.colocate import expand, places
from whale.schedules.communication import insert_communication
from whale.schedules.edges import Edges
from whale.schedules.execution import Execution, Stuck, execute
from whale.schedules.in_flight import count_in_flight, count_recomputed
from whale.schedules.of_plan import alike_schedules, edge_pairs, forward_schedules_of, schedules_of, short_schedules_of, training_schedule
from whale.schedules.orders.builder import Builder
from whale.schedules.orders.forward_only import forward_only
from whale.schedules.orders.shape import Shape
from whale.schedules.orders.table import BUILDERS, build, most_waiting, peak_in_flight, placement
from whale.schedules.recompute import insert_recompute, recomputes
from whale.schedules.releases import Releases, releases
from whale.schedules.rendezvous import Blocked, replay
from whale.schedules.verify import verify

__all__ = [
    "BUILDERS",
    "Blocked",
    "Builder",
    "Edges",
    "Execution",
    "Releases",
    "Shape",
    "Stuck",
    "alike_schedules",
    "build",
    "count_in_flight",
    "count_recomputed",
    "edge_pairs",
    "execute",
    "expand",
    "forward_only",
    "forward_schedules_of",
    "insert_communication",
    "insert_recompute",
    "most_waiting",
    "peak_in_flight",
    "placement",
    "places",
    "recomputes",
    "releases",
    "replay",
    "schedules_of",
    "short_schedules_of",
    "training_schedule",
    "verify",
]
