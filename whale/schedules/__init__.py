"""Pipeline schedules: builders order the computations, passes insert communication and recomputation, `verify` proves the result."""

from whale.schedules.communication import insert_communication
from whale.schedules.execution import Edges, execute, replay
from whale.schedules.holding import Releases, count_in_flight, count_recomputed, releases
from whale.schedules.of_plan import (
    alike_schedules,
    edge_pairs,
    forward_schedules_of,
    schedules_of,
    short_schedules_of,
    training_schedule,
)
from whale.schedules.orders import ScheduleShape, forward_only
from whale.schedules.recomputing import insert_recompute, recomputes
from whale.schedules.table import BUILDERS, build, most_held, placement
from whale.schedules.verify import verify

__all__ = [
    "BUILDERS",
    "Edges",
    "Releases",
    "ScheduleShape",
    "alike_schedules",
    "build",
    "count_in_flight",
    "count_recomputed",
    "edge_pairs",
    "execute",
    "forward_only",
    "forward_schedules_of",
    "insert_communication",
    "insert_recompute",
    "most_held",
    "placement",
    "recomputes",
    "releases",
    "replay",
    "schedules_of",
    "short_schedules_of",
    "training_schedule",
    "verify",
]
