"""Running statistics that every replica kept of its own rows, merged into one: averages weighted by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from whale.comm import Groups
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan


def row_shares(plan: Plan) -> dict[int, dict[str, float]]:
    """Per rank of the plan and buffer it holds, the share of the global batch that it saw."""
    total = sum(replica.share for replica in plan.replicas)
    found: dict[int, dict[str, float]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            for position, device in enumerate(stage.virtual_device.devices):
                part = replica.share / total * stage.shares[position // stage.split] / sum(stage.shares)
                for name in stage.parameters:
                    found.setdefault(plan.rank_of[device], {})[name] = part
    return found


def merge_buffers(
    plan: Plan,
    rank: int | None,
    model: ModelGraph,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    groups: Groups,
    everyone: tuple[int, ...],
    device: torch.device,
) -> None:
    """Replaces each buffer by its average over the ranks that hold it; every rank of the world takes part.

    Args:
        plan: who holds what.
        rank: this rank of the plan; None if idle.
        model: shapes of the buffers.
        tensors: what this rank owns.
        names: buffers to merge, the same on every rank. Counters take part: they are equal wherever they are held.
        groups: holds the group of all ranks.
        everyone: all ranks of the world.
        device: where this rank computes.
    """
    if len(everyone) == 1 or not names:
        return
    shares = {} if rank is None else row_shares(plan).get(rank, {})
    parts: list[torch.Tensor] = []
    for name in names:
        share = shares.get(name, 0.0) if name in tensors else 0.0
        shape = model.parameter_by_name[name].spec.shape
        held = tensors[name].detach().double().to(device) if share else torch.zeros(shape, dtype=torch.float64, device=device)
        parts += [held.reshape(-1) * share, torch.tensor([share], dtype=torch.float64, device=device)]
    flat = torch.cat(parts)
    work = groups.all_reduce(flat, everyone)
    if work is not None:
        work.wait()
    offset = 0
    for name in names:
        count = model.parameter_by_name[name].spec.num_elements
        merged = flat[offset : offset + count] / flat[offset + count]
        offset += count + 1
        if name in tensors:
            target = tensors[name]
            rounded = merged if target.is_floating_point() else merged.round()
            target.detach().copy_(rounded.reshape(target.shape).to(target.dtype))
