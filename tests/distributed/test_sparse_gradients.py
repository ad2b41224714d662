"""Sparse gradients are summed as values and indices: a training equals that of one process."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.captures import captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World

NUM_ROWS, NUM_STEPS, NUM_WORDS = 10, 5, 40
TABLES = ("words.weight", "bags.weight")


class Words(nn.Module):
    """A table that is looked up twice, and perhaps one whose rows are summed in bags, which every device computes for all."""

    def __init__(self, has_bags: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 4, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(NUM_WORDS, 4, sparse=True, mode="sum") if has_bags else None
        self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        found = self.words(ids).mean(1) * self.words(others).sum(1)
        found = found if self.bags is None else found + self.bags(ids)
        output: Tensor = self.last(self.inner(found).tanh())
        return output


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def make_batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids, others = (torch.randint(NUM_WORDS, (NUM_ROWS, count), generator=random) for count in (3, 2))
    if seed == 3:  # no row has a gradient
        ids, others = torch.zeros_like(ids), torch.zeros_like(others)
    return {"ids": ids, "others": others, "y": torch.randn(NUM_ROWS, 2, generator=random, dtype=torch.float64)}


def build(kind: str) -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(5)
    with whale.split(2) if kind == "split" else nullcontext():
        model = Words(kind == "bags").double()
    return model, make_batch(0), loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "adam": {"words*": torch.optim.SparseAdam, "*": torch.optim.AdamW},
}


@dataclass(frozen=True)
class Case:
    """How the model is trained.

    Attributes:
        optimizer: one of `OPTIMIZERS`.
        speeds: of the devices.
        settings: of the plan.
        clip: the largest norm of the gradients.
        then: before the third step: ``load`` of a checkpoint, or ``replan``; or "".
        passes: batches of an update.
        kind: of the model: ``bags``, ``split`` on two devices, or ``words`` alone.
    """

    optimizer: str
    speeds: tuple[float, ...] = (1.0, 1.0)
    settings: tuple[tuple[str, Any], ...] = ()
    clip: float | None = None
    then: str = ""
    passes: int = 1
    kind: str = "words"


STAGES = (("pipeline.num_stages", 2), ("pipeline.num_micro_batch", 2))
CASES = (
    Case("sgd", (1.0,), (("pipeline.num_micro_batch", 2),), clip=0.05, passes=2, kind="bags"),
    Case("sgd", (1.0, 3.0), clip=0.05, then="replan"),
    Case("adagrad", (1.0, 1.0), kind="bags"),
    Case("adagrad", (1.0, 1.0, 1.0, 1.0), kind="split"),
    Case("adagrad", (1.0, 1.0, 2.0), (("pipeline.num_micro_batch", 2), ("memory.zero", "2")), passes=2),
    Case("adam", (1.0, 1.0), (("memory.zero", "3"),), then="load"),
    Case("adam", (1.0, 1.0), (("memory.offload", "optimizer"),)),
    Case("adam", (1.0,) * 4, (*STAGES, ("pipeline.schedule", "zb_h1")), then="replan"),
    Case("sgd", (1.0,) * 4, (*STAGES, ("recompute.policy", "full")), clip=0.05),
)


def prepare(kind: str) -> None:
    captured_once(build, kind).capture()


def train(rank: int, num_ranks: int, case: Case, folder: str) -> dict[str, Tensor]:
    made, more = captured_once(build, case.kind), {"planning.search": "off", "gradient.clip_norm": case.clip}
    config = {"memory.zero": "0", **dict(case.settings), **more}
    engine = whale.parallelize(
        made.model, loss=loss, optimizer=OPTIMIZERS[case.optimizer], batch=made.batch, config=config, cluster=make_cluster(case.speeds)
    )
    for step in range(NUM_STEPS):
        if step == 2 and case.then == "load":
            engine.save(Path(folder) / "checkpoint")
            engine.load(Path(folder) / "checkpoint")
        elif step == 2 and case.then == "replan":
            engine.replan(engine.plan)
        for number in range(case.passes):
            engine.forward_backward(make_batch(step * case.passes + number))
        tables = [own for name, own in engine.state.kept.items() if name in TABLES]
        assert all(own.grad is not None and own.grad.is_sparse for own in tables)
        engine.update()
    state = engine.state_dict()
    assert state is not None
    found = {name: value.clone() for name, value in state.items()}
    engine.close()
    return found


def plain(case: Case) -> dict[str, Tensor]:
    """The same in one process, with the whole batch."""
    model = build(case.kind)[0]
    tables = [own for name, own in model.named_parameters() if name in TABLES]
    others = [own for name, own in model.named_parameters() if name not in TABLES]
    wanted = OPTIMIZERS[case.optimizer]
    steps = [wanted["words*"](tables), wanted["*"](others)] if isinstance(wanted, dict) else [wanted(model.parameters())]
    for step in range(NUM_STEPS):
        model.zero_grad()
        for number in range(case.passes):
            batch = make_batch(step * case.passes + number)
            F.mse_loss(model(batch["ids"], batch["others"]), batch["y"]).backward()
        if case.clip is not None:
            gradients = [own.grad for own in model.parameters() if own.grad is not None]
            norm = torch.stack([gradient.to_dense().norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.mul_(min(1.0, case.clip / (float(norm) + 1e-6)))
        for optimizer in steps:
            optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse_gradients_train_as_in_one_process(world: World, tmp_path: Path, case: Case) -> None:
    world.prepare(prepare, case.kind)
    expected = plain(case)
    for found in world.run(train, case, str(tmp_path), num_ranks=len(case.speeds)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def warned(rank: int, num_ranks: int, case: Case, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(rank, num_ranks, case, folder)
    return [str(each.message) for each in told]


def test_sums_of_sparse_gradients_warn_of_nothing_that_plain_ones_do_not(world: World, tmp_path: Path) -> None:
    case = CASES[1]
    world.prepare(prepare, case.kind)
    for told in world.run(warned, case, str(tmp_path), num_ranks=len(case.speeds)):
        assert not [text for text in told if "invariant" in text]


class InTurn(nn.Module):
    """Two tables, of which each step reads one; the first capture never meets the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(NUM_WORDS, 4, sparse=True) for _ in range(2))
        self.last, self.turn = nn.Linear(4, 2), 0

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        output: Tensor = self.last(self.tables[self.turn](ids).mean(1) + self.tables[self.turn](others).sum(1))
        return output


