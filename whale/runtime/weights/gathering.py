"""Whole tensors to and from the parts that ranks hold: state dicts gathered and loaded, and the rows of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from whale.comm import World, flat_bytes, rounded, together
from whale.errors import CheckpointError, PlanError, WhaleError, raise_faults, warn
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH, BatchAxis, Plan
from whale.ir.precision import HALF
from whale.ir.writes import Reads
from whale.runtime.execute.batch import combined, digests
from whale.runtime.program.shard.pieces import as_index, part, write_part
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.perform import Whole, perform
from whale.sharding import Region, Sharding, reshard
from whale.sharding.crossings import row_space
from whale.sharding.index_sets import count
from whale.units import listed


def gather_tensors(
    model: ModelGraph,  # shapes and types
    holdings: Holdings,
    tensors: Mapping[str, torch.Tensor],  # what this rank keeps
    world_ranks: Sequence[int],  # per rank of the plan, the rank in the world
    world: World,
    *,
    only: int | None,  # the world rank that gets them; None for every rank
) -> dict[str, torch.Tensor] | None:
    """Copies of all parameters and buffers, whole, in host memory: they may not fit on a device.

    Returns:
        Tensors by name; None on ranks that get nothing.
    """
    found: dict[str, torch.Tensor] = {}
    takers = tuple(range(world.size)) if only is None else (only,)
    for name in holdings.shardings.parameters:
        whole, source = holdings.whole(model, name), holdings.shardings.kept(name)
        value = _brought(whole, source.renumbered(world_ranks), tensors.get(name), world, takers, torch.device("cpu"))
        if value is not None:
            found[name] = value
    return found if world.rank in takers else None


def _brought(
    whole: Whole, source: Sharding, tensor: torch.Tensor | None, world: World, takers: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """A copy of a whole tensor on a device of each world rank in `takers`; None on the others."""
    held = None if tensor is None else tensor.detach()
    value = perform(reshard(source, Sharding.whole(takers)), whole, held, source.held.get(world.rank), world, device)
    if world.rank not in takers:
        return None
    assert value is not None, "everybody who takes the whole holds it afterwards"
    return value.to(device, copy=True) if value is held else value


def lend_tensors(
    model: ModelGraph,
    holdings: Holdings,
    tensors: Mapping[str, torch.Tensor],  # what this rank keeps
    world_ranks: Sequence[int],
    world: World,
    borrowers: Mapping[str, Sequence[int]],  # per name, the ranks of the plan that borrow it
    lent: Mapping[str, torch.Tensor],  # the copies on this rank, which are overwritten
) -> None:
    """Copies whole parameters and buffers to ranks that compute with them without holding them. A collective of the world."""
    for name, ranks in borrowers.items():
        takers = [world_ranks[each] for each in ranks]
        whole, source = holdings.whole(model, name), holdings.shardings.kept(name)
        value = _brought(whole, source.renumbered(world_ranks), tensors.get(name), world, takers, world.device)
        if value is not None:
            lent[name].copy_(value)


Piece = tuple[str, int, int, torch.Tensor]
"""(output, first and last global row, this rank's part of it)."""


def own_outputs(
    model: ModelGraph,
    axes: Mapping[str, BatchAxis],
    plan: Plan,
    world_ranks: Sequence[int],
    world: World,
    pieces: Sequence[Piece],
    num_rows: int,
    half_type: str | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The graph's outputs for some rows on each rank: those of which it computes the last output with rows.

    Rows of it that another rank computes, and outputs without rows, are gathered.

    Returns:
        The outputs, and the numbers of their rows in the global batch: int64, on the same device.

    Raises:
        PlanError: as `gather_outputs`.
    """
    owners = {name: _owners(plan, world_ranks, name, num_rows) for name in model.outputs if axes.get(name) is not None}
    takers = next(reversed(owners.values()), [])
    intervals = sorted((start, stop) for rank, start, stop in takers if rank == world.rank)
    others = tuple(name for name in model.outputs if owners.get(name) != takers)
    brought = gather_outputs(replace(model, outputs=others), axes, plan, world_ranks, world, pieces, num_rows, half_type)
    found = dict(zip(others, brought, strict=True))
    mine = {(name, start): value for name, start, _, value in pieces}
    for name in owners:
        spec, axis = model.by_name[name].outputs[0], axes[name]
        own = [mine[name, start] for start, _ in intervals] if name not in found else [found[name]]
        parts = [value.reshape(*value.shape[: axis.dim], axis.outer, -1, axis.inner, *value.shape[axis.dim + 1 :]) for value in own]
        if name in found:
            parts = [parts[0].narrow(axis.dim + 1, start, stop - start) for start, stop in intervals]
        none = torch.empty(spec.shape_at(0), dtype=_types(plan, spec.dtype, half_type)[1], device=world.device)
        found[name] = torch.cat(parts, axis.dim + 1).flatten(axis.dim, axis.dim + 2) if parts else none
    numbers = [torch.arange(start, stop, device=world.device) for start, stop in intervals]
    return [found[name] for name in model.outputs], torch.cat([torch.arange(0, device=world.device), *numbers])


def gather_outputs(
    model: ModelGraph,  # the captured model, with its `outputs`
    axes: Mapping[str, BatchAxis],  # where the batch is in each of them
    plan: Plan,  # which rank computes which rows of which output
    world_ranks: Sequence[int],  # per rank of the plan, the rank in the world
    world: World,
    pieces: Sequence[Piece],  # what this rank computed
    num_rows: int,  # of the global batch
    half_type: str | None = None,  # of this rank's programs, where devices have their own
) -> list[torch.Tensor]:
    """The graph's outputs for the whole batch, on every rank: of a half-precision type that devices choose, in the rank's own.

    An output without rows that depends on them (a mean, say) is that of the first piece, and rank 0 warns.
    Raises PlanError if an output has rows but no known batch axis, and was computed in several pieces.
    """
    mine = {(name, start): value for name, start, _, value in pieces}
    results = []
    for name in model.outputs:
        owners = _owners(plan, world_ranks, name, num_rows)
        axis = axes.get(name)
        spec = model.by_name[name].outputs[0]
        if axis is None:
            _check_whole(model, name, len(owners))
            owners = owners[:1]
            if depends_on_rows(model, name):
                results.append(_of_one_piece(model, name, plan, world_ranks, world, mine, num_rows, half_type))
                continue
        sent, own = _types(plan, spec.dtype, half_type)
        space = row_space(spec, axis, num_rows)
        whole = torch.empty(space.shape(Region()), dtype=sent, device=world.device)
        for rank, start, stop in owners:
            places = space.positions(Region(((BATCH, start, stop),)))
            piece = whole.new_empty(tuple(map(count, places)))
            _share(piece, mine.get((name, start)), rank, world)
            write_part(whole, tuple(map(as_index, places)), piece)
        results.append(rounded(whole, own))
    return results


def _types(plan: Plan, dtype: str, half_type: str | None) -> tuple[torch.dtype, torch.dtype]:
    """The types in which an output travels, and in which this rank returns it."""
    if dtype != HALF or half_type is None:
        return getattr(torch, dtype), getattr(torch, dtype)
    ranks = range(len(plan.devices))
    return torch.float32 if plan.are_unlike(ranks) else getattr(torch, plan.half_types[0]), getattr(torch, half_type)


def _of_one_piece(
    model: ModelGraph,
    name: str,
    plan: Plan,
    world_ranks: Sequence[int],
    world: World,
    mine: Mapping[tuple[str, int], torch.Tensor],
    num_rows: int,
    half_type: str | None,
) -> torch.Tensor:
    """An output without a batch axis that depends on rows, of the first piece; its sizes may depend on them, too."""
    owners = _owners(plan, world_ranks, name, num_rows)
    rank, start, _ = owners[0]
    if len(owners) > 1 and world.rank == 0:
        _warn_of_one_piece(model.by_name[name], owners)
    own = mine.get((name, start)) if rank == world.rank else None
    shape = world.gather_objects(None if own is None else tuple(own.shape))[rank]
    assert isinstance(shape, tuple), "its holder has it"
    sent, returned = _types(plan, model.by_name[name].outputs[0].dtype, half_type)
    piece = torch.empty(shape, dtype=sent, device=world.device)
    _share(piece, own, rank, world)
    return rounded(piece, returned)


def _check_whole(model: ModelGraph, name: str, num_pieces: int) -> None:
    op = model.by_name[name]
    if num_pieces > 1 and op.outputs[0].has_rows:
        raise PlanError(
            f"output %{name} ({op.outputs[0]}) is computed in {num_pieces} pieces, but does not have one batch axis",
            where=op.where,
            hint="predict with a plan of one replica and one micro-batch, or return a tensor whose dimension 0 is the batch",
        )


def depends_on_rows(model: ModelGraph, name: str) -> bool:
    """Whether an op reads, directly or not, an input with rows."""
    read = (model.by_name[source] for source in Reads(model).ancestors([name]))
    return any(op.kind == "input" and ("reads_rows" in op.tags or any(spec.has_rows for spec in op.outputs)) for op in read)


def _warn_of_one_piece(op: Op, owners: Sequence[tuple[int, int, int]]) -> None:
    _, start, stop = owners[0]
    warn(
        f"an output without rows is computed from rows {start} to {stop - 1} only, the first of {len(owners)} pieces of the batch "
        f"(%{op.name} at {op.where}); return one value per row, or predict with one replica and one micro-batch"
    )


def _owners(plan: Plan, world_ranks: Sequence[int], name: str, num_rows: int) -> list[tuple[int, int, int]]:
    """World rank, first and last global row of every piece of an output."""
    found = []
    for replica in plan.replicas:
        stage = next(stage for stage in replica.stages if name in stage.ops)
        for start, stop in plan.micro_batch_rows(replica.index, num_rows):
            held = zip(stage.virtual_device.devices, stage.row_intervals(stop - start, start), strict=True)
            for device, (low, high) in list(held)[:: stage.split]:
                found.append((world_ranks[plan.rank_of[device]], low, high))
    return found


def _share(piece: torch.Tensor, mine: torch.Tensor | None, holder: int, world: World) -> None:
    """Broadcasts a piece from its holder."""
    if holder == world.rank:
        assert mine is not None
        piece.copy_(mine)
    if not world.is_alone:
        with world.speaking("gathering predictions"):
            dist.broadcast(flat_bytes(piece), src=holder)


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
    Raises CheckpointError if keys are missing or unknown, shapes or tied values differ, or ranks have different state dicts.
    """
    together(world, lambda: _check(model, given, keys))
    odd = _unlike_rank_0(combined(digests({key: given[key] for key in sorted(given)})), world)
    if odd:
        raise CheckpointError(
            f"ranks load different state dicts ({listed('rank', odd)} differs from rank 0)",
            hint="read the same file on every rank, or send it from rank 0",
        )
    with torch.no_grad():
        for name, key in {keys[key]: key for key in given}.items():
            if rank is not None and name in state.tensors:
                own = holdings.cut_out(name, rank, given[key])
                if state.tensors[name].untyped_storage().nbytes():  # else it is gathered when ops read it
                    state.tensors[name].copy_(own)
                if name in state.kept and state.kept[name] is not state.tensors[name]:
                    index = holdings.kept_index(name, rank)
                    state.kept[name].copy_(own if index is None else part(own, index))


def _check(model: ModelGraph, given: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    first: dict[str, str] = {}  # the key of each tensor that is there; of tied ones one name is enough
    for key, name in keys.items():
        if key in given:
            first.setdefault(name, key)
    _check_prefix(given, keys)
    faults: list[WhaleError] = [CheckpointError(f"the state dict lacks {key}") for key, name in keys.items() if name not in first]
    faults += [CheckpointError(f"the state dict has {key}, which the model does not have") for key in given if key not in keys]
    for key, name in keys.items():
        if key not in given:
            continue
        here, value, one = model.parameter_by_name[name].spec.shape, given[key], given[first[name]]
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            faults.append(
                CheckpointError(f"{key} of the state dict is a {kind}, not a tensor", hint="torch.from_numpy makes one of an array")
            )
        elif tuple(value.shape) != here:
            faults.append(CheckpointError(f"{key} of the state dict has shape {list(value.shape)}, {list(here)} in the model"))
        elif isinstance(one, torch.Tensor) and one.shape == value.shape and (at := _difference(one, value)) is not None:
            both = f"{one[at].item()} and {value[at].item()} at {list(at)}"
            what = f"{first[name]} and {key} are one tensor in the model, but differ in the state dict ({both})"
            faults.append(CheckpointError(what, hint="leave out the one that is not meant: one name is enough"))
    raise_faults(faults)


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[int, ...] | None:
    """The first position at which two tensors of one shape differ; NaN equals NaN."""
    if one is other or (one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.stride() == other.stride()):
        return None
    other = other.to(one.device)
    found = ((one != other) & ~((one != one) & (other != other))).nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def _check_prefix(given: Mapping[str, torch.Tensor], keys: Mapping[str, str]) -> None:
    """One error for all keys where a wrapper (``module.``, ``_orig_mod.``) has put something into each that the model does not have."""
    unknown = [key for key in given if key not in keys]
    parts = unknown[0].split(".") if unknown else []
    added = (".".join(parts[first:last]) + "." for first in range(len(parts)) for last in range(first + 1, len(parts)))
    for text in added:
        if all(key.replace(text, "", 1) in keys for key in unknown):
            other = unknown[0].replace(text, "", 1)
            raise CheckpointError(
                f"{len(unknown)} keys of the state dict have {text!r} in them, the model's do not ({unknown[0]}; in the model {other})",
                hint=f"a wrapper adds it: load {{key.replace({text!r}, '', 1): value for key, value in state.items()}}",
            )


def _unlike_rank_0(digest: int, world: World) -> list[int]:
    found = world.gather_objects(digest)
    return [rank for rank, other in enumerate(found) if other != found[0]]
