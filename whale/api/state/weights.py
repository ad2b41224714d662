"""Initial weights that all ranks agree on: a model with real tensors keeps them, a meta model is filled from the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from whale.comm import Groups, World, together
from whale.errors import first_few, warn
from whale.runtime.weights.checksums import checksums
from whale.runtime.weights.initialize import initial_tensors


def agree_on_weights(
    model: nn.Module,
    users: Mapping[str, torch.Tensor],
    owned: Sequence[str],
    holders: Mapping[str, tuple[int, ...]],
    world: World,
    seed: int,
    initialize: Callable[[nn.Module], None] | None,
    shard: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors that this rank owns, or its parts of them, equal on all their owners.

    Args:
        model: the user's model.
        users: its own tensors, by canonical name.
        owned: names of what this rank owns.
        holders: per name, the world ranks that own it.
        world: this process among its peers.
        seed: for a meta model.
        initialize: the user's own filling of a module.
        shard: the part of a whole tensor that this rank holds, by name.
    """
    tensors = together(world, lambda: initial_tensors(model, owned, seed=seed, initialize=initialize, device=world.device, shard=shard))
    if not world.is_alone:
        real = {name for name, tensor in users.items() if not tensor.is_meta and name in holders}
        _take_from_rank_0(tensors, {name: users[name].detach() for name in real}, holders, world, shard)
    return tensors


def _take_from_rank_0(
    tensors: Mapping[str, torch.Tensor],
    real: Mapping[str, torch.Tensor],
    holders: Mapping[str, tuple[int, ...]],
    world: World,
    shard: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Where ranks built the model with other weights than rank 0, rank 0's are sent, whole and one at a time, with one warning."""
    sums = world.gather_objects(checksums(real if world.rank == 0 else {name: real[name] for name in tensors if name in real}))
    reference = sums[0]
    assert isinstance(reference, Mapping)
    differing: dict[str, tuple[int, ...]] = {}
    for name in sorted(real):
        odd = [rank for rank in holders[name] if rank != 0 and _entry(sums[rank], name) != reference[name]]
        if odd:
            differing[name] = tuple(sorted({0, *odd}))
    if not differing:
        return
    if world.rank == 0:
        warn(f"ranks built the model with different weights ({first_few(list(differing))}); rank 0's are taken")
    groups = Groups(world, differing.values())
    for name, ranks in differing.items():
        if world.rank in ranks:
            own = real[name]
            value = own.to(world.device).contiguous() if world.rank == 0 else torch.empty(own.shape, dtype=own.dtype, device=world.device)
            with world.speaking(f"taking {name} from rank 0"):
                dist.broadcast(value, src=0, group=groups[ranks])
            if world.rank != 0:
                tensors[name].detach().copy_(shard(name, value))
    groups.close()


def _entry(sums: object, name: str) -> object:
    assert isinstance(sums, Mapping)
    return sums[name]
