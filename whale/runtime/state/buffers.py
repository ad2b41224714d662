"""Running statistics that every replica kept of its own rows, merged into one: averages weighted by rows, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from whale.ir.graph import ModelGraph
from whale.runtime.program.shard.pieces import Index, part, write_part
from whale.runtime.state.holdings import Holdings


def row_shares(holdings: Holdings, rank: int, names: Iterable[str]) -> dict[str, float]:
    """Per buffer, the share of the global batch that a rank of the plan speaks for, 0 where it has not got it.

    Devices of a split group that hold a buffer whole saw the same rows, and share them; those that hold parts each speak for theirs.
    """
    plan, found = holdings.plan, dict.fromkeys(names, 0.0)
    device = plan.devices[rank]
    total = sum(replica.share for replica in plan.replicas)
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                group = stage.virtual_device.devices.index(device) // stage.split
                share = replica.share / total * stage.shares[group] / sum(stage.shares)
                for name in found.keys() & set(stage.parameters):
                    is_sharded = holdings.index(name, holdings.held(name, rank)) is not None
                    found[name] = share if is_sharded else share / stage.split
    return found


def merge_buffers(
    holdings: Holdings,
    rank: int | None,
    model: ModelGraph,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    add: Callable[[torch.Tensor, str], None],
    device: torch.device,
) -> None:
    """Replaces each buffer by its average over the ranks that hold it; every rank of the world takes part.

    Args:
        holdings: who holds which part of what.
        rank: this rank of the plan; None if idle.
        model: shapes of the buffers.
        tensors: what this rank holds.
        names: buffers to merge, the same on every rank.
        add: sums a tensor over all ranks, in place; says what for while it waits.
        device: where this rank computes.
    """
    if len(holdings.plan.devices) == 1 or not names:
        return
    shares = {} if rank is None else row_shares(holdings, rank, names)
    indices = {name: None if rank is None else holdings.index(name, holdings.held(name, rank)) for name in names if name in tensors}
    shapes = {name: model.parameter_by_name[name].spec.shape for name in names}
    parts: list[torch.Tensor] = []
    for name in names:
        sums, weights = torch.zeros((2, *shapes[name]), dtype=torch.float64, device=device)
        if share := shares.get(name, 0.0) if name in tensors else 0.0:
            held = tensors[name].detach().double().to(device)
            write_held(sums, indices[name], held * share)
            write_held(weights, indices[name], torch.full_like(held, share))
        parts += [sums.reshape(-1), weights.reshape(-1)]
    flat = torch.cat(parts)
    add(flat, "merging running statistics")
    offset = 0
    for name in names:
        count = model.parameter_by_name[name].spec.num_elements
        merged = (flat[offset : offset + count] / flat[offset + count : offset + 2 * count]).reshape(shapes[name])
        offset += 2 * count
        if name in tensors:
            index, target = indices[name], tensors[name]
            target.detach().copy_((merged if index is None else part(merged, index)).to(target.dtype))


def write_held(whole: torch.Tensor, index: tuple[Index, ...] | None, held: torch.Tensor) -> None:
    """Writes what a rank holds into its place in the whole; None for all of it."""
    if index is None:
        whole.copy_(held)
    else:
        write_part(whole, index, held)
