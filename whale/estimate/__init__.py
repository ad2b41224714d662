"""How long, and how much memory: what computing, holding and sending cost, and the event simulation of schedules."""

from whale.estimate.action_times import ActionTimes
from whale.estimate.bounds import bubble_share, exposed_sync, pipeline_seconds
from whale.estimate.communication import all_gather_line, all_reduce_line, all_to_all_line, edge_line, p2p_seconds, ring_all_reduce_seconds
from whale.estimate.compute import OpSeconds, op_seconds
from whale.estimate.costs import Costs
from whale.estimate.drawing import draw
from whale.estimate.figures import bubble, bubble_rate
from whale.estimate.kept import kept_tensors
from whale.estimate.line import Line
from whale.estimate.memory import StateBytes, activation_line, recomputed_lines, state_bytes, working_line
from whale.estimate.op_table import OpTable, op_table, spec_line
from whale.estimate.optimizer import optimizer_seconds
from whale.estimate.simulate import simulate

__all__ = [
    "ActionTimes",
    "Costs",
    "Line",
    "OpSeconds",
    "OpTable",
    "StateBytes",
    "activation_line",
    "all_gather_line",
    "all_reduce_line",
    "all_to_all_line",
    "bubble",
    "bubble_rate",
    "bubble_share",
    "draw",
    "edge_line",
    "exposed_sync",
    "kept_tensors",
    "op_seconds",
    "op_table",
    "optimizer_seconds",
    "p2p_seconds",
    "pipeline_seconds",
    "recomputed_lines",
    "ring_all_reduce_seconds",
    "simulate",
    "spec_line",
    "state_bytes",
    "working_line",
]
