"""Steps from one sharding to another, performed by ranks: what each holds afterwards is what numpy's devices hold."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.distributed.world import World as Ranks
from tests.examples import at_most
from tests.unit.sharding.shardings import SIZES, TENSORS, run, scatter, shardings, spaces
from whale.comm import World, connect
from whale.runtime.state.perform import Whole, perform
from whale.sharding import IndexSpace, Region, Sharding, reshard

MOST_RANKS = 5


EMPTY, ALL = Region((("batch", 0, 0),)), Region((("batch", 0, 5),))


def performed(rank: int, size: int, source: Sharding, target: Sharding, space: IndexSpace, dtype: torch.dtype) -> tuple[object, bool]:
    """What a rank holds after the steps, and whether it is the very tensor that it held before."""
    world: World = connect(30.0)
    arrays = scatter(source, space, 7)
    held = torch.from_numpy(arrays[rank]).to(dtype) if rank in arrays else None
    whole = Whole("a tensor", space.shape(Region()), dtype, space)
    found = perform(reshard(source, target), whole, held, source.held.get(rank), world, torch.device("cpu"))
    return (None if found is None else found.to(torch.float64).numpy()), found is held


@given(shardings(), shardings(terms="groups"), spaces, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]))
@at_most(60)
@example(  # a rank whose term nobody adds to lets go of what it holds
    Sharding((0,), (Region(),)), Sharding((1, 0, 2), (Region(),) * 3, (0, 1, 1)), IndexSpace(TENSORS[0], SIZES), torch.float32
)
@example(  # a message that is added to another
    Sharding((0, 1, 2, 3), (EMPTY, EMPTY, ALL, ALL), (0, 1, 2, 3)),
    Sharding((0, 1), (Region(),) * 2, (0, 1)),
    IndexSpace(TENSORS[0], SIZES),
    torch.float32,
)
def test_ranks_hold_what_the_steps_say(world: Ranks, source: Sharding, target: Sharding, space: IndexSpace, dtype: torch.dtype) -> None:
    assume(max(source.mesh + target.mesh) < MOST_RANKS)
    wanted = run(reshard(source, target), source, target, space, scatter(source, space, 7))
    found = world.run(performed, source, target, space, dtype, num_ranks=MOST_RANKS)
    for device in target.mesh:
        there = found[device][0]
        if there is None:  # nobody gives it anything
            assert not wanted[device].any()
        else:
            assert np.array_equal(there, wanted[device])
            stays = source.held.get(device) == target.held[device] and source.is_final and target.is_final
            if stays and not target.held[device].is_empty:
                assert found[device][1], "what stays where it is is not copied"
