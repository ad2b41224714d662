"""Shares as rectangles, and checkpoints by them: whatever forms a tensor is written in, it is read in any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.examples import at_most
from tests.unit.runtime.checkpoint.test_checkpoint import ALONE
from whale.dry_run import LiveBytes
from whale.errors import CheckpointError
from whale.ir.graph import TensorSpec
from whale.ir.serialization import from_json
from whale.runtime.checkpoint.boxes import Box, Share, boxes
from whale.runtime.checkpoint.checkpoint import Extras, load
from whale.runtime.checkpoint.contents import Index, StoredTensor
from whale.runtime.checkpoint.saving import save
from whale.runtime.state.optimizer_state import OptimizerState
from whale.sharding.index_sets import Runs, merged

torch.set_num_threads(1)
NAME = "layer.weight"
Division = tuple[tuple[Runs, ...], ...]
"""Per rank, the positions of every dimension that it holds; together each element once."""


def runs_of(positions: Sequence[int]) -> Runs:
    return merged((position, position + 1) for position in positions)


def take(whole: Tensor, positions: Sequence[Runs]) -> Tensor:
    """What a product of runs holds, the plain way."""
    for dim, runs in enumerate(positions):
        places = [place for start, stop in runs for place in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(places, dtype=torch.int64))
    return whole


def comb(size: int, num_ranks: int) -> Division:
    """Rows dealt out like cards."""
    return tuple((runs_of(range(rank, size, num_ranks)), ((0, 3),)) for rank in range(num_ranks))


@st.composite
def divisions(draw: Callable[..., Any], shape: tuple[int, ...]) -> Division:
    """Any division along any one dimension: uneven, in runs or combs, with ranks that hold nothing."""
    dim = draw(st.integers(0, len(shape) - 1))
    num_ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=shape[dim], max_size=shape[dim]))
    if draw(st.booleans()):
        owners.sort()
    whole: tuple[Runs, ...] = tuple(((0, size),) for size in shape)
    held = [runs_of([place for place, owner in enumerate(owners) if owner == rank]) for rank in range(num_ranks)]
    return tuple((*whole[:dim], runs, *whole[dim + 1 :]) for runs in held)


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def two_divisions(draw: Callable[..., Any]) -> tuple[tuple[int, ...], Division, Division]:
    shape = draw(SHAPES)
    return shape, draw(divisions(shape)), draw(divisions(shape))


def number(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(prod(shape))).reshape(shape)


def write(path: Path, whole: Tensor, division: Division | None) -> None:
    """Writes a tensor and its average in the pieces of a division, or whole as if nobody cut anything."""
    everything: tuple[Runs, ...] = tuple(((0, size),) for size in whole.shape)
    share = None if division is None else Share(tuple(whole.shape), everything, tuple(piece for piece in division if all(piece)))
    save(
        path,
        tensors={NAME: whole},
        optimizer=OptimizerState({NAME: {"exp_avg": -whole, "step": torch.tensor(5.0)}}, {NAME: {"lr": 0.5}}),
        extras=Extras({"step": 5}),
        writers={NAME: 0},
        world=ALONE,
        shares={} if share is None else {NAME: share},
    ).finish()


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """What lies in a checkpoint, by key."""
    return {tensor.key: tensor for tensor in from_json(Index, (path / "index.json").read_text()).tensors}


def read(path: Path, shape: tuple[int, ...], held: tuple[Runs, ...]) -> tuple[Tensor, OptimizerState]:
    """What a rank that holds this part gets."""
    share = Share(shape, held)
    own = torch.full(share.local_shape, torch.nan)
    state, extras = load(
        path, tensors={NAME: own}, specs={NAME: TensorSpec(shape, "float32", (0,) * len(shape))}, world=ALONE, shares={NAME: share}
    )
    assert extras.shared == {"step": 5} and state.options == {NAME: {"lr": 0.5}} and state.state[NAME]["step"] == 5
    return own, state


@given(two_divisions())
def test_boxes_and_their_local_places_make_up_what_is_held(case: tuple[tuple[int, ...], Division, Division]) -> None:
    shape, written, held = case
    whole = number(shape)
    for positions in held:
        share = Share(shape, positions, written)
        own, found = take(whole, positions), torch.full(shape, torch.nan)
        assert own.shape == share.local_shape
        for box in boxes(positions):
            box.of(found).copy_(share.local(box).of(own))
        assert torch.equal(take(found, positions), own)
        assert int(found.isfinite().sum()) == own.numel()
        covered = torch.zeros(shape)
        for box in share.written_boxes():
            box.of(covered).add_(1)
            common = share.overlap(box)
            for part in boxes(common) if common is not None else ():
                assert torch.equal(share.local(part).of(own), part.of(whole))
        assert covered.eq(1).all()


@at_most(25)
@given(two_divisions())
def test_any_division_reads_what_any_other_wrote(case: tuple[tuple[int, ...], Division, Division]) -> None:
    shape, written, held = case
    whole = number(shape)
    with TemporaryDirectory() as folder:
        write(Path(folder) / "c", whole, written)
        for positions in held:
            own, state = read(Path(folder) / "c", shape, positions)
            assert torch.equal(own, take(whole, positions))
            assert torch.equal(state.state[NAME]["exp_avg"], -take(whole, positions))


@pytest.mark.parametrize("division", [None, comb(12, 3)])
def test_whole_tensors_and_pieces_are_one_format(tmp_path: Path, division: Division | None) -> None:
    whole = number((12, 3))
    write(tmp_path / "c", whole, division)
    for positions in (*comb(12, 2), (((0, 12),), ((1, 2),))):
        assert torch.equal(read(tmp_path / "c", (12, 3), positions)[0], take(whole, positions))
    in_file = load_file(tmp_path / "c" / "rank_0.safetensors")  # by safetensors alone
    if division is None:
        assert torch.equal(in_file[f"model.{NAME}"], whole) and torch.equal(in_file[f"optimizer.{NAME}.exp_avg"], -whole)
    else:
        assert torch.equal(in_file[f"model.{NAME}[3:4, 0:3]"], whole[3:4])


def test_pieces_are_rectangles_of_the_whole_each_written_once(tmp_path: Path) -> None:
    write(tmp_path / "c", number((12, 3)), ((((0, 4), (6, 10)), ((0, 3),)), (((4, 6), (10, 12)), ((0, 3),))))
    stored = stored_tensors(tmp_path / "c")[f"model.{NAME}"]
    assert stored.shape == (12, 3)
    assert sorted((piece.start[0], piece.stop[0]) for piece in stored.pieces) == [(0, 4), (4, 6), (6, 10), (10, 12)]


def test_reading_a_part_needs_few_stored_pieces_at_a_time(tmp_path: Path) -> None:
    """What it holds, twice (the optimizer's room is new); one stored piece, the next, and what of it is wanted with what lies between."""
    num_rows, width, size = 256, 128, 4
    whole = torch.zeros(num_rows, width)
    columns: tuple[Runs, ...] = (((0, num_rows),), ((0, width),))
    rows = tuple((((start, start + 32),), columns[1]) for start in range(0, num_rows, 32))
    cases = {"run": (((64, 128),), columns[1]), "comb": (runs_of(range(0, num_rows, 4)), columns[1]), "columns": (columns[0], ((5, 37),))}
    for name, division in (("whole", (columns,)), ("pieces", rows)):
        write(tmp_path / name, whole, division)
        piece = max(prod(Share((num_rows, width), part).local_shape) for part in division) * size
        for positions in cases.values():
            held = prod(Share((num_rows, width), positions).local_shape) * size
            with LiveBytes() as memory:
                read(tmp_path / name, (num_rows, width), positions)
            assert memory.peak <= 2 * held + 3 * piece + 1024


def test_writing_pieces_needs_no_more_than_they_are(tmp_path: Path) -> None:
    whole = torch.zeros(256, 128)
    columns = tuple((((0, 256),), ((start, start + 16),)) for start in range(0, 128, 16))
    with LiveBytes() as memory:
        write(tmp_path / "c", whole, columns)
    assert memory.peak - whole.nbytes <= 2 * whole.nbytes // 8 + 1024  # the average is made here; columns are copied, a piece at a time


def test_a_part_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", number((12, 3)), comb(12, 2))
    with pytest.raises(CheckpointError, match=r"float32\[12, 3\] in the checkpoint, float32\[12, 4\] in the model"):
        read(tmp_path / "c", (12, 4), (((0, 6),), ((0, 4),)))


def test_a_share_that_another_holds_too_is_not_written(tmp_path: Path) -> None:
    share = Share((4,), (((0, 2),),), ((((1, 2),),),))
    assert [box.start for box in share.written_boxes()] == [(1,)]
    assert share.local(Box((1,), (2,))) == Box((1,), (2,))
    assert list(replace(share, written=()).written_boxes()) == []
