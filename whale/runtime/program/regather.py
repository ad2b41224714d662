"""The pass that saves only the own part of gathered activations; backward passes gather the whole again.

    part --> collect --> whole --> linear          forward: linear saves the part instead of the whole
    part --> all-gather --> whole                  backward: once for all that saved it, then dropped

Recomputed ops save only their inputs anyway, so theirs are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whale.ir.graph import ModelGraph
from whale.ir.writes import MemoryWrites
from whale.runtime.program.marks import op_of
from whale.runtime.program.offload import SavedStorage, SavedView, unpack
from whale.runtime.program.shard.collectives import all_gather
from whale.runtime.program.shard.communication import collect, enter, gather
from whale.runtime.program.shard.group import Group
from whale.runtime.program.shard.slots import Slots


class RegatheredWhole(SavedStorage):
    """A gathered tensor of which this device saves its part, which is not written to later; `slots` give the places of all parts."""

    def __init__(self, value: Tensor, part: Tensor, slots: Slots, group: Group, what: str) -> None:
        super().__init__(value)
        self._part = part.detach()
        self._gather = partial(all_gather, slots=slots, group=group, what=what)

    def restore(self) -> Tensor:
        return self._gather(self._part).wait()


class KeepingParts:
    """An op that saves parts instead of gathered tensors; fx needs its ``__name__``."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self._operation = operation
        self.__name__ = "keeping_parts"

    def __call__(self, wholes: Sequence[RegatheredWhole], *args: Any, **kwargs: Any) -> Any:
        def pack(value: Tensor) -> Tensor | SavedView:
            return next((whole.save(value) for whole in wholes if whole.holds(value)), value)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self._operation(*args, **kwargs)


def keep_parts(graph: fx.Graph, model: ModelGraph, ops: Collection[str], again: Collection[str]) -> None:
    """Rewrites a stage's graph so that gathered activations are saved in parts, except those written in place later.

    Args:
        graph: of the stage, cut, its nodes marked with their op's name; changed in place.
        again: those that are recomputed.
    """
    writes = MemoryWrites(model, ops)
    for node in list(graph.nodes):
        if node.target not in (gather, collect):
            continue
        value, *how = node.args
        name = op_of(value) or value.name
        if model.by_name[name].kind != "call" or writes.is_written_later(name):
            continue
        users = [user for user in _users(node, model) if op_of(user) not in again]
        if users:
            with graph.inserting_after(node):
                whole = graph.call_function(RegatheredWhole, (node, value, *how))
            for user in users:
                _wrap(user, whole)


def _users(node: fx.Node, model: ModelGraph) -> list[fx.Node]:
    """The ops that read a node, or a view of it."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            op = model.by_name.get(op_of(user) or "")
            if user.target is enter or (op is not None and "view" in op.tags):
                pending.append(user)
            elif op is not None:
                found[user] = None
    return list(found)


def _wrap(user: fx.Node, whole: fx.Node) -> None:
    if isinstance(user.target, KeepingParts):
        wholes, *rest = user.args
        assert isinstance(wholes, tuple)
        user.args = ((*wholes, whole), *rest)
    else:
        assert callable(user.target)
        user.args = ((whole,), *user.args)
        user.target = KeepingParts(user.target)
