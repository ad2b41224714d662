"""The decision, and its parts."""

from whale.ir.plan.choice import Choice
from whale.ir.plan.parameter_state import Form, ParameterState, brought_back, states_of
from whale.ir.plan.plan import BatchAxis, Plan
from whale.ir.plan.replica import Edge, Pipeline, Replica, devices_of
from whale.ir.plan.segment import Segment, program_of
from whale.ir.plan.shard import BATCH, Shard, describe_shards
from whale.ir.plan.stage import Estimate, Stage, VirtualDevice
from whale.ir.plan.task_graph import TaskGraph
from whale.ir.plan.text import describe_order, describe_shape

__all__ = [
    "BATCH",
    "BatchAxis",
    "Choice",
    "Edge",
    "Estimate",
    "Form",
    "ParameterState",
    "Pipeline",
    "Plan",
    "Replica",
    "Segment",
    "Shard",
    "Stage",
    "TaskGraph",
    "VirtualDevice",
    "brought_back",
    "describe_order",
    "describe_shape",
    "describe_shards",
    "devices_of",
    "program_of",
    "states_of",
]
