"""Loads a state dict of whole tensors into the parts that a rank holds, under any plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from whale.comm import World, together
from whale.errors import CheckpointError, WhaleError, raise_faults
from whale.ir.graph import ModelGraph
from whale.runtime.execute.batch import combined, digests
from whale.runtime.program.shard.pieces import part
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.units import listed


def fill_tensors(
    model: ModelGraph,  # names and shapes
    holdings: Holdings,
    rank: int | None,  # this rank of the plan; None if idle
    state: EngineState,  # of this rank
    given: Mapping[str, torch.Tensor],  # the state dict, equal on every rank
    keys: Mapping[str, str],  # that it must have, with the canonical name of each
    world: World,
) -> None:
    """Copies a state dict into the tensors of this rank; on an error nothing has changed.
    Raises CheckpointError if keys are missing or unknown, shapes differ, or ranks have different state dicts.
    """
    together(world, lambda: _check(model, given, keys))
    odd = _unlike_rank_0(combined(digests({key: given[key] for key in sorted(keys)})), world)
    if odd:
        raise CheckpointError(
            f"ranks load different state dicts ({listed('rank', odd)} differs from rank 0)",
            hint="read the same file on every rank, or send it from rank 0",
        )
    with torch.no_grad():
        for key, name in keys.items():
            if rank is not None and name in state.tensors:
                own = holdings.cut_out(name, rank, given[key])
                if state.tensors[name].untyped_storage().nbytes():  # else it is gathered when ops read it
                    state.tensors[name].copy_(own)
                if name in state.kept and state.kept[name] is not state.tensors[name]:
                    index = holdings.kept_index(name, rank)
                    state.kept[name].copy_(own if index is None else part(own, index))


def _check(model: ModelGraph, given: Mapping[str, torch.Tensor], keys: Mapping[str, str]) -> None:
    faults: list[WhaleError] = [CheckpointError(f"the state dict lacks {key}") for key in keys if key not in given]
    faults += [CheckpointError(f"the state dict has {key}, which the model does not have") for key in given if key not in keys]
    for key, name in keys.items():
        here = model.parameter_by_name[name].spec.shape
        if key in given and tuple(given[key].shape) != here:
            faults.append(CheckpointError(f"{key} of the state dict has shape {list(given[key].shape)}, {list(here)} in the model"))
    raise_faults(faults)


def _unlike_rank_0(digest: int, world: World) -> list[int]:
    found = world.gather_objects(digest)
    return [rank for rank, other in enumerate(found) if other != found[0]]
