"""The last whole step of ranks that lose their peers: parts of a checkpoint in shared memory of each host, for a run that goes on.

    rank 0 and 1 hold the first half, 2 the second     rank 1 dies     0 and 2 keep what they hold     both halves are there: it goes on
    rank 2 dies                                                        0 and 1 keep the first half     it goes on from the last checkpoint

A rank writes without communication; it may have no peers left. Some have done the update of the step in flight, others have not: the
last step of which all pieces exist is read. Of replicas one survivor has all.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.comm import World, together
from whale.comm.waiting import Launched
from whale.errors import CheckpointError, first_few
from whale.ir.serialization import read_value, to_json
from whale.runtime.checkpoint.boxes import Share
from whale.runtime.checkpoint.checkpoint import MODEL
from whale.runtime.checkpoint.contents import Contents, Index, Piece, StoredPiece, StoredTensor, open_contents, write_pieces
from whale.runtime.checkpoint.files import write_text
from whale.runtime.checkpoint.saving import writing
from whale.runtime.execute.status import FALL
from whale.units import format_bytes

DEVICES = "devices"
"""The key of what there was to plan for."""

LACKS, PURPOSE = "lacks", "purpose"
"""The keys of what a part cannot say by itself, running statistics that were not merged; and of whom it is for."""


def keep_part(
    folder: Path,
    save_id: str,
    purpose: str,
    pieces: Sequence[Piece],
    plain: Mapping[str, Any],
    *,
    rank: int,
    lacks: Sequence[str] = (),
) -> int:
    """Writes what a rank has of a step, while its peers may be gone; the number of bytes.

    Args:
        folder: in memory of this host.
        save_id: equal on all ranks of the engine, different for each step.
        purpose: tells the engine from others of the script.
        pieces, plain: as `snapshot` gives them.
        rank: of the world.
        lacks: tensors of which this rank's values are not those that all ranks together would have.

    Raises:
        CheckpointError: there is no room.
    """
    size = sum(value.nbytes for *_, value in pieces)
    name = folder / f"{save_id}_{rank}.json"

    def write() -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if size > (free := disk_usage(folder).free):
            raise CheckpointError(f"{folder} has no room for the state of rank {rank} ({format_bytes(size)}; free: {format_bytes(free)})")
        data = name.with_suffix(".safetensors")
        try:
            stored = write_pieces(data, pieces, lambda: None)
            write_text(name.with_suffix(".part"), to_json(Index(save_id, tuple(stored), {**plain, LACKS: list(lacks), PURPOSE: purpose})))
            name.with_suffix(".part").rename(name)
        except FileExistsError:  # of the same step, from before: it stays
            raise
        except BaseException:
            data.unlink(missing_ok=True)
            name.with_suffix(".part").unlink(missing_ok=True)
            raise

    writing(name, write)
    return size


@dataclass(frozen=True)
class SurvivingState:
    """A step of which all pieces exist."""

    index: Index  # of the pieces, each once
    parts: Mapping[str, Index] = field(repr=False)  # what each rank left, by file
    readers: Mapping[str, tuple[int, ...]] = field(repr=False)  # per file, the ranks that can read it
    folder: Path  # on this host

    def value(self, key: str) -> Any:
        """Plain data without tensors, by key."""
        return self.index.plain.get(key)

    @property
    def step(self) -> int:
        return int(self.value("extra.step"))

    @property
    def num_parts(self) -> int:
        return len(self.readers)

    def open(self, tensors: Mapping[str, Tensor], shares: Mapping[str, Share], world: World) -> Contents:
        """Brings what this rank reads and other hosts have; all ranks of the world call it.

        Raises:
            CheckpointError: a part is damaged; on all ranks.
        """
        files = {file: open_contents(self.folder, part) for file, part in self.parts.items() if world.rank in self.readers[file]}
        stored = {piece.name + piece.file: (tensor, piece) for tensor in self.index.tensors for piece in tensor.pieces}
        away = [
            piece.name + piece.file
            for tensor, piece in stored.values()
            if world.rank not in self.readers[piece.file] and _wants(tensor, piece, tensors, shares)
        ]
        wanted: list[Any] = world.gather_objects(away)
        ways = [(key, self.readers[stored[key][1].file][0], rank) for rank, keys in enumerate(wanted) for key in keys]
        brought: dict[str, Tensor] = {}

        def read(tensor: StoredTensor, piece: StoredPiece) -> Tensor:
            key = piece.name + piece.file
            return brought[key] if key in brought else files[piece.file].read(tensor, piece)

        sent = together(world, lambda: {key: read(*stored[key]) for key, source, _ in ways if source == world.rank})
        for key, source, target in ways:
            tensor, piece = stored[key]
            if world.rank == source:
                _travel(world, sent[key].contiguous(), source, target, piece)
            elif world.rank == target:
                room = torch.empty(piece.box.shape, dtype=getattr(torch, tensor.dtype))
                brought[key] = _travel(world, room, source, target, piece)

        return open_contents(self.folder, self.index, read)


def _wants(tensor: StoredTensor, piece: StoredPiece, tensors: Mapping[str, Tensor], shares: Mapping[str, Share]) -> bool:
    """Whether a rank that holds these tensors reads a piece; what lies in plain data all read."""
    section, _, rest = tensor.key.partition(".")
    if section not in ("model", "optimizer"):
        return True
    name = rest if section == "model" else rest.rpartition(".")[0]
    share = shares.get(name)
    return name in tensors and (share is None or share.shape != tensor.shape or share.overlap(piece.box) is not None)


def _travel(world: World, values: Tensor, source: int, target: int, piece: StoredPiece) -> Tensor:
    flat = values.reshape(-1).view(torch.uint8)
    if flat.numel():
        action, is_source = f"fetching {piece.name}, which another host kept", world.rank == source
        with world.waits.speaking(action, [target if is_source else source]):
            work = dist.isend(flat, target) if is_source else dist.irecv(flat, source)
        assert work is not None
        world.waits.wait(Launched(work, blocks_host=True), action, [target if is_source else source])
    return values


def find_kept(folder: Path, purpose: str, names: Sequence[str], world: World) -> tuple[SurvivingState | None, str]:
    """The last step of which all pieces are in memory of the hosts that are there; all ranks of the world call it.

    Args:
        folder: of this host.
        purpose: what the parts were kept for.
        names: of the model's parameters and buffers.
        world: this process among its peers.

    Returns:
        The step, or None; and why no later one serves, empty where nothing was kept or the last one serves.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    seen: list[Any] = world.gather_objects((f"{socket.gethostname()}:{folder}", [file.name for file in files]))
    is_first = world.rank == next(rank for rank, (host, _) in enumerate(seen) if host == seen[world.rank][0])
    own: dict[str, Index] = {}
    for file in files if is_first else ():
        if (part := _part(file)) is not None and part.plain.get(PURPOSE) == purpose:
            own[file.name] = part
    parts: dict[str, Index] = {}
    for read in world.gather_objects(own):
        assert isinstance(read, dict)
        parts |= read
    readers = {name: tuple(rank for rank, (_, there) in enumerate(seen) if name in there) for name in parts}
    reason, last = "", 0
    saves = {index.save_id: int(index.plain["extra.step"]) for index in parts.values()}
    for save_id, step in sorted(saves.items(), key=lambda item: -item[1]):
        ours = {name: index for name, index in parts.items() if index.save_id == save_id}
        whole = _merged([ours[name] for name in sorted(ours, key=lambda name: readers[name][0])])
        there = {tensor.key for tensor in whole.tensors if sum(prod(piece.box.shape) for piece in tensor.pieces) == prod(tensor.shape)}
        missing = [name for name in names if f"{MODEL}{name}" not in there]
        missing += [tensor.key for tensor in whole.tensors if tensor.key not in there and not tensor.key.startswith(MODEL)]
        lacks = sorted({name for index in ours.values() for name in index.plain[LACKS]})
        if not missing and not lacks:
            by_file = {Path(name).with_suffix(".safetensors").name: name for name in ours}
            there_are = {file: ours[name] for file, name in by_file.items()}
            found = SurvivingState(whole, there_are, {file: readers[name] for file, name in by_file.items()}, folder)
            return found, reason if last > step else ""
        what = f"no rank is left that holds all of {first_few(missing)}" if missing else f"running statistics were not merged ({lacks[0]})"
        if not reason:
            reason, last = f"step {step} cannot be restored from memory: {what}", step
    return None, reason


