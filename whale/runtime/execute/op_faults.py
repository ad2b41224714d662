"""Errors of the model's ops, with the user's line: mostly a token or a label out of range.

Programs are generated modules, so torch's own traceback ends in code that the user has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import fx

from whale.errors import OpFault, WhaleError
from whale.ir.graph import ModelGraph
from whale.runtime.program.marks import op_of


@contextmanager
def named_ops(model: ModelGraph, start: int, stop: int) -> Iterator[None]:
    """Around the run of a stage's program on rows ``start:stop`` of the global batch: names an op that fails.
    Raises OpFault if an op failed, except for out-of-memory errors.
    """
    try:
        yield
    except (WhaleError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise OpFault(
                f"the GPU failed on rows {start} to {stop - 1} of the batch, or before: {str(error).splitlines()[0]}",
                hint="a GPU reports such faults late: CUDA_LAUNCH_BLOCKING=1 in the environment names the op; mostly a label or a token is "
                "out of range",
            ) from error
        op = model.by_name.get(_failing_op(error.__traceback__) or "")
        if op is None:
            raise
        raise OpFault(
            f"%{op.name} ({op.target}) failed on rows {start} to {stop - 1} of the batch: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}",
            where=op.where,
            hint="is a value of the batch out of range, such as a label or a token? An op that needs all rows at once fails on some: "
            "pipeline.num_micro_batch: 1 gathers them, and batch_dims= says which tensors of the batch have no rows",
        ) from error


def _failing_op(last: TracebackType | None) -> str | None:
    """The innermost op of a captured graph in a traceback."""
    found = None
    while last is not None:
        module = last.tb_frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and last.tb_frame.f_code is getattr(type(module).forward, "__code__", None):
            index = (module._lineno_map or {}).get(last.tb_lineno - module._prologue_start)
            nodes = list(module.graph.nodes)
            found = found if index is None or index >= len(nodes) else op_of(nodes[index]) or nodes[index].name
        last = last.tb_next
    return found
