"""Random models, captured: the program, run on uneven pieces of a batch, gives the reference's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st

from tests import reference
from tests.examples import at_most
from tests.models import Batch, Description, build, descriptions, make_batch
from whale.capture import capture
from whale.capture.program import CapturedProgram
from whale.ir.graph import LossTerm, ModelGraph

torch.set_num_threads(1)


def piece_of(batch: Batch, num_rows: int, start: int, stop: int) -> Batch:
    """Some rows of a batch; what has no rows stays whole."""

    def shard(value: torch.Tensor) -> torch.Tensor:
        return value[start:stop] if value.shape[0] == num_rows else value

    return tuple(shard(value) for value in batch) if isinstance(batch, tuple) else {name: shard(value) for name, value in batch.items()}


def pieces_loss(graph: ModelGraph, program: CapturedProgram, batch: Batch, sizes: list[int]) -> torch.Tensor:
    """The loss, from sums and weights of the pieces."""
    totals: list[Any] = [0.0] * len(graph.loss)
    weights: list[Any] = [0.0] * len(graph.loss)
    start = 0
    for size in sizes:
        values = list(program.module()(*program.values(piece_of(batch, sum(sizes), start, start + size)).values()))
        for index, term in enumerate(graph.loss):
            totals[index] = totals[index] + values.pop(0)
            weights[index] = 1.0 if term.weight is None else weights[index] + values.pop(0)
        start += size
    parts = [term.coefficient * total / divisor(term, weight) for term, total, weight in zip(graph.loss, totals, weights, strict=True)]
    return torch.stack(parts).sum()


def divisor(term: LossTerm, weight: Any) -> torch.Tensor:
    whole = torch.as_tensor(weight, dtype=torch.float64) + term.offset
    return whole if term.minimum is None else whole.clamp(min=term.minimum)


@pytest.mark.slow
@at_most(8, suppress_health_check=list(HealthCheck))
@given(descriptions(max_devices=3), st.lists(st.integers(2, 4), min_size=2, max_size=3), st.integers(0, 99))
def test_pieces_of_captured_models_add_up(description: Description, sizes: list[int], seed: int) -> None:
    note(f"{description!r}")
    model, example, loss = build(description, seed)
    graph, program = capture(model, example, loss)
    assert graph.dynamic and all(term.exact for term in graph.loss), graph.warnings
    batch = make_batch(description, sum(sizes), seed + 1)
    found = pieces_loss(graph, program, batch, sizes)
    found.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = reference.loss_value(loss(reference.call(model, batch), batch))
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert reference.relative_error(found.detach(), expected.detach()) < 1e-12
    errors = reference.gradient_errors(gradients, wanted)
    assert max(errors.values()) < 1e-10, errors
