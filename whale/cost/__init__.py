"""What computing, holding and sending cost: closed forms over the values of `whale.ir`."""

from whale.cost.communication import all_gather_line, all_reduce_line, all_to_all_line, edge_line, p2p_seconds, ring_all_reduce_seconds
from whale.cost.compute import OpSeconds, op_seconds
from whale.cost.kept import kept_tensors, storage_of
from whale.cost.line import Line
from whale.cost.memory import activation_line, parameter_bytes, recomputed_lines, working_line
from whale.cost.op_table import OpTable, op_table, spec_line
from whale.cost.optimizer import optimizer_seconds
from whale.cost.pipeline import bubble_share, exposed_sync, pipeline_seconds

__all__ = [
    "Line",
    "OpSeconds",
    "OpTable",
    "activation_line",
    "all_gather_line",
    "all_reduce_line",
    "all_to_all_line",
    "bubble_share",
    "edge_line",
    "exposed_sync",
    "kept_tensors",
    "op_seconds",
    "op_table",
    "optimizer_seconds",
    "p2p_seconds",
    "parameter_bytes",
    "pipeline_seconds",
    "recomputed_lines",
    "ring_all_reduce_seconds",
    "spec_line",
    "storage_of",
    "working_line",
]
