"""Which parameters the loss depends on: those get a gradient, the others keep none."""

from __future__ import annotations

from whale.ir.graph import ModelGraph
from whale.ir.writes import Reads


def reached_parameters(model: ModelGraph) -> frozenset[str]:
    """Names of the trainable parameters that some loss term depends on through differentiable ops."""
    reads = Reads(model, differentiable=True)
    pending = [name for term in model.loss for name in reads.at_end(term.sum)]
    seen: set[str] = set()
    found: set[str] = set()
    while pending:
        name = pending.pop()
        op = model.by_name[name]
        if name in seen:
            continue
        seen.add(name)
        if op.kind == "parameter" and model.parameter_by_name[op.target].trainable:
            found.add(model.parameter_by_name[op.target].name)
        elif op.kind == "call" and op.requires_grad:
            pending += reads.of(name)
    return frozenset(found)