TURNS = (0, 1, 1, 0, 1)


def in_turn() -> nn.Module:
    torch.manual_seed(5)
    return InTurn().double()


def train_in_turn(rank: int, num_ranks: int, case: Case) -> dict[str, Tensor]:
    model, config = in_turn(), {"planning.search": "off", "memory.zero": "0", **dict(case.settings)}
    engine = whale.parallelize(
        model, loss=loss, optimizer=OPTIMIZERS[case.optimizer], batch=make_batch(0), config=config, cluster=make_cluster(case.speeds)
    )
    for step, model.turn in enumerate(TURNS):
        engine.step(make_batch(step))
    state = engine.state_dict()
    assert state is not None
    found = {name: value.clone() for name, value in state.items()}
    engine.close()
    return found


IN_TURN = (
    Case("sgd", (1.0, 3.0), (("pipeline.num_micro_batch", 2),)),
    Case("adagrad", settings=(("memory.zero", "2"),)),
    Case("sgd", settings=STAGES),
)


@pytest.mark.filterwarnings("ignore:plain values that the model")
@pytest.mark.parametrize("case", IN_TURN, ids=str)
def test_a_table_that_the_first_capture_does_not_read(world: World, case: Case) -> None:
    model = in_turn()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step, model.turn in enumerate(TURNS):
        batch = make_batch(step)
        optimizer.zero_grad()
        loss(model(batch["ids"], batch["others"]), batch).backward()
        optimizer.step()
    for found in world.run(train_in_turn, case, num_ranks=len(case.speeds)):
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
