"""A save: the state is copied by the caller's thread and written by a thread of each rank, without communication.

caller     snapshot | the next steps ...
rank 0              | own part | waits until the folder has those of the others | index, marker, rename | removes older checkpoints
rank 1              | own part |

A save that the caller waits for is the same without the copy.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from whale.comm import World, close_at_exit, on_first_rank, together
from whale.errors import CheckpointError, WhaleError
from whale.ir.serialization import read_value, to_json
from whale.runtime.checkpoint.boxes import Box, Share
from whale.runtime.checkpoint.checkpoint import MODEL, Extras
from whale.runtime.checkpoint.contents import Index, Piece, write_pieces
from whale.runtime.checkpoint.files import INDEX, PLAN, aside, complete, keep_newest, write_text, writing_aside
from whale.runtime.checkpoint.plain_data import is_plain_tensor, to_plain
from whale.runtime.state.optimizer_state import OptimizerState
from whale.units import listed

T = TypeVar("T")

LOOK_SECONDS = 0.05
"""So often rank 0 looks for the parts of the others."""


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
    copies: bool = False,
    keep: int | None = None,
    score: float | None = None,
) -> Saving:
    """Begins to write a checkpoint; all ranks of the world call it together.

    It is written aside and renamed when complete; what stood at the path before is kept until then.

    Args:
        path: a folder of the checkpoint's own, that all ranks see.
        tensors: the parameters and buffers that this rank owns, by name.
        optimizer: its optimizer's state.
        extras: plain data.
        writers: per name, the rank that writes the tensor and its optimizer state; the same on all ranks. Of a tensor that is
            held in parts it writes only what is not divided with it.
        world: this process among its peers.
        plan: text of ``plan.json``.
        shares: of the tensors that some rank holds only a part of, by name, where this rank's part lies and what it writes of it.
        copies: whether tensors may change before it is complete.
        keep: how many checkpoints stay in the parent folder; None for all.
        score: of this one: that with the least stays too. One that is not finite is none.

    Raises:
        CheckpointError: it cannot be begun; the same on all ranks, and the previous one is intact.
    """

    def prepare() -> tuple[list[Piece], dict[str, Any]]:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} is not a number of checkpoints from 1")
        pieces, plain = snapshot(tensors, optimizer, extras, writers, world.rank, shares or {})
        found = [(key, shape, box, _on_host(value)) for key, shape, box, value in pieces] if copies else pieces
        for device in {value.device for *_, value in pieces if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return found, plain

    pieces, plain = together(world, prepare)
    with ExitStack() as folder:  # on rank 0
        save_id = on_first_rank(world, lambda: writing(path, lambda: folder.enter_context(writing_aside(path))))
        saving = Saving(path, save_id, world, folder.pop_all())
    part = Index(save_id, (), plain)
    ends = [lambda: saving.write(pieces, part)]
    if world.rank == 0:
        finite = score if score is not None and isfinite(score) else None
        ends.append(lambda: saving.complete(plan, keep, finite))
    saving.start(*ends)
    if copies:
        _UNFINISHED.add(saving)
        close_at_exit(saving)
    return saving


@dataclass(eq=False)
class Saving:
    path: Path
    save_id: str  # in the name of what is written aside: no other save writes there
    world: World
    folder: ExitStack  # closing it removes what is left aside; empty on ranks other than 0
    _given_up: threading.Event = field(default_factory=threading.Event)
    _done: list[Future[None]] = field(default_factory=list)

    def start(self, *ends: Callable[[], None]) -> None:
        """Lets a thread do this, one after the other; the interpreter does not end before it."""
        thread = ThreadPoolExecutor(1, "whale checkpoint")
        for end in ends:  # one at a time: the last reads the result of the first
            self._done.append(thread.submit(writing, self.path, end))
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """Waits until the checkpoint is complete; all ranks of the world call it together.

        Raises:
            CheckpointError: it cannot be written; the same on all ranks, and the previous one is intact.
        """
        _UNFINISHED.discard(self)
        try:
            together(self.world, self._done[0].result)
            on_first_rank(self.world, self._done[-1].result)
        except BaseException:
            self._given_up.set()
            wait(self._done)
            raise

    def close(self) -> None:
        """At the end of the interpreter: waits if nobody has; where the save failed, the process fails."""
        if self not in _UNFINISHED:
            return
        try:
            self.finish()
        except WhaleError as error:
            print(f"whale: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def write(self, pieces: Sequence[Piece], part: Index) -> None:
        """Writes a rank's part; its index comes last."""
        name = aside(self.path, self.save_id) / f"rank_{self.world.rank}"
        if not name.parent.is_dir():
            raise CheckpointError(
                f"rank {self.world.rank} does not see {name.parent}, which rank 0 made",
                hint="save to a file system that all hosts share",
            )
        try:
            tensors = write_pieces(name.with_suffix(".safetensors"), pieces, self._go_on)
            write_text(name.with_suffix(".part"), to_json(Index(part.save_id, tuple(tensors), part.plain)))
            name.with_suffix(".part").rename(name.with_suffix(".json"))
        except BaseException:
            with suppress(OSError):  # else rank 0 finds out when it has waited for long enough
                name.with_suffix(".safetensors").unlink(missing_ok=True)
                name.with_suffix(".failed").touch()
            raise

    def complete(self, plan: str | None, keep: int | None, score: float | None) -> None:
        """On rank 0: makes a checkpoint of the parts, and removes older ones."""
        with self.folder:
            self._done[0].result()
            files = [aside(self.path, self.save_id) / f"rank_{rank}.json" for rank in range(self.world.size)]
            self._wait_for(files)
            parts = [read_value(Index, file) for file in files]
            assert all(part.save_id == self.save_id for part in parts), "the folder is this save's own"
            index = Index.of(parts)
            for file in files:
                file.unlink()
            texts = {INDEX: to_json(index), **({} if plan is None else {PLAN: plan})}
            complete(self.path, self.save_id, index.files, texts, score=score, step=index.step)
        if keep is not None:
            keep_newest(self.path, keep)

    def _wait_for(self, files: Sequence[Path]) -> None:
        limit = monotonic() + self.world.timeout.total_seconds()
        while True:
            there = set(os.listdir(aside(self.path, self.save_id)))  # a network's file system may answer `exists` from what it knew
            missing = [rank for rank, file in enumerate(files) if file.name not in there]
            if not missing:
                return
            if failed := [rank for rank in missing if files[rank].with_suffix(".failed").name in there]:
                raise CheckpointError(f"{listed('rank', failed)} failed to write a part of the checkpoint {self.path}")
            self._go_on()
            if monotonic() > limit:
                raise CheckpointError(
                    f"{listed('rank', missing)} did not write a part of the checkpoint {self.path} within communication.timeout_seconds "
                    f"({self.world.timeout.total_seconds():g})",
                    hint="their own output says whether they failed; if their disks are slow, raise communication.timeout_seconds",
                )
            self._given_up.wait(LOOK_SECONDS)

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise CheckpointError(f"{self.path} was abandoned before it was complete")


