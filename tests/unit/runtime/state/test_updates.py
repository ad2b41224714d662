"""Buffers that forward writes move once per step, as in the plain loop, however many micro-batches there are; or are refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import whale
from tests import reference
from tests.written_models import ACTIVATIONS, BUFFERS, UNDIVIDED, build, make_batch
from whale.errors import PlanError

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

OPTIMIZER = partial(torch.optim.SGD, lr=0.05)


def compare(name: str, config: dict[str, object]) -> None:
    """Three steps, of other rows each, and their losses, gradients, weights and buffers."""
    model, example, loss = build(name, 8)
    batches = [make_batch(rows, seed) for seed, rows in enumerate((8, 9, 5))]
    expected = reference.train(copy.deepcopy(model), loss, batches, OPTIMIZER)
    engine = whale.parallelize(model, loss=loss, optimizer=OPTIMIZER, batch=example, config=config)
    losses, gradients = [], {}
    for number, batch in enumerate(batches):
        losses.append(float(engine.step(batch)))
        if number == 0:
            gradients = reference.copy_of(engine.gradients())
    found = reference.Run(losses, gradients, reference.copy_of(engine.state_dict() or {}))
    engine.close()
    error, where = reference.largest_error(found, expected)
    assert error < 1e-10, (error, where)


@pytest.mark.parametrize("name", [*BUFFERS, *ACTIVATIONS])
def test_micro_batches_write_what_the_whole_batch_does(name: str) -> None:
    compare(name, {"pipeline.num_micro_batch": 3})


@pytest.mark.parametrize("name", ["counter", "power_iteration", "average_in_place", "sums", "recurrence"])
def test_a_stage_that_is_computed_again_reads_and_writes_the_same(name: str) -> None:
    compare(name, {"pipeline.num_micro_batch": 2, "recompute.policy": "full"})


@pytest.mark.parametrize("name", [name for name in UNDIVIDED if name != "random"])
def test_an_undivided_batch_may_write_anything(name: str) -> None:
    compare(name, {})


REASONS = {
    "variance": "vector: aten.var.dim (%var) gives neither",
    "decayed_by_a_tensor": "vector: aten.add_.Tensor (%add_) gives neither",
    "divided_early": "square: aten.div.Tensor (%div) gives neither",
    "read_afterwards": "vector: it is read after it was written from rows",
    "random": "vector: it depends on random numbers",
    "rows": "square: aten.copy_.default (%copy_) gives neither",
    "counts_of_pairs": "square: aten.index_put_.default (%index_put_) gives neither",
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_what_parts_of_a_batch_cannot_make_up_is_refused(name: str) -> None:
    model, example, loss = build(name, 8)
    with pytest.raises(PlanError) as caught:
        whale.parallelize(model, loss=loss, optimizer=OPTIMIZER, batch=example, config={"pipeline.num_micro_batch": 2})
    text = "cannot be written from a batch in 2 parts: it must hold sums or means over rows"
    assert f"{text} ({REASONS[name].partition(': ')[2]})\n  at tests/written_models.py:" in str(caught.value), str(caught.value)
    assert "hint: write buffer += x.sum(0) or buffer.lerp_(x.mean(0), 0.1), or run one replica with one micro-batch" in str(caught.value)
