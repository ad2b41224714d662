"""Checkpoints: each element is written once, and read by any plan's ranks that hold it.

    key                            value
    model.{name}                   a parameter or buffer
    optimizer.{name}.{key}         an entry of the optimizer's state for a parameter
    options.{rank}                 hyperparameters of the parameters that a rank wrote
    extra.{key}                    plain data that all ranks share
    rank.{rank}.{key}              plain data of one rank

A tensor that is cut over ranks is one entry, too: of the whole shape, in chunks that its holders write. So nothing tells
by which plan a checkpoint was written, and no rank needs more of a tensor than it holds.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from whale.comm import World, on_first_rank, together
from whale.errors import CheckpointError
from whale.ir.graph import TensorSpec
from whale.ir.serialization import read_value, to_json
from whale.runtime.checkpoint.boxes import Box, Share, boxes
from whale.runtime.checkpoint.contents import Contents, Index, StoredTensor, open_contents, write_pieces
from whale.runtime.checkpoint.files import INDEX, PLAN, aside, check_complete, complete, is_older, standing, writing_aside
from whale.runtime.checkpoint.older import open_older
from whale.runtime.checkpoint.plain_data import is_plain_tensor, to_plain
from whale.runtime.state.optimizer_state import OptimizerState
from whale.units import counted

T = TypeVar("T")


@dataclass(frozen=True)
class Extras:
    """Plain data in a checkpoint.

    Attributes:
        shared: equal on the ranks that give it (step, scheduler, data position); the lowest such rank writes it.
        own: this rank's (random state); read back by the rank of the same number, if there is one.
    """

    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)


def save(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    optimizer: OptimizerState,
    extras: Extras,
    writers: Mapping[str, int],
    world: World,
    plan: str | None = None,
    shares: Mapping[str, Share] | None = None,
) -> None:
    """Writes a checkpoint; all ranks of the world call it together.

    It is written aside and renamed when complete; what stood at the path before is kept until then.

    Args:
        path: a folder of the checkpoint's own, that all ranks see.
        tensors: the parameters and buffers that this rank owns, by name.
        optimizer: its optimizer's state.
        extras: plain data.
        writers: per name, the rank that writes the tensor and its optimizer state; the same on all ranks. Of a tensor that is
            held in parts it writes only what is not divided with it.
        world: this process among its peers.
        plan: text stored beside, as ``plan.json``.
        shares: of the tensors that some rank holds only a part of, by name, where this rank's part lies and what it writes of it.

    Raises:
        CheckpointError: it cannot be written; the same on all ranks, and the previous one is intact.
    """
    with ExitStack() as aside_here:  # on rank 0
        on_first_rank(world, lambda: _writing(path, lambda: aside_here.enter_context(writing_aside(path))))
        own = together(world, lambda: _writing(path, lambda: _write(path, tensors, optimizer, extras, writers, world.rank, shares or {})))
        parts: list[Any] = world.gather_objects(own)
        on_first_rank(world, lambda: _writing(path, lambda: _complete(path, Index.of(uuid4().hex, parts), plan)))


def load(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    world: World,
    shares: Mapping[str, Share] | None = None,
    check: Callable[[OptimizerState, Extras], None] | None = None,
    trust: bool = False,
) -> tuple[OptimizerState, Extras]:
    """Reads a checkpoint, whatever plan wrote it; all ranks of the world call it together.

    The tensors are filled last, once every rank has found them and all else to be right; so they are read twice.

    Args:
        path: the folder.
        tensors: the parameters and buffers that this rank owns, by name; they are filled in place.
        specs: of all parameters and buffers of the model, whole, by name; the same on all ranks.
        world: this process among its peers.
        shares: of the tensors that this rank holds only a part of, by name, where that lies.
        check: raises where what has been read beside the tensors does not fit this rank; nothing has changed then, on any rank.
        trust: whether a checkpoint of the older form may be unpickled, which can run code.

    Returns:
        The optimizer state of this rank's parameters, and the plain data.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model, or not the one that other ranks read; the same kind on all ranks.
    """
    shares = shares or {}

    def read_rest() -> tuple[Contents, OptimizerState, Extras]:
        contents = _open(path, trust)
        _check_model(path, contents, specs)
        kept, extras = _rest(contents, tensors, world.rank, shares)
        if check is not None:
            check(kept, extras)
        for name in tensors:
            for _ in _overlaps(contents, f"model.{name}", shares.get(name)):
                pass
        return contents, kept, extras

    def fill() -> None:
        for name, tensor in tensors.items():
            _fill(contents, f"model.{name}", shares.get(name), tensor.detach())

    contents, kept, extras = together(world, read_rest)
    _check_one(path, contents, world)
    together(world, fill)
    return kept, extras


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    optimizer: OptimizerState,
    extras: Extras,
    writers: Mapping[str, int],
    rank: int,
    shares: Mapping[str, Share],
) -> tuple[list[StoredTensor], dict[str, Any]]:
    """Writes what a rank answers for; gives its tensors, and its plain data by key."""
    mine = [name for name in tensors if writers[name] == rank]
    inner: dict[str, Tensor] = {}

    def keep(place: str, tensor: Tensor) -> str:
        inner[key := f"rank {rank}: {place}"] = tensor
        return key

    entries = {f"optimizer.{name}.{key}": value for name in mine for key, value in optimizer.state.get(name, {}).items()}
    plain = {key: value for key, value in entries.items() if not is_plain_tensor(value)}
    if options := {name: optimizer.options[name] for name in mine if name in optimizer.options}:
        plain[f"options.{rank}"] = options
    plain |= {f"extra.{key}": value for key, value in extras.shared.items()}
    plain |= {f"rank.{rank}.{key}": value for key, value in extras.own.items()}
    data = {key: to_plain(value, key, keep) for key, value in plain.items()}

    def pieces() -> Iterator[tuple[str, Sequence[int], Box, Tensor]]:
        for name, tensor in tensors.items():
            own = {f"optimizer.{name}.{key}": value for key, value in optimizer.state.get(name, {}).items() if is_plain_tensor(value)}
            for key, value in {f"model.{name}": tensor, **own}.items():
                share = shares.get(name) if value.shape == tensor.shape else None
                if share is not None:
                    yield from ((key, share.shape, box, share.local(box).of(value.detach())) for box in share.written_boxes())
                elif name in mine:
                    yield _whole(key, value)
        yield from (_whole(key, value) for key, value in inner.items())

    return write_pieces(aside(path) / f"rank_{rank}.safetensors", list(pieces())), data


def _whole(key: str, tensor: Tensor) -> tuple[str, Sequence[int], Box, Tensor]:
    return key, tensor.shape, Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()


def _complete(path: Path, index: Index, plan: str | None) -> None:
    texts = {INDEX: to_json(index), **({} if plan is None else {PLAN: plan})}
    complete(path, {piece.file for tensor in index.tensors for piece in tensor.pieces}, texts)


def _open(path: Path, trust: bool) -> Contents:
    path = standing(path)
    check_complete(path)
    if not is_older(path):
        try:
            return open_contents(path, read_value(Index, path / INDEX))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / INDEX} cannot be read: {error}") from error
    if not trust:
        raise CheckpointError(
            f"what is loaded is plain data ({path} is of the older form, which is unpickled: that can run code)",
            hint="load(path, trust=True) reads it, if you trust whoever wrote it; saved once more it is plain data",
        )
    return open_older(path)


def _rest(contents: Contents, tensors: Mapping[str, Tensor], rank: int, shares: Mapping[str, Share]) -> tuple[OptimizerState, Extras]:
    """What a rank reads beside its tensors."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key in (*contents.tensors, *contents.plain):
        section, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if section == "optimizer" and name in tensors:
            is_tensor = key in contents.tensors
            state.setdefault(name, {})[entry] = _read(contents, key, shares.get(name)) if is_tensor else contents.value(key)
        elif section == "options":
            options.update({name: group for name, group in contents.value(key).items() if name in tensors})
        elif section == "extra":
            shared[rest] = contents.value(key)
        elif section == "rank" and rest.partition(".")[0] == str(rank):
            own[rest.partition(".")[2]] = contents.value(key)
    return OptimizerState(state, options), Extras(shared, own)


