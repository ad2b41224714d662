"""Checkpoints by `torch.distributed.checkpoint`: each element is written once, and read by any plan's ranks that hold it.

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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_entries
from torch.distributed.checkpoint.state_dict_saver import save as write_entries

from whale.comm import World, on_first_rank, together
from whale.errors import CheckpointError
from whale.ir.graph import TensorSpec
from whale.runtime.checkpoint.boxes import Share
from whale.runtime.checkpoint.files import aside, check_complete, complete, discard, prepare
from whale.runtime.checkpoint.planners import ShareLoadPlanner, ShareSavePlanner
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
    on_first_rank(world, lambda: _writing(path, lambda: prepare(path)))
    parts = _parts(tensors, optimizer, shares or {})
    entries = _entries(tensors, optimizer, extras, [name for name in tensors if writers[name] == world.rank], world.rank)
    entries.update({key: part for key, (part, _) in parts.items()})
    planner = ShareSavePlanner({key: share for key, (_, share) in parts.items()})
    try:
        metadata = _quietly(path, lambda: write_entries(entries, checkpoint_id=aside(path), planner=planner, no_dist=world.is_alone), world)
        on_first_rank(world, lambda: _writing(path, lambda: complete(path, _files(metadata), plan)))
    except CheckpointError:  # on all ranks: nothing half is left behind, which would fill the disk for the next attempt
        if world.rank == 0:
            discard(path)
        raise


def load(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    world: World,
    shares: Mapping[str, Share] | None = None,
    check: Callable[[OptimizerState, Extras], None] | None = None,
) -> tuple[OptimizerState, Extras]:
    """Reads a checkpoint, whatever plan wrote it; all ranks of the world call it together.

    The tensors come last, once every rank has found all else to be right.

    Args:
        path: the folder.
        tensors: the parameters and buffers that this rank owns, by name; they are filled in place.
        specs: of all parameters and buffers of the model, whole, by name; the same on all ranks.
        world: this process among its peers.
        shares: of the tensors that this rank holds only a part of, by name, where that lies.
        check: raises where what has been read beside the tensors does not fit this rank; nothing has changed then, on any rank.

    Returns:
        The optimizer state of this rank's parameters, and the plain data.

    Raises:
        CheckpointError: it is incomplete, damaged, of another model, or not the one that other ranks read; the same kind on all ranks.
    """
    reader = FileSystemReader(path)

    def read_rest() -> tuple[Metadata, OptimizerState, Extras]:
        check_complete(path)
        metadata = _quietly(path, reader.read_metadata)
        _check_model(path, metadata, specs)
        wanted, parts = _targets(tensors, metadata, world.rank, shares or {})
        kept, extras = _unpack(_read(path, reader, wanted, parts), tensors, world.rank)
        if check is not None:
            check(kept, extras)
        return metadata, kept, extras

    metadata, kept, extras = together(world, read_rest)
    _check_one(path, metadata, world)
    together(world, lambda: _read(path, reader, *_model_targets(tensors, metadata, shares or {})))
    return kept, extras


def _read(path: Path, reader: FileSystemReader, wanted: dict[str, Any], parts: Mapping[str, Share]) -> dict[str, Any]:
    """Fills what is wanted. Each rank reads for itself: what it needs is in the metadata, and `together` shares the outcome."""
    _quietly(path, lambda: read_entries(wanted, storage_reader=reader, planner=ShareLoadPlanner(parts), no_dist=True))
    return wanted


def _parts(tensors: Mapping[str, Tensor], optimizer: OptimizerState, shares: Mapping[str, Share]) -> dict[str, tuple[Tensor, Share]]:
    """What this rank holds a part of, by key: tensors, and what the optimizer keeps for each of their elements."""
    found: dict[str, tuple[Tensor, Share]] = {}
    for name, share in shares.items():
        found[f"model.{name}"] = tensors[name].detach(), share
        for key, value in optimizer.state.get(name, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == tensors[name].shape:
                found[f"optimizer.{name}.{key}"] = value.detach(), share
    return found


def _entries(tensors: Mapping[str, Tensor], optimizer: OptimizerState, extras: Extras, mine: Sequence[str], rank: int) -> dict[str, Any]:
    """What this rank writes, by key."""
    entries: dict[str, Any] = {f"model.{name}": tensors[name].detach() for name in mine}
    for name in mine:
        for key, value in optimizer.state.get(name, {}).items():
            entries[f"optimizer.{name}.{key}"] = value.detach() if isinstance(value, Tensor) else value
    options = {name: optimizer.options[name] for name in mine if name in optimizer.options}
    if options:
        entries[f"options.{rank}"] = options
    entries.update({f"extra.{key}": value for key, value in extras.shared.items()})
    entries.update({f"rank.{rank}.{key}": value for key, value in extras.own.items()})
    return entries


def _targets(
    tensors: Mapping[str, Tensor], metadata: Metadata, rank: int, shares: Mapping[str, Share]
) -> tuple[dict[str, Any], dict[str, Share]]:
    """What this rank reads beside its tensors, by key, as room for it; and which of it are parts."""
    wanted: dict[str, Any] = {}
    parts: dict[str, Share] = {}
    for key, stored in metadata.state_dict_metadata.items():
        section, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        if section == "optimizer" and name in tensors:
            if (share := _share_of(stored, shares.get(name))) is not None:
                parts[key] = share
            wanted[key] = _room(stored, parts.get(key))
        elif section in ("extra", "options") or key.startswith(f"rank.{rank}."):
            wanted[key] = _room(stored, None)
    return wanted, parts


def _model_targets(
    tensors: Mapping[str, Tensor], metadata: Metadata, shares: Mapping[str, Share]
) -> tuple[dict[str, Any], dict[str, Share]]:
    """This rank's tensors themselves, by key, and which of them are parts."""
    wanted = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    known = metadata.state_dict_metadata
    found = {key: _share_of(known[key], shares.get(name)) for key, name in zip(wanted, tensors, strict=True)}
    return wanted, {key: share for key, share in found.items() if share is not None}


