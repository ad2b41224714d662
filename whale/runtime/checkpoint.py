"""Checkpoints by `torch.distributed.checkpoint`: each tensor is written once, and read by any plan's ranks that own it.

    key                            value
    model.{name}                   a parameter or buffer
    optimizer.{name}.{key}         an entry of the optimizer's state for a parameter
    options.{rank}                 hyperparameters of the parameters that a rank wrote
    extra.{key}                    plain data that all ranks share
    rank.{rank}.{key}              plain data of one rank

A tensor that is cut over ranks will be written under the same key, a region by each writer; only `_entries` and
`_targets` know how a tensor becomes an entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_entries
from torch.distributed.checkpoint.state_dict_saver import save as write_entries

from whale.comm import World, on_first_rank, together
from whale.errors import CheckpointError
from whale.ir.graph import TensorSpec
from whale.runtime.checkpoint_files import aside, check_complete, complete, prepare
from whale.runtime.optimizer_state import OptimizerState

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
) -> None:
    """Writes a checkpoint; all ranks of the world call it together.

    It is written aside and renamed when complete; what stood at the path before is kept until then.

    Args:
        path: a folder of the checkpoint's own, that all ranks see.
        tensors: the parameters and buffers that this rank owns, by name.
        optimizer: its optimizer's state.
        extras: plain data.
        writers: per name, the rank that writes the tensor and its optimizer state; the same on all ranks.
        world: this process among its peers.
        plan: text stored beside, as ``plan.json``.

    Raises:
        CheckpointError: it cannot be written; the same on all ranks, and the previous one is intact.
    """
    on_first_rank(world, lambda: _writing(path, lambda: prepare(path)))
    entries = _entries(tensors, optimizer, extras, writers, world.rank)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
    metadata = _quietly(path, lambda: write_entries(entries, checkpoint_id=aside(path), planner=planner, no_dist=world.is_alone))
    on_first_rank(world, lambda: _writing(path, lambda: complete(path, _files(metadata), plan)))


def load(path: Path, *, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], world: World) -> tuple[OptimizerState, Extras]:
    """Reads a checkpoint, whatever plan wrote it; all ranks of the world call it together.

    Args:
        path: the folder.
        tensors: the parameters and buffers that this rank owns, by name; they are filled in place.
        specs: of all parameters and buffers of the model, by name; the same on all ranks.
        world: this process among its peers.

    Returns:
        The optimizer state of this rank's parameters, and the plain data. Nothing has changed where it raises before reading.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model; the same kind on all ranks.
    """
    return together(world, lambda: _load(path, tensors, specs, world.rank))


def _load(path: Path, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], rank: int) -> tuple[OptimizerState, Extras]:
    check_complete(path)
    reader = FileSystemReader(path)
    metadata = _quietly(path, reader.read_metadata)
    _check_model(path, metadata, specs)
    wanted = _targets(tensors, metadata, rank)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Each rank reads for itself: what it needs is in the metadata, and `_together` shares the outcome.
    _quietly(path, lambda: read_entries(wanted, storage_reader=reader, planner=planner, no_dist=True))
    return _unpack(wanted, tensors, rank)


def _entries(
    tensors: Mapping[str, Tensor], optimizer: OptimizerState, extras: Extras, writers: Mapping[str, int], rank: int
) -> dict[str, Any]:
    """What this rank writes, by key."""
    mine = [name for name in tensors if writers[name] == rank]
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


def _targets(tensors: Mapping[str, Tensor], metadata: Metadata, rank: int) -> dict[str, Any]:
    """What this rank reads, by key: its tensors, and room for the rest."""
    wanted: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        section, _, rest = key.partition(".")
        if section == "model":
            if rest in tensors:
                wanted[key] = tensors[rest].detach()
            continue
        name = rest.rpartition(".")[0]
        if section in ("extra", "options") or (section == "optimizer" and name in tensors) or key.startswith(f"rank.{rank}."):
            wanted[key] = torch.empty(stored.size, dtype=stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
    return wanted


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
            f"a checkpoint must be of the same model ({path}: {len(differences)} difference(s)):{listing}",
            hint="build the model as it was when the checkpoint was written",
        )


def _form(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _files(metadata: Metadata) -> set[str]:
    """The data files that a checkpoint's entries lie in."""
    places = metadata.storage_data or {}
    return {".metadata", *(place.relative_path for place in places.values())}


def _quietly(path: Path, action: Callable[[], T]) -> T:
    """Runs a part of torch's checkpoint code, with its failures as ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return action()
    except CheckpointException as failure:  # a BaseException, with each rank's own
        reasons = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in sorted(failure.failures.items()))
        raise CheckpointError(f"{path} can be neither written nor read in full: {reasons}") from failure
    except Exception as error:
        raise CheckpointError(f"{path} can be neither written nor read in full: {type(error).__name__}: {error}") from error


def _writing(path: Path, action: Callable[[], None]) -> None:
    """Runs a part of the work on files, with the system's failures as ours."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
