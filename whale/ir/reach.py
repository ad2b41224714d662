"""Which parameters the loss depends on: those get a gradient, the others keep none."""

from __future__ import annotations

from whale.ir.graph import ModelGraph


def reached_parameters(model: ModelGraph) -> frozenset[str]:
    """Names of the trainable parameters that some loss term depends on through differentiable ops."""
    pending = [term.sum for term in model.loss]
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
            pending += op.inputs
            pending += _writers(model, name)
    return frozenset(found)


def _writers(model: ModelGraph, name: str) -> list[str]:
    """In-place ops that write a value after it was made: what they read reaches its readers too."""
    return [user for user in model.users[name] if "in_place" in model.by_name[user].tags and model.by_name[user].requires_grad]