def _merged(parts: Sequence[Index]) -> Index:
    """Of what several ranks hold, each piece once."""
    tensors: dict[str, StoredTensor] = {}
    pieces: dict[str, dict[tuple[object, object], StoredPiece]] = {}
    plain: dict[str, Any] = {}
    for part in parts:
        for tensor in part.tensors:
            tensors.setdefault(tensor.key, tensor)
            for piece in tensor.pieces:
                pieces.setdefault(tensor.key, {}).setdefault((piece.start, piece.stop), piece)
        plain = {**part.plain, **plain}
    whole = tuple(StoredTensor(key, one.dtype, one.shape, tuple(pieces[key].values())) for key, one in tensors.items())
    return Index(parts[0].save_id, whole, plain)


def _part(file: Path) -> Index | None:
    """What a rank has left; None where it is of another form, and counts for nothing."""
    with suppress(OSError, ValueError):
        return read_value(Index, file)
    return None


def forget_kept(folder: Path, purpose: str) -> None:
    """Removes what was kept on this host, and when ranks fell."""
    (folder / FALL).unlink(missing_ok=True)
    for file in folder.glob("*.json") if folder.is_dir() else ():
        if (part := _part(file)) is not None and part.plain.get(PURPOSE) == purpose:
            file.unlink(missing_ok=True)
            file.with_suffix(".safetensors").unlink(missing_ok=True)
