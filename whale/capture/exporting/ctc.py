"""The CTC loss in a capture: torch has no shapes for it without values, and its result has one number per row whatever they are.

F.ctc_loss(log_probs, targets, frames, lengths)   ->   whale_capture::ctc_loss(...) [n], then the mean over the rows     traced
                                                       aten.ctc_loss.Tensor(..., reduction=none)                       captured
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_library = torch.library.Library("whale_capture", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity) -> Tensor"
)
LOSS_PER_ROW = torch.ops.whale_capture.ctc_loss.default
"""Stands for the loss of each row while a model is traced."""

_NONE = 0
_SIGNATURE = inspect.signature(F.ctc_loss)
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@torch.library.register_fake("whale_capture::ctc_loss", lib=_library)  # type: ignore[untyped-decorator]
def _traced(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


class CtcLosses(TorchFunctionMode):
    """Writes the CTC loss of a batch as that of each row, reduced as torch reduces it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.ctc_loss, torch.ctc_loss):
            return func(*args, **(kwargs or {}))
        given = _SIGNATURE.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        log_probs, targets, frames, lengths, blank, reduction, zero_infinity = given.args
        if log_probs.dim() != 3:
            log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        frames, lengths = (each if isinstance(each, Tensor) else torch.tensor(each) for each in (frames, lengths))
        each = LOSS_PER_ROW(log_probs, targets, frames.reshape(-1), lengths.reshape(-1), blank, zero_infinity)
        reduction = _REDUCTIONS.get(reduction, reduction)
        if reduction == "none":
            return each if given.args[0].dim() == 3 else each.squeeze(0)
        return each.sum() if reduction == "sum" else (each / lengths.reshape(-1).clamp_min(1).to(each.dtype)).mean()


def write_loss(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Torch's own operator in the place of what stood for it."""
    *tensors, blank, zero_infinity = args
    return graph.create_node("call_function", torch.ops.aten.ctc_loss.Tensor, (*tensors, blank, _NONE, zero_infinity), {}, node.name)
