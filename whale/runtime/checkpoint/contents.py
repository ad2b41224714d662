"""What lies in a checkpoint: tensors in safetensors files, a JSON index of them with plain data; no code.

    tensor   model.qkv.weight   float32[12, 4]
    pieces   rank_0.safetensors   model.qkv.weight[0:8, 0:4]    crc32
             rank_1.safetensors   model.qkv.weight[8:12, 0:4]   crc32

A file is written piece by piece: the library's own writer wants all of them in memory at once.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open
from torch import Tensor

from whale.errors import CheckpointError
from whale.runtime.checkpoint.boxes import Box
from whale.runtime.checkpoint.files import STEP_KEY
from whale.runtime.checkpoint.plain_data import from_plain


@dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a tensor, in a file."""

    file: str
    name: str  # in the file
    start: tuple[int, ...]  # of its `Box`
    stop: tuple[int, ...]
    crc32: int  # of its bytes

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: type and shape of the whole, and pieces of it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, or a rank's part of one."""

    save_id: str  # different for each save
    tensors: tuple[StoredTensor, ...]  # in files
    plain: Mapping[str, Any]  # data by key, as of `to_plain`

    @staticmethod
    def of(parts: Sequence[Index]) -> Index:
        """Of the parts that ranks wrote, in their order; plain data under one key is that of the lowest rank."""
        tensors: dict[str, StoredTensor] = {}
        pieces: dict[str, list[StoredPiece]] = {}
        plain: dict[str, Any] = {}
        for part in parts:
            for tensor in part.tensors:
                tensors.setdefault(tensor.key, tensor)
                pieces.setdefault(tensor.key, []).extend(tensor.pieces)
            for key, value in part.plain.items():
                plain.setdefault(key, value)
        whole = [StoredTensor(key, one.dtype, one.shape, tuple(pieces[key])) for key, one in tensors.items()]
        assert all(sum(prod(piece.box.shape) for piece in tensor.pieces) == prod(tensor.shape) for tensor in whole)
        return Index(parts[0].save_id, tuple(whole), plain)

    @property
    def step(self) -> int | None:
        """How many steps are done; None for weights alone."""
        step = self.plain.get(STEP_KEY)
        return step if type(step) is int else None

    @property
    def files(self) -> set[str]:
        """Those that its tensors lie in."""
        return {piece.file for tensor in self.tensors for piece in tensor.pieces}


def index_faults(index: Index, sizes: Mapping[str, int]) -> list[str]:
    """What cannot be in an index that a save wrote: nothing is allocated or read by one that has been checked.

    Args:
        index: whose fields have the right types.
        sizes: of the checkpoint's files, by name.
    """
    found, counts = [], Counter(tensor.key for tensor in index.tensors)
    found += [f"{key} is there {number} times" for key, number in counts.items() if number > 1]
    room = dict(sizes)
    places: set[tuple[str, str]] = set()
    for tensor in index.tensors:
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            found.append(f"{tensor.key} has the unknown type {tensor.dtype!r}")
            continue
        if wrong := _misplaced(tensor):
            found.append(f"{tensor.key}{list(tensor.shape)}: {wrong}")
            continue
        for piece in tensor.pieces:
            if piece.name != (name := _name(tensor.key, tensor.shape, piece.box)):
                found.append(f"a piece of {tensor.key} is called {piece.name}, not {name}")
            elif piece.file not in sizes:
                found.append(f"{piece.name} lies in {piece.file!r}, which is not a file of the checkpoint")
            elif (piece.file, piece.name) in places:
                found.append(f"{piece.name} is there twice in {piece.file}")
            elif (left := room[piece.file] - prod(piece.box.shape) * dtype.itemsize) < 0:
                found.append(f"{piece.name} has more bytes than {piece.file} ({sizes[piece.file]})")
            else:
                room[piece.file] = left
                places.add((piece.file, piece.name))
    whole = {tensor.key for tensor in index.tensors if len(tensor.pieces) == 1}

    def probe(key: str, _: bool) -> Tensor:
        if key not in whole:
            raise ValueError(f"there is no tensor {key!r} of one piece")
        return torch.empty(0)

    for key, value in index.plain.items():
        try:
            from_plain(value, probe)
        except ValueError as error:
            found.append(f"{key}: {error}")
    if index.plain and (type(step := index.plain.get(STEP_KEY)) is not int or step < 0):
        found.append(f"{STEP_KEY} is {step!r}, not a number of steps")
    return found


def _misplaced(tensor: StoredTensor) -> str | None:
    """Why the pieces of a tensor are not each of its elements once; None if they are."""
    if min(tensor.shape, default=0) < 0:
        return "a size is below zero"
    for piece in tensor.pieces:
        bounds = list(zip_longest(piece.start, piece.stop, tensor.shape))
        if any(None in each or not 0 <= each[0] <= each[1] <= each[2] for each in bounds):
            return f"{list(piece.start)} to {list(piece.stop)} is no part of it"
    if not _are_tiles([piece.box for piece in tensor.pieces if prod(piece.box.shape)], tensor.shape):
        return "its pieces are not each element once"
    return None


