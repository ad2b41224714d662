"""Checkpoints of the older form, by `torch.distributed.checkpoint`: unpickled, which can run code, so they are read only when asked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_entries

from whale.errors import CheckpointError
from whale.runtime.checkpoint.contents import Contents, StoredPiece, StoredTensor


class _Reader(FileSystemReader):
    """Reads the metadata once, for however many entries."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def open_older(path: Path) -> Contents:
    """A checkpoint of the older form; each tensor is one piece, and read whole.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        reader = _Reader(path)
        metadata = reader.read_metadata()
    except Exception as error:
        raise CheckpointError(f"{path / '.metadata'} cannot be read: {type(error).__name__}: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            piece = StoredPiece("", key, (0,) * len(entry.size), tuple(entry.size), 0)
            tensors[key] = StoredTensor(key, str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size), (piece,))

    def fetch(key: str, room: Tensor | None) -> Any:
        wanted: dict[str, Any] = {key: room}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                read_entries(wanted, storage_reader=reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:  # torch's own is a BaseException
            raise CheckpointError(f"{path} cannot be read in full ({key}): {type(error).__name__}") from error
        return wanted[key]

    def read(tensor: StoredTensor, piece: StoredPiece) -> Tensor:
        found: Tensor = fetch(tensor.key, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)))
        return found

    plain = [key for key in metadata.state_dict_metadata if key not in tensors]
    save_id = str(getattr(metadata.storage_meta, "save_id", None))
    return Contents(save_id, tensors, plain, lambda key: fetch(key, None) if key in plain else None, read)
