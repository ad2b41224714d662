"""The weights of a checkpoint as safetensors files that other libraries read, and checkpoints of weights alone from such files.

model.safetensors                          one file of all tensors, under the model's own names
model-00001-of-00002.safetensors  ...      or shards of them, with
model.safetensors.index.json               the file of each name
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whale.comm import World
from whale.errors import CheckpointError
from whale.ir.serialization import read_json
from whale.runtime.checkpoint.checkpoint import MODEL, Extras, model_tensors, open_checkpoint, read_tensor
from whale.runtime.checkpoint.contents import StoredTensor
from whale.runtime.checkpoint.files import WRITING, aside, real, write_text, writing_aside
from whale.runtime.checkpoint.saving import save, writing
from whale.runtime.checkpoint.training_state import LEFT_OUT
from whale.runtime.state.optimizer_state import OptimizerState

NAME, ENDING = "model", ".safetensors"
INDEX_ENDING = f"{ENDING}.index.json"


def export_weights(path: Path, out: Path, shard_bytes: float) -> list[str]:
    """Writes the parameters and buffers of a checkpoint that a ``state_dict`` has; tied ones once, by the first name.

    One shard at a time is in memory.

    Args:
        path: the checkpoint.
        out: a folder to make.
        shard_bytes: the size limit of a file with more than one tensor.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the checkpoint cannot be read, the folder exists, or cannot be written.
    """
    contents = open_checkpoint(path)
    left_out = contents.value(f"extra.{LEFT_OUT}") or ()
    tensors = {name: stored for name, stored in model_tensors(contents).items() if name not in left_out}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already; weights are written to a new folder")

    def write() -> list[str]:
        with writing_aside(out) as save_id:
            folder = aside(out, save_id)
            shards = list(_shards(tensors, shard_bytes))
            files = [_file(number, len(shards)) for number in range(len(shards))]
            for names, file in zip(shards, files, strict=True):
                try:
                    save_file({name: read_tensor(contents, f"{MODEL}{name}") for name in names}, folder / file, {"format": "pt"})
                except SafetensorError as error:
                    raise CheckpointError(f"{out / file} cannot be written: {error}") from error
            if len(files) > 1:
                places = {name: file for names, file in zip(shards, files, strict=True) for name in names}
                index = {"metadata": {"total_size": sum(map(num_bytes, tensors.values()))}, "weight_map": places}
                files.append(f"{NAME}{INDEX_ENDING}")
                write_text(folder / files[-1], json.dumps(index, indent=2))
            (folder / WRITING).unlink()
            folder.rename(real(out))
        return files

    return writing(out, write)


def num_bytes(stored: StoredTensor) -> int:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return prod(stored.shape) * dtype.itemsize


def _shards(tensors: Mapping[str, StoredTensor], most_bytes: float) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, stored in tensors.items():
        if names and size + num_bytes(stored) > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes(stored)
    yield names


def _file(number: int, num_files: int) -> str:
    return f"{NAME}{ENDING}" if num_files == 1 else f"{NAME}-{number + 1:05d}-of-{num_files:05d}{ENDING}"


_COMPILED = "_orig_mod."
"""Before each key, where a state dict is of the module that torch.compile made."""


def without_compiled(state: Mapping[str, Any], known: Collection[str] = ()) -> Mapping[str, Any]:
    """A state dict with the keys of the module inside one made by torch.compile; keys in ``known`` stay."""
    if any(not key.startswith(_COMPILED) or key in known for key in state):
        return state
    return {key.removeprefix(_COMPILED): value for key, value in state.items()}


def import_weights(source: Path, path: Path) -> int:
    """Makes a checkpoint of weights alone; one tensor at a time is in memory, the files are mapped.

    Args:
        source: a safetensors file, an index of several, or a folder that has one of these as ``model.safetensors``.
        path: of the checkpoint.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: the files cannot be read, or the checkpoint cannot be written.
    """
    if source.is_dir():
        index = source / f"{NAME}{INDEX_ENDING}"
        source = index if index.exists() else source / f"{NAME}{ENDING}"
    tensors: dict[str, Tensor] = {}
    for file, names in _files(source).items():
        try:
            opened: Any = safe_open(file, framework="pt")
            tensors |= {name: opened.get_tensor(name) for name in (opened.keys() if names is None else names)}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    alone = World(0, 1, 0, 1, torch.device("cpu"), timedelta())
    tensors = dict(without_compiled(tensors))
    writers = dict.fromkeys(tensors, 0)
    save(path, tensors=tensors, optimizer=OptimizerState(), extras=Extras(), writers=writers, world=alone).finish()
    return len(tensors)


def _files(source: Path) -> dict[Path, Sequence[str] | None]:
    """The files of a model, with the names that are read from each; None for all."""
    if source.suffix != ".json":
        return {source: None}
    try:
        places = read_json(source)["weight_map"]
        found: dict[Path, list[str]] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not in its folder")
            found.setdefault(source.parent / file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    return dict(found)