def _are_tiles(boxes: Sequence[Box], shape: Sequence[int], dim: int = 0) -> bool:
    """Whether rectangles cover all, and none overlap; they are compared slab by slab, between two bounds of a dimension."""
    if prod(shape[dim:]) == 0:
        return True
    if dim == len(shape):
        return len(boxes) == 1
    bounds = sorted({0, shape[dim], *(box.start[dim] for box in boxes), *(box.stop[dim] for box in boxes)})
    begin, end = defaultdict(list), defaultdict(set)
    for number, box in enumerate(boxes):
        begin[box.start[dim]].append(number)
        end[box.stop[dim]].add(number)
    there: dict[int, Box] = {}
    for bound in bounds[:-1]:
        there = {number: box for number, box in there.items() if number not in end[bound]}
        there |= {number: boxes[number] for number in begin[bound]}
        if not _are_tiles(list(there.values()), shape, dim + 1):
            return False
    return True


ReadPiece = Callable[[StoredTensor, StoredPiece], Tensor]
"""Gives a piece of a tensor."""


@dataclass(frozen=True)
class Contents:
    """An open checkpoint."""

    save_id: str
    tensors: Mapping[str, StoredTensor]  # by key
    plain: Sequence[str]  # the keys of plain data
    value: Callable[[str], Any]  # plain data by key; None where there is none
    read: ReadPiece  # a piece of a tensor; a `CheckpointError` where it is damaged


Piece = tuple[str, Sequence[int], Box, Tensor]
"""The key and the shape of a tensor, a rectangle of it, and the values there."""


def write_pieces(file: Path, pieces: Sequence[Piece], go_on: Callable[[], None]) -> list[StoredTensor]:
    """Writes a safetensors file, unless there are no pieces.

    Args:
        file: to make.
        pieces: of the file.
        go_on: called before each; raises to stop.

    Returns:
        For each piece, its tensor with this piece alone.
    """
    if not pieces:
        return []
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(pieces, key=lambda piece: -piece[-1].itemsize)  # so that each lies at a multiple of its item's size
    for key, shape, box, value in ordered:
        code, form = _stored_form(value.dtype, value.shape)
        header[_name(key, shape, box)] = {"dtype": code, "shape": form, "data_offsets": [end, end := end + value.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written: dict[str, StoredTensor] = {}
    with open(file, "xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key, shape, box, value in ordered:
            go_on()
            data = _bytes_of(value)
            out.write(data)
            piece = StoredPiece(file.name, _name(key, shape, box), box.start, box.stop, zlib.crc32(data))
            written[piece.name] = StoredTensor(key, str(value.dtype).removeprefix("torch."), tuple(shape), (piece,))
        out.flush()
        os.fsync(out.fileno())
    return [written[_name(key, shape, box)] for key, shape, box, _ in pieces]


def open_contents(path: Path, index: Index, fetch: ReadPiece | None = None) -> Contents:
    """Opens a checkpoint of this form; ``fetch`` gives pieces in place of the files."""
    tensors = {tensor.key: tensor for tensor in index.tensors}

    @cache
    def opened(file: str) -> Any:
        found: Any = safe_open(path / file, framework="pt")
        names = {piece.name for tensor in index.tensors for piece in tensor.pieces if piece.file == file}
        if differing := sorted(names.symmetric_difference(found.keys())):
            raise SafetensorError(f"its header and the index differ in {differing[0]}")
        return found

    def read(tensor: StoredTensor, piece: StoredPiece) -> Tensor:
        if fetch is not None:
            return fetch(tensor, piece)
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        try:
            found: Tensor = opened(piece.file).get_tensor(piece.name)
        except (SafetensorError, OSError) as error:
            raise _damage(path, piece, str(error)) from error
        code, form = _stored_form(dtype, piece.box.shape)
        if (_stored_form(found.dtype, found.shape)) != (code, form):
            raise _damage(path, piece, f"{found.dtype}{list(found.shape)} instead of {code}{list(form)}")
        checksum = zlib.crc32(_bytes_of(found))
        if checksum != piece.crc32:
            raise _damage(path, piece, f"its checksum is {checksum:08x}, not {piece.crc32:08x}")
        return found if found.dtype == dtype else found.clone().view(dtype).reshape(piece.box.shape)

    def whole(key: str, is_cuda: bool) -> Tensor:
        found = read(tensors[key], tensors[key].pieces[0])
        return found.cuda() if is_cuda and torch.cuda.is_available() else found

    return Contents(index.save_id, tensors, tuple(index.plain), lambda key: from_plain(index.plain.get(key), whole), read)


def _damage(path: Path, piece: StoredPiece, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path / piece.file} is damaged ({piece.name}: {reason})",
        hint="the file was changed or damaged after it was written: take a copy of it, or another checkpoint",
    )


def _name(key: str, shape: Sequence[int], box: Box) -> str:
    """What a piece is called in its file: as its tensor, where it is all of that."""
    if box.shape == tuple(shape):
        return key
    return f"{key}[{', '.join(f'{start}:{stop}' for start, stop in zip(box.start, box.stop, strict=True))}]"


def _stored_form(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Type and shape in a file: as bytes, where safetensors has no such type."""
    try:
        spec = TensorSpec(dtype=str(dtype).removeprefix("torch."), shape=shape, data_ptr=0, data_len=0)
    except SafetensorError:
        return "U8", [prod(shape) * dtype.itemsize]
    return spec.dtype, spec.shape


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
