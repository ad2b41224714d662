"""Time and memory of a step: costs of computing, holding and sending, and the event simulation of schedules."""

from whale.estimate.costs.bounds import exposed_sync, pipeline_seconds
from whale.estimate.costs.communication import (
    all_gather_line,
    all_reduce_line,
    all_reduce_seconds,
    all_to_all_line,
    edge_line,
)
from whale.estimate.costs.compute import op_seconds, optimizer_seconds
from whale.estimate.costs.costs import Costs
from whale.estimate.costs.line import Line
from whale.estimate.costs.op_table import OpTable, op_table, output_lines, spec_line
from whale.estimate.events.simulate import ActionTimes, bubble, bubble_rate, simulate
from whale.estimate.memory.memory import StateBytes, kept_names, kept_tensors, size_line, state_bytes
from whale.estimate.step.estimate import estimate, estimate_with
from whale.estimate.step.goodput import Faults, Goodput, faults_of, with_copies, with_copying
from whale.estimate.step.step import DeviceEstimate, StepEstimate

__all__ = [
    "ActionTimes",
    "Costs",
    "DeviceEstimate",
    "Faults",
    "Goodput",
    "Line",
    "OpTable",
    "StateBytes",
    "StepEstimate",
    "all_gather_line",
    "all_reduce_line",
    "all_reduce_seconds",
    "all_to_all_line",
    "bubble",
    "bubble_rate",
    "edge_line",
    "estimate",
    "estimate_with",
    "exposed_sync",
    "faults_of",
    "kept_names",
    "kept_tensors",
    "op_seconds",
    "op_table",
    "optimizer_seconds",
    "output_lines",
    "pipeline_seconds",
    "simulate",
    "size_line",
    "spec_line",
    "state_bytes",
    "with_copies",
    "with_copying",
]