def _share_of(stored: TensorStorageMetadata | BytesStorageMetadata, share: Share | None) -> Share | None:
    """The share that a rank reads of what is stored; None where it reads it as it is."""
    is_whole_there = share is not None and isinstance(stored, TensorStorageMetadata) and tuple(stored.size) == share.shape
    return share if is_whole_there else None


def _room(stored: TensorStorageMetadata | BytesStorageMetadata, share: Share | None) -> Tensor | None:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size if share is None else share.local_shape, dtype=stored.properties.dtype)


def _unpack(entries: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> tuple[OptimizerState, Extras]:
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in entries.items():
        section, _, rest = key.partition(".")
        if section == "optimizer":
            name, _, entry = rest.rpartition(".")
            state.setdefault(name, {})[entry] = value
        elif section == "options":
            options.update({name: group for name, group in value.items() if name in tensors})
        elif section == "extra":
            shared[rest] = value
        elif section == "rank":
            own[rest.partition(".")[2]] = value
    return OptimizerState(state, options), Extras(shared, own)


def _check_model(path: Path, metadata: Metadata, specs: Mapping[str, TensorSpec]) -> None:
    """Raises one error with all the differences between the model's tensors and the checkpoint's."""
    prefix = "model."
    stored = {key.removeprefix(prefix): entry for key, entry in metadata.state_dict_metadata.items() if key.startswith(prefix)}
    differences = [f"{name} is not in the checkpoint" for name in specs if name not in stored]
    differences += [f"{name} is not in the model" for name in stored if name not in specs]
    for name, spec in specs.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        there = _form(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        here = _form(spec.shape, spec.dtype)
        if there != here:
            differences.append(f"{name} is {there} in the checkpoint, {here} in the model")
    if differences:
        listing = "".join(f"\n  {difference}" for difference in differences)
        raise CheckpointError(
            f"a checkpoint must be of the same model ({path}: {counted(len(differences), 'difference')}):{listing}",
            hint="build the model as it was when the checkpoint was written",
        )


def _check_one(path: Path, metadata: Metadata, world: World) -> None:
    """Raises, on all ranks, where some read another checkpoint than others do."""
    ids = world.gather_objects(getattr(metadata.storage_meta, "save_id", None))
    paths = world.gather_objects(str(path))
    other = next((rank for rank, save_id in enumerate(ids) if save_id != ids[0]), None)
    if other is not None:
        raise CheckpointError(
            f"all ranks load one checkpoint (rank 0: {paths[0]}, rank {other}: {paths[other]})",
            hint="let rank 0 choose the path and broadcast it; where the paths are equal, they lie on unlike file systems",
        )


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _files(metadata: Metadata) -> set[str]:
    """The data files that a checkpoint's entries lie in."""
    places = metadata.storage_data or {}
    return {".metadata", *(place.relative_path for place in places.values())}


def _quietly(path: Path, action: Callable[[], T], world: World | None = None) -> T:
    """Runs a part of torch's checkpoint code, with its failures as ours.

    Args:
        path: of the checkpoint.
        action: to run.
        world: whose ranks speak in it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return action()
    except CheckpointException as failure:  # a BaseException, with each rank's own
        reasons = "; ".join(f"rank {rank}: {_reason(error)}" for rank, (error, _) in sorted(failure.failures.items()))
        raise CheckpointError(f"{path} can be neither written nor read in full: {reasons}") from failure
    except (RuntimeError, DistError) as error:
        if world is None or world.is_alone:
            raise CheckpointError(f"{path} can be neither written nor read in full: {_reason(error)}") from error
        with world.speaking(f"saving {path}"):
            raise
    except Exception as error:
        raise CheckpointError(f"{path} can be neither written nor read in full: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What failed, in words: the system's own where it has them, which torch's writers raise others over."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__cause__ or inner.__context__
    if inner is not None:
        return _told(inner)
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _told(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror or error}"


def _writing(path: Path, action: Callable[[], None]) -> None:
    """Runs a part of the work on files, with the system's failures as ours."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {_told(error)}") from error
