"""How long, and how much memory: what computing, holding and sending cost, and the event simulation of schedules."""

from whale.estimate.action_times import ActionTimes
from whale.estimate.bounds import bubble_share, exposed_sync, pipeline_seconds
from whale.estimate.communication import all_gather_line, all_reduce_line, all_to_all_line, edge_line, p2p_seconds, ring_all_reduce_seconds
from whale.estimate.compute import OpSeconds, op_seconds
from whale.estimate.costs import Costs
from whale.estimate.drawing import draw
from whale.estimate.estimate import estimate, estimate_with
from whale.estimate.figures import bubble, bubble_rate
from whale.estimate.kept import kept_tensors
from whale.estimate.line import Line
from whale.estimate.memory import StateBytes, kept_names, size_line, state_bytes, working_line
from whale.estimate.op_table import OpTable, op_table, spec_line
from whale.estimate.optimizer import optimizer_seconds
from whale.estimate.simulate import simulate
from whale.estimate.step import DeviceEstimate, LinkUse, MemoryUse, Message, StepEstimate, Sync

__all__ = [
    "ActionTimes",
    "Costs",
    "DeviceEstimate",
    "Line",
    "LinkUse",
    "MemoryUse",
    "Message",
    "OpSeconds",
    "OpTable",
    "StateBytes",
    "StepEstimate",
    "Sync",
    "all_gather_line",
    "all_reduce_line",
    "all_to_all_line",
    "bubble",
    "bubble_rate",
    "bubble_share",
    "draw",
    "edge_line",
    "estimate",
    "estimate_with",
    "exposed_sync",
    "kept_names",
    "kept_tensors",
    "op_seconds",
    "op_table",
    "optimizer_seconds",
    "p2p_seconds",
    "pipeline_seconds",
    "ring_all_reduce_seconds",
    "simulate",
    "size_line",
    "spec_line",
    "state_bytes",
    "working_line",
]
