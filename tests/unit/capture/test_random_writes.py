"""Random models that write: views, slices, in place, without gradients, buffers; in parts of a batch they equal the plain loop, or say no.

Each program is run by one rank as two stages with micro-batches of unlike rows, and its gradients are those that replicas would sum.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given, reject
from hypothesis import strategies as st

import whale
from tests import reference
from tests.examples import at_most
from tests.random_writes import NEEDS_WHOLE_BATCH, STEPS, Random
from tests.written_models import make_batch, squares
from whale.capture import capture
from whale.errors import CaptureError, PlanError
from whale.ir.writes import reached_parameters

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

OPTIMIZER = partial(torch.optim.SGD, lr=0.05, weight_decay=0.1)


@at_most(10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(tuple),
    num_micro_batch=st.sampled_from((1, 2, 3)),
    chunks=st.sampled_from((1, 2)),
)
@example(names=("read", "largest"), num_micro_batch=1, chunks=1)
@example(names=("iterated", "counted_by_name"), num_micro_batch=2, chunks=2)
def test_what_is_not_refused_equals_the_plain_loop(names: tuple[str, ...], num_micro_batch: int, chunks: int) -> None:
    model = Random(names)
    batches = [make_batch(rows, seed) for seed, rows in enumerate((6, 7))]
    given_batches = copy.deepcopy(batches)
    try:
        expected = reference.train(copy.deepcopy(model), squares, copy.deepcopy(batches), OPTIMIZER)
    except RuntimeError:  # torch refuses the model: it writes what the backward pass still needs
        reject()
    config = {"pipeline.num_micro_batch": num_micro_batch}
    config |= {"pipeline.schedule": "interleaved", "pipeline.num_chunks": chunks} if chunks > 1 else {}
    try:
        graph, _ = capture(model, make_batch(6, 0), squares)
        engine = whale.parallelize(copy.deepcopy(model), loss=squares, optimizer=OPTIMIZER, batch=make_batch(6, 0), config=config)
    except CaptureError:
        assert "clamped_parameter" in names
        return
    except PlanError:
        assert num_micro_batch > 1 and NEEDS_WHOLE_BATCH & set(names)
        return
    except whale.WhaleError as error:
        assert "can be cut" in str(error) and chunks > 1
        return
    losses = [float(engine.step(batches[0]))]
    gradients = reference.copy_of(engine.gradients())
    losses.append(float(engine.step(batches[1])))
    found = reference.Run(losses, gradients, reference.copy_of(engine.state_dict() or {}))
    engine.close()
    error, where = reference.largest_error(found, expected)
    assert error < 1e-10, (error, where)
    assert reached_parameters(graph) == set(expected.gradients)
    assert all(torch.equal(a, b) for pair in zip(batches, given_batches, strict=True) for a, b in zip(*pair, strict=True))
