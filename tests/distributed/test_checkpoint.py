"""Checkpoints among ranks: any split of the tensors over any number of ranks reads any other's."""

from __future__ import annotations

import errno
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.world import RankFailure, World
from tests.unit.runtime.checkpoint.test_damage import killed_at
from whale.comm import connect
from whale.errors import CheckpointError, RuntimeFault
from whale.ir.graph import TensorSpec
from whale.ir.serialization import from_json
from whale.runtime.checkpoint import contents
from whale.runtime.checkpoint.checkpoint import Extras, load
from whale.runtime.checkpoint.contents import Index
from whale.runtime.checkpoint.saving import save
from whale.runtime.state.optimizer_state import OptimizerState

NAMES = [f"layer.{number}.weight" for number in range(6)]
Owners = dict[str, tuple[int, ...]]
ONE: Owners = dict.fromkeys(NAMES, (0,))
STAGES: Owners = {name: (number // 3,) for number, name in enumerate(NAMES)}
NESTED: Owners = {name: (number // 3, number // 3 + 2) for number, name in enumerate(NAMES)}
UNLIKE: Owners = {name: tuple(sorted({number % 3, 3})) for number, name in enumerate(NAMES)}


def value(name: str) -> Tensor:
    return torch.arange(6.0).reshape(2, 3) + 100 * NAMES.index(name)


def specs() -> dict[str, TensorSpec]:
    return {name: TensorSpec((2, 3), "float32", (0, 0)) for name in NAMES}


def write(rank: int, num_ranks: int, path: str, owners: Owners) -> None:
    own = {name: value(name) if ranks[0] == rank else torch.zeros(2, 3) for name, ranks in owners.items() if rank in ranks}
    options = {"lr": 0.5}
    optimizer = OptimizerState({name: {"exp_avg": -own[name], "step": 4} for name in own}, dict.fromkeys(own, options))
    extras = Extras({"step": 4, "from": rank} if own else {}, {"random": rank * 10})
    writers = {name: ranks[0] for name, ranks in owners.items()}
    save(Path(path), tensors=own, optimizer=optimizer, extras=extras, writers=writers, world=connect(60), plan="plan").finish()


def read(rank: int, num_ranks: int, path: str, owners: Owners) -> dict[str, Any]:
    own = {name: torch.zeros(2, 3) for name, ranks in owners.items() if rank in ranks}
    optimizer, extras = load(Path(path), tensors=own, specs=specs(), world=connect(60))
    assert optimizer.options == {name: {"lr": 0.5} for name in own}
    assert all(torch.equal(own[name], value(name)) for name in own)
    assert all(torch.equal(optimizer.state[name]["exp_avg"], -value(name)) and optimizer.state[name]["step"] == 4 for name in own)
    assert optimizer.state.keys() == own.keys() and extras.shared == {"step": 4, "from": 0}
    return dict(extras.own)


PLANS = [(ONE, 1), (STAGES, 2), (NESTED, 4), (UNLIKE, 4), (STAGES, 3)]


@pytest.mark.parametrize(("owners", "num_ranks"), PLANS)
def test_any_plan_reads_any_plans_checkpoint(world: World, tmp_path: Path, owners: Owners, num_ranks: int) -> None:
    path = str(tmp_path / "c")
    world.run(write, path, owners, num_ranks=num_ranks)
    for other, other_ranks in PLANS:
        found = world.run(read, path, other, num_ranks=other_ranks)
        assert found == [{"random": rank * 10} if rank < num_ranks else {} for rank in range(other_ranks)]


def test_each_tensor_is_written_once(world: World, tmp_path: Path) -> None:
    world.run(write, str(tmp_path / "c"), NESTED)
    index = from_json(Index, (tmp_path / "c" / "index.json").read_text())
    assert all(len(tensor.pieces) == 1 for tensor in index.tensors)
    assert {tensor.pieces[0].file for tensor in index.tensors} == {"rank_0.safetensors", "rank_1.safetensors"}


def break_one(rank: int, num_ranks: int, path: str) -> str:
    own = {name: torch.zeros(2, 3) for name, ranks in NESTED.items() if rank in ranks}
    shapes = specs()
    if rank == 2:
        shapes["more"] = TensorSpec((1,), "float32", (0,))
    try:
        load(Path(path), tensors=own, specs=shapes, world=connect(60))
    except CheckpointError as error:
        return error.message
    return "loaded"


def test_where_one_rank_cannot_load_all_say_so(world: World, tmp_path: Path) -> None:
    world.run(write, str(tmp_path / "c"), NESTED)
    messages = world.run(break_one, str(tmp_path / "c"))
    assert "is a checkpoint of another model" in messages[2]
    assert all(message.startswith("rank 2: ") and "is a checkpoint of another model" in message for message in (*messages[:2], messages[3]))


def read_unlike_ones(rank: int, num_ranks: int, paths: list[str]) -> str:
    own = {name: torch.zeros(2, 3) for name, ranks in NESTED.items() if rank in ranks}
    with pytest.raises(CheckpointError) as caught:
        load(Path(paths[rank // 2]), tensors=own, specs=specs(), world=connect(60))
    assert all(not value.any() for value in own.values())
    return caught.value.message


def test_ranks_that_load_unlike_checkpoints_all_say_so(world: World, tmp_path: Path) -> None:
    paths = [str(tmp_path / "step_1"), str(tmp_path / "step_2")]
    for path in paths:
        world.run(write, path, NESTED)
    messages = world.run(read_unlike_ones, paths)
    assert messages == [f"ranks load different checkpoints (rank 0: {paths[0]}, rank 2: {paths[1]})"] * 4


def write_beside(rank: int, num_ranks: int, path: str) -> str:
    place = Path(path)
    tensors = {name: value(name) for name in NAMES if STAGES[name] == (rank,)}
    writers = {name: ranks[0] for name, ranks in STAGES.items()}

    def fail(_: Tensor) -> memoryview:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        contents._bytes_of = fail
    saving = save(place, tensors=tensors, optimizer=OptimizerState(), extras=Extras(), writers=writers, world=connect(60), copies=True)
    while rank == 0 and any(place.parent.iterdir()):  # removed as soon as rank 0 knows, whoever waits for it
        sleep(0.01)
    try:
        saving.finish()
    except CheckpointError as error:
        return error.message
    return "saved"


def test_where_one_rank_cannot_write_beside_the_training_all_say_so(world: World, tmp_path: Path) -> None:
    message = f"{tmp_path / 'c'} cannot be written: the disk is full"
    assert world.run(write_beside, str(tmp_path / "c"), num_ranks=2) == [f"rank 1: {message}", message]
    assert not list(tmp_path.iterdir())


def die_while_writing(rank: int, num_ranks: int, path: str, moment: int) -> None:
    if rank == 1:
        killed_at(moment, Path(path).parent, lambda: write(rank, num_ranks, path, STAGES))
    else:
        with pytest.raises(RuntimeFault):
            write(rank, num_ranks, path, STAGES)


@pytest.mark.parametrize("moment", [0, 2])
def test_a_rank_that_dies_leaves_the_previous_one(world: World, tmp_path: Path, moment: int) -> None:
    path = str(tmp_path / "c")
    world.run(write, path, ONE, num_ranks=1)
    with pytest.raises(RankFailure) as caught:
        world.run(die_while_writing, path, moment, num_ranks=2)
    assert caught.value.texts.keys() == {1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    world.run(read, path, STAGES, num_ranks=2)


def write_to_a_file(rank: int, num_ranks: int, path: str) -> None:
    save(Path(path), tensors={}, optimizer=OptimizerState(), extras=Extras(), writers={}, world=connect(60)).finish()


def test_where_the_path_cannot_be_written_all_ranks_say_so(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RankFailure) as caught:
            world.run(write_to_a_file, str(path))
        assert len(caught.value.errors) == 4 and all(isinstance(error, CheckpointError) for error in caught.value.errors.values())
