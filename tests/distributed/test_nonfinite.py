"""A loss that is no number is found on all ranks at once, with the ranks it comes from, before it goes into the weights."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

import whale
from tests.distributed.test_bad_batches import Scopes, captured_scopes, loss, make_batch
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import RuntimeFault


def spoil(rank: int, num_ranks: int, scopes: Scopes, num_micro_batch: int) -> tuple[str, bool, list[str]]:
    """What is said of a target that is no number, whether the weights are kept, and the warnings where such steps are left out."""
    made = captured_scopes(scopes)
    bad = make_batch(8)
    bad["target"][7] = torch.nan

    def engine_of(**config: Any) -> whale.Engine:
        return whale.parallelize(
            made.model,
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=made.batch,
            config={"pipeline": {"num_micro_batch": num_micro_batch}, **config},
            cluster=make_cluster((1.0, 1.0)),
        )

    engine = engine_of()
    engine.step(make_batch(8))
    before = engine.state_dict() or {}
    with pytest.raises(RuntimeFault) as caught:
        engine.step(bad)
    after = engine.state_dict() or {}
    is_kept = all(torch.equal(value, after[name]) for name, value in before.items())
    engine.step(make_batch(8))
    engine.close()
    lenient = engine_of(**{"gradient": {"skip_nonfinite": True}})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in (make_batch(8), bad, make_batch(8)):
            lenient.step(batch)
    both = lenient.state_dict() or {}
    expected = engine.state_dict() or {}
    is_kept &= all(torch.equal(value, expected[name]) for name, value in both.items())
    lenient.close()
    return caught.value.message, is_kept, [str(warning.message) for warning in told]


@pytest.mark.parametrize(("scopes", "num_micro_batch"), [("two stages", 2), ("none", 1), ("split", 2)])
def test_the_ranks_are_named(world: World, scopes: Scopes, num_micro_batch: int) -> None:
    who = "0" if scopes == "split" else "1"  # of a split group one rank counts the loss
    for rank, (said, is_kept, told) in enumerate(world.run(spoil, scopes, num_micro_batch, num_ranks=2)):
        assert said == f"the loss is nan at step 2 on rank {who}; the update was not applied"
        assert is_kept
        assert told == ([f"step 2 is skipped: its loss is nan on rank {who}, its gradient norm nan"] if rank == 0 else [])
