"""Where a copy of a tensor will not do: its memory is written in place, and others see that through views."""

from __future__ import annotations

from collections.abc import Iterable

from whale.estimate.costs.op_table import operator
from whale.ir.graph import ModelGraph

SILENT_WRITERS = frozenset({"batch_norm", "instance_norm"})
"""Ops that update running statistics without a mark of it."""


class MemoryWrites:
    """What the ops of a stage write in place.

    Args:
        graph: the model.
        ops: of the stage, in graph order.
    """

    def __init__(self, graph: ModelGraph, ops: Iterable[str]) -> None:
        self._graph = graph
        self._position, self._owner = graph.position, graph.storage
        self._last = {self._owner[name]: self._position[name] for name in ops if "in_place" in graph.by_name[name].tags}

    def is_written_later(self, tensor: str) -> bool:
        """Whether a tensor's memory is written after the tensor was made."""
        return self._last.get(self._owner[tensor], -1) > self._position[tensor]

    def need_same(self, tensor: str, reader: str) -> bool:
        """Whether a reader must have the tensor as it lies: it sees or makes writes, or its result is the same memory."""
        owner = self._owner[tensor]
        if self.is_written_later(tensor) or (owner in self._last and self._owner[reader] == owner):
            return True
        op = self._graph.by_name[reader]
        is_writer = "in_place" in op.tags or operator(op) in SILENT_WRITERS
        return is_writer and self._graph.by_name[tensor].kind == "buffer"
