"""What a checkpoint holds, and how any plan's ranks read from it what they hold; each element was written once.

    key                            value
    model.{name}                   a parameter or buffer
    optimizer.{name}.{key}         an entry of the optimizer's state for a parameter
    options.{rank}                 hyperparameters of the parameters that a rank wrote
    extra.{key}                    plain data that all ranks share; read_as: the model's types of parameters that are kept in others
    rank.{rank}.{key}              plain data of one rank

A tensor that is cut over ranks is one entry too, of the whole shape, in chunks that its holders write: a checkpoint does not show the
plan that wrote it, and no rank needs more of a tensor than it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale.comm import World, together
from whale.errors import CheckpointError, first_few
from whale.ir.graph import TensorSpec
from whale.ir.serialization import read_value
from whale.runtime.checkpoint.boxes import Box, Share, boxes
from whale.runtime.checkpoint.contents import Contents, Index, StoredTensor, index_faults, open_contents
from whale.runtime.checkpoint.files import INDEX, check_complete, sizes_of, standing
from whale.runtime.state.optimizer_state import OptimizerState
from whale.units import counted

MODEL = "model."
"""Begins the keys of parameters and buffers."""

READ_AS = "read_as"
"""The key of the model's types, of parameters that are stepped, and written, in another."""

MOST_DIFFERENCES = 10
"""Of a checkpoint of another model, in one message."""


@dataclass(frozen=True)
class Extras:
    """Plain data in a checkpoint."""

    shared: Mapping[str, Any] = field(default_factory=dict)  # equal on the ranks that give it; the lowest of them writes it
    own: Mapping[str, Any] = field(default_factory=dict)  # this rank's; read back by the rank of the same number


def load(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    world: World,
    shares: Mapping[str, Share] | None = None,
    ties: Mapping[str, str] | None = None,
    may_lack: Collection[str] = (),
    check: Callable[[OptimizerState, Extras], None] | None = None,
    opened: Contents | None = None,
) -> tuple[OptimizerState, Extras]:
    """Reads a checkpoint, whatever plan wrote it; all ranks of the world call it together.

    The tensors are filled last, once every rank has found everything right; so they are read twice.

    Args:
        path: the folder.
        tensors: the parameters and buffers that this rank owns, by name; filled in place.
        specs: of all parameters and buffers of the model, whole, by name; the same on all ranks.
        world: this process among its peers.
        shares: of the tensors that this rank holds only a part of, by name, where the part lies.
        ties: other names of the model's tensors, and the first name of each.
        may_lack: tensors that a checkpoint of weights alone may lack; they stay as they are.
        check: raises where other data does not fit this rank; then nothing has changed, on any rank.
        opened: what is read in place of the folder.

    Returns:
        The optimizer state of this rank's parameters, and the plain data.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model, or not the one that other ranks read; the same type on all ranks.
    """
    shares = shares or {}

    def read_rest() -> tuple[Contents, OptimizerState, Extras]:
        contents = _under_first_names(path, opened or open_checkpoint(path), ties or {})
        try:
            _check_model(path, contents, specs, () if contents.plain else may_lack)
            kept, extras = _rest(contents, tensors, world.rank, shares)
            if check is not None:
                check(kept, extras)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path} has data of another form than a save writes ({type(error).__name__}: {error})") from error
        for name in tensors:
            for _ in _overlaps(contents, f"{MODEL}{name}", shares.get(name)):
                pass
        return contents, kept, extras

    def fill() -> None:
        for name, tensor in tensors.items():
            _fill(contents, f"{MODEL}{name}", shares.get(name), tensor.detach())

    contents, kept, extras = together(world, read_rest)
    _check_one(path, contents, world)
    together(world, fill)
    return kept, extras