def _read(contents: Contents, key: str, share: Share | None) -> Tensor:
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
    """The stored pieces of a tensor that a rank holds something of, by rectangles: where each lies in the piece, and at home."""
    stored = contents.tensors[key]
    share = share or Share(stored.shape, tuple(((0, size),) for size in stored.shape))
    for piece in stored.pieces:
        if (wanted := share.overlap(piece.box)) is not None:
            values = contents.read(stored, piece)
            yield from ((box.relative_to(piece.start), share.local(box), values) for box in boxes(wanted))


def _check_model(path: Path, contents: Contents, specs: Mapping[str, TensorSpec]) -> None:
    """Raises one error with all the differences between the model's tensors and the checkpoint's."""
    prefix = "model."
    stored = {key.removeprefix(prefix): tensor for key, tensor in contents.tensors.items() if key.startswith(prefix)}
    differences = [f"{name} is not in the checkpoint" for name in specs if name not in stored]
    differences += [f"{name} is not in the model" for name in stored if name not in specs]
    for name, spec in specs.items():
        if name not in stored:
            continue
        there, here = _form(stored[name].shape, stored[name].dtype), _form(spec.shape, spec.dtype)
        if there != here:
            differences.append(f"{name} is {there} in the checkpoint, {here} in the model")
    if differences:
        listing = "".join(f"\n  {difference}" for difference in differences)
        raise CheckpointError(
            f"a checkpoint must be of the same model ({path}: {counted(len(differences), 'difference')}):{listing}",
            hint="build the model as it was when the checkpoint was written",
        )


def _check_one(path: Path, contents: Contents, world: World) -> None:
    """Raises, on all ranks, where some read another checkpoint than others do."""
    ids = world.gather_objects(contents.save_id)
    paths = world.gather_objects(str(path))
    other = next((rank for rank, save_id in enumerate(ids) if save_id != ids[0]), None)
    if other is not None:
        raise CheckpointError(
            f"all ranks load one checkpoint (rank 0: {paths[0]}, rank {other}: {paths[other]})",
            hint="let rank 0 choose the path and broadcast it; where the paths are equal, they lie on unlike file systems",
        )


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _writing(path: Path, action: Callable[[], T]) -> T:
    """Runs a part of the work on files, with the system's failures as ours."""
    try:
        return action()
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from error
