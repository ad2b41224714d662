"""Marks on the nodes of a stage's graph, which survive every pass."""

from __future__ import annotations

from torch import fx

OP = "whale_op"
"""Name of the captured op that a node computes, or takes part in; nodes that only move values have none."""
NUM_DIMS = "whale_num_dims"
"""Dimensions of the node's value, if it is a tensor."""
HALF = "whale_half"
"""Which half of the rows it works on (0 or 1), where a stage computes in halves."""


def op_of(node: fx.Node) -> str | None:
    """The captured op that a node belongs to."""
    name: str | None = node.meta.get(OP)
    return name


def num_dims_of(node: fx.Node) -> int:
    count: int = node.meta[NUM_DIMS]
    return count