def open_checkpoint(path: Path) -> Contents:
    """Opens a complete checkpoint.

    Raises:
        CheckpointError: it is not complete, or its index is not as it was written.
    """
    path = standing(path)
    check_complete(path)
    try:
        index, sizes = read_value(Index, path / INDEX), sizes_of(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {error}") from error
    if found := index_faults(index, sizes):
        raise CheckpointError(
            f"{path / INDEX} is not as a save wrote it ({counted(len(found), 'fault')}): {first_few(found, MOST_DIFFERENCES)}",
            hint="it was changed after it was written: take a copy of it, or another checkpoint",
        )
    return open_contents(path, index)


def damage(path: Path) -> str | None:
    """Reads all of a checkpoint; what is wrong with it, whoever loads it."""
    try:
        contents = open_checkpoint(path)
        for stored in contents.tensors.values():
            for piece in stored.pieces:
                contents.read(stored, piece)
    except CheckpointError as error:
        return error.message
    return None


def _rest(contents: Contents, tensors: Mapping[str, Tensor], rank: int, shares: Mapping[str, Share]) -> tuple[OptimizerState, Extras]:
    """What a rank reads besides its tensors."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key in (*contents.tensors, *contents.plain):
        section, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if section == "optimizer" and name in tensors:
            value = read_tensor(contents, key, shares.get(name)) if key in contents.tensors else contents.value(key)
            if key in contents.tensors and contents.tensors[key].dtype == contents.tensors[f"{MODEL}{name}"].dtype:
                value = value.to(tensors[name].dtype)  # it goes with the parameter
            state.setdefault(name, {})[entry] = value
        elif section == "options":
            options.update({name: group for name, group in contents.value(key).items() if name in tensors})
        elif section == "extra":
            shared[rest] = contents.value(key)
        elif section == "rank" and rest.partition(".")[0] == str(rank):
            own[rest.partition(".")[2]] = contents.value(key)
    return OptimizerState(state, options), Extras(shared, own)


def read_tensor(contents: Contents, key: str, share: Share | None = None) -> Tensor:
    """A tensor, or a rank's part of it where it is cut like the parameter that it belongs to."""
    stored = contents.tensors[key]
    share = share if share is not None and share.shape == stored.shape else None
    room = torch.empty(stored.shape if share is None else share.local_shape, dtype=getattr(torch, stored.dtype))
    _fill(contents, key, share, room)
    return room


def _fill(contents: Contents, key: str, share: Share | None, target: Tensor) -> None:
    for box, local, piece in _overlaps(contents, key, share):
        local.of(target).copy_(box.of(piece))


def _overlaps(contents: Contents, key: str, share: Share | None) -> Iterator[tuple[Box, Box, Tensor]]:
    """The rectangles that a rank holds of a tensor's stored pieces: where each lies in the piece, and in its own tensor."""
    if (stored := contents.tensors.get(key)) is None:
        return
    share = share or Share(stored.shape, tuple(((0, size),) for size in stored.shape))
    for piece in stored.pieces:
        if (wanted := share.overlap(piece.box)) is not None:
            values = contents.read(stored, piece)
            yield from ((box.relative_to(piece.start), share.local(box), values) for box in boxes(wanted))


def model_tensors(contents: Contents) -> dict[str, StoredTensor]:
    return {key.removeprefix(MODEL): tensor for key, tensor in contents.tensors.items() if key.startswith(MODEL)}


def _under_first_names(path: Path, contents: Contents, ties: Mapping[str, str]) -> Contents:
    """With tensors stored under another name moved to their first name; a CheckpointError where both were stored and differ."""
    found = dict(contents.tensors)
    for tie, name in ties.items():
        if (tied := found.pop(f"{MODEL}{tie}", None)) is not None:
            first = found.setdefault(f"{MODEL}{name}", tied)
            if [piece.crc32 for piece in first.pieces] != [piece.crc32 for piece in tied.pieces]:
                raise CheckpointError(f"{tie} and {name} are one tensor in the model, but have different values in {path}")
    return replace(contents, tensors=found)


def _check_model(path: Path, contents: Contents, specs: Mapping[str, TensorSpec], may_lack: Collection[str]) -> None:
    """Raises one error with the first differences between the model's tensors and the checkpoint's."""
    stored = model_tensors(contents)
    differences = [f"{name} is not in the checkpoint" for name in specs if name not in stored and name not in may_lack]
    differences += [f"{name} is not in the model" for name in stored if name not in specs]
    read_as = contents.value(f"extra.{READ_AS}") or {}
    for name, spec in specs.items():
        if name not in stored:
            continue
        own = stored[name].dtype if contents.plain else spec.dtype  # weights alone are cast, as by `load_state_dict`
        there, here = _form(stored[name].shape, read_as.get(name, own)), _form(spec.shape, spec.dtype)
        if there != here:
            differences.append(f"{name} is {there} in the checkpoint, {here} in the model")
    if differences:
        more = len(differences) - MOST_DIFFERENCES
        listing = "\n  ".join(["", *differences[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
        raise CheckpointError(
            f"{path} is a checkpoint of another model ({counted(len(differences), 'difference')}):{listing}",
            hint="build the model as it was when the checkpoint was written",
        )


def _check_one(path: Path, contents: Contents, world: World) -> None:
    """Raises, on all ranks, where some read another checkpoint than others do."""
    ids = world.gather_objects(contents.save_id)
    paths = world.gather_objects(str(path))
    other = next((rank for rank, save_id in enumerate(ids) if save_id != ids[0]), None)
    if other is not None:
        raise CheckpointError(
            f"ranks load different checkpoints (rank 0: {paths[0]}, rank {other}: {paths[other]})",
            hint="let rank 0 choose the path and broadcast it; if the paths are equal, they are on different file systems",
        )


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
