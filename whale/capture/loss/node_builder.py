"""Adds ops to a captured graph: each with its example value and the source of the op that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_ORIGIN = ("stack_trace", "nn_module_stack", "custom")


class NodeBuilder:
    """Inserts nodes one after another, behind everything that they read.

    Args:
        graph: where to.
        origin: the op whose line and module the new ones get; the first of them stands right behind it.
    """

    def __init__(self, graph: Graph, origin: Node) -> None:
        self._graph = graph
        self._origin = origin
        self._last = origin

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Adds a call; its example value is computed from those of its arguments."""
        map_arg((args, kwargs), self._move_behind)
        while self._last.op in ("placeholder", "get_attr") and self._last.next.op in ("placeholder", "get_attr"):
            self._last = self._last.next
        with self._graph.inserting_after(self._last):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: self._origin.meta[key] for key in _ORIGIN if key in self._origin.meta}
        node.meta["val"] = example(target, *args, **kwargs, like=self._origin)
        self._last = node
        return node

    def _move_behind(self, node: Node) -> Node:
        if self._last < node:
            self._last = node
        return node


def example(target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Any:
    """An op's result on the example values of its arguments, in the fake mode of `like`."""
    values = map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = getattr(like.meta["val"], "fake_mode", None)
    with torch.no_grad(), nullcontext() if mode is None else mode:
        return target(*values[0], **values[1])
