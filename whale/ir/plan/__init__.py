"""The plan and its parts."""

from whale.ir.plan.parameter_state import Form, ParameterState, Zero, brought_back, states_of, zero_of
from whale.ir.plan.plan import (
    BatchAxis,
    Choice,
    Edge,
    Pipeline,
    Plan,
    Replica,
    Rounds,
    TaskGraph,
    describe_degrees,
    describe_order,
    describe_shape,
    devices_of,
    members_of,
)
from whale.ir.plan.stage import BATCH, Estimate, Segment, Shard, Stage, VirtualDevice, describe_shards, program_of

__all__ = [
    "BATCH", "BatchAxis", "Choice", "Edge", "Estimate", "Form", "ParameterState", "Pipeline", "Plan", "Replica", "Rounds", "Segment",
    "Shard", "Stage", "TaskGraph", "VirtualDevice", "Zero", "brought_back", "describe_degrees", "describe_order", "describe_shape",
    "describe_shards", "devices_of", "members_of", "program_of", "states_of", "zero_of",
]  # fmt: skip