_UNFINISHED: set[Saving] = set()
"""Saves that have not been waited for yet."""


def snapshot(
    tensors: Mapping[str, Tensor],
    optimizer: OptimizerState,
    extras: Extras,
    writers: Mapping[str, int],
    rank: int,
    shares: Mapping[str, Share],
) -> tuple[list[Piece], dict[str, Any]]:
    """What a rank answers for: pieces of tensors, and plain data by key."""
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

    def pieces() -> Iterator[Piece]:
        for name, tensor in tensors.items():
            own = {f"optimizer.{name}.{key}": value for key, value in optimizer.state.get(name, {}).items() if is_plain_tensor(value)}
            for key, value in {f"{MODEL}{name}": tensor, **own}.items():
                share = shares.get(name) if value.shape == tensor.shape else None
                if share is not None:
                    yield from ((key, share.shape, box, share.local(box).of(value.detach())) for box in share.written_boxes())
                elif name in mine:
                    yield _whole(key, value)
        yield from (_whole(key, value) for key, value in inner.items())

    return list(pieces()), data


def _whole(key: str, tensor: Tensor) -> Piece:
    return key, tensor.shape, Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()


def _on_host(value: Tensor) -> Tensor:
    """A copy in host memory; of a GPU's tensor it may still be on its way."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda).copy_(value, non_blocking=True)


def writing(path: Path, action: Callable[[], T]) -> T:
    """Runs a part of the work on files, with the system's failures as ours."""
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} cannot be written: a path has no NUL character")
    try:
        return action()
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from error
