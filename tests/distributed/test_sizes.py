"""Batches whose lengths change from step to step, and models that are captured for each number of rows, train as on one device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError, CaptureError, WhaleError

Batch = dict[str, Tensor]
Scopes = Literal["none", "two stages", "split"]
WORDS, IGNORED = 12, -100
optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


class Texts(nn.Module):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        with whale.replicate(1, name="front") if scopes == "two stages" else whale.replicate(2) if scopes == "split" else whale.replicate():
            self.words = nn.Embedding(WORDS, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        with whale.replicate(1, name="back") if scopes == "two stages" else whale.split(2) if scopes == "split" else whale.replicate():
            self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        if not hasattr(self, "places") or len(self.places) < ids.shape[1]:
            self.register_buffer("places", torch.arange(ids.shape[1])[:, None].cos(), persistent=False)
        hidden: Tensor = self.head(self.block(self.words(ids) + self.places[: ids.shape[1]]))
        return hidden


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def texts(rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    labels = torch.randint(WORDS, (rows, length), generator=generator)
    return {"ids": ids, "labels": labels.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, IGNORED)}


@dataclass(frozen=True)
class Case:
    """How it is run: scopes, relative speeds of the devices, settings."""

    scopes: Scopes
    speeds: tuple[float, ...]
    config: tuple[tuple[str, Any], ...] = ()


CASES = {
    "data parallel, uneven": Case("none", (3.0, 1.0), (("pipeline.num_micro_batch", 2),)),
    "pipeline": Case("two stages", (1.0, 1.0), (("pipeline.num_micro_batch", 2), ("recompute.policy", "full"))),
    "split": Case("split", (1.0, 1.0)),
}
SIZES = ((8, 5), (8, 7), (6, 3), (8, 7), (8, 5))


def _built(scopes: Scopes) -> tuple[nn.Module, Batch, Any]:
    torch.manual_seed(0)
    return Texts(scopes), texts(*SIZES[0]), cross_entropy


def captured(scopes: Scopes) -> Captured:
    return captured_once(_built, scopes)


def prepare(scopes: Scopes) -> None:
    captured(scopes)


def prepare_all(scopes: Scopes) -> None:
    """What `train` has captured meanwhile too: once for all ranks."""
    made, rows = captured(scopes), SIZES[0][0]
    for length in (7, 3):
        made.capture(batch=texts(rows, length))
    for length in (5, 9):
        batch = texts(rows, length)
        made.capture("eval", batch)
        for inputs in (batch, {"ids": batch["ids"]}):
            made.capture("predict", inputs)


def make_engine(case: Case) -> whale.Engine:
    made = captured(case.scopes)
    warnings.simplefilter("ignore")
    cluster = make_cluster(case.speeds)
    return whale.parallelize(made.model, loss=made.loss, optimizer=optimizer, batch=made.batch, config=dict(case.config), cluster=cluster)


def train(rank: int, num_ranks: int, case: Case) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    engine = make_engine(case)
    losses = [float(engine.step(texts(*sizes))) for sizes in SIZES]
    losses.append(float(engine.evaluate(texts(8, 9))))
    outputs = [engine.predict({"ids": texts(8, length)["ids"]}) for length in (5, 9)]
    outputs += [engine.predict(texts(8, length)) for length in (5, 9)]  # with labels, which the model does not take
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return losses, state, outputs


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_change(world: World, name: str) -> None:
    model, _, _ = _built("none")
    losses = plain_losses(model, [texts(*sizes) for sizes in SIZES])
    losses.append(float(cross_entropy(model(texts(8, 9)["ids"]), texts(8, 9)).detach()))
    world.prepare(prepare_all, CASES[name].scopes)
    for found, state, outputs in world.run(train, CASES[name], num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
        for output, length in zip(outputs, (5, 9, 5, 9), strict=True):
            torch.testing.assert_close(output, model(texts(8, length)["ids"]).detach(), rtol=1e-4, atol=1e-5)


def predict_with_an_idle_rank(rank: int, num_ranks: int) -> list[Tensor]:
    """Batches of loaders, of which a rank outside the plan has no rows: without labels, of another length, and as the training's."""
    made = captured("none")
    warnings.simplefilter("ignore")
    config = {"planning.search": "off"}
    cluster = make_cluster((1.0, 1.0))
    engine = whale.parallelize(made.model, loss=made.loss, optimizer=optimizer, batch=made.batch, config=config, cluster=cluster)
    opened = {(0, 1, 2), (0, 1)}  # all, and those that sum gradients
    assert engine.runtime._connections.groups._groups.keys() == {ranks for ranks in opened if rank in ranks}
    outputs: list[Tensor] = []
    for length, keys in ((5, ("ids",)), (7, ("ids",)), (5, ("ids", "labels"))):
        samples = [dict(zip(keys, row, strict=True)) for row in zip(*(texts(8, length)[key] for key in keys), strict=True)]
        outputs += [engine.predict(batch) for batch in engine.loader(samples, global_batch_size=8)]
    engine.close()
    return outputs


def test_a_rank_without_rows_predicts_what_others_do(world: World) -> None:
    model, _, _ = _built("none")
    world.prepare(prepare, "none")
    for outputs in world.run(predict_with_an_idle_rank, num_ranks=3):
        for output, length in zip(outputs, (5, 7, 5), strict=True):
            torch.testing.assert_close(output, model(texts(8, length)["ids"]).detach(), rtol=1e-4, atol=1e-5)


def plain_losses(model: nn.Module, batches: list[Batch]) -> list[float]:
    made = optimizer(model.parameters())
    losses = []
    for batch in batches:
        loss = cross_entropy(model(batch["ids"]), batch)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    return losses


def unequal(rank: int, num_ranks: int, case: Case) -> tuple[list[str], float]:
    """What is said of batches of unequal sizes, known and new, and of one that cannot be; then the loss of a good one."""
    engine, said = make_engine(case), []
    engine.step(texts(8, 5))
    bad = texts(8, 6)["ids"][:, : 6 - rank]  # with labels of other lengths on rank 1
    for batch in (texts(8, 5 + rank), texts(8, 6 + rank), {"ids": bad, "labels": texts(8, 6)["labels"]}):
        with pytest.raises(BatchError) as caught:
            engine.step(batch)
        said.append(caught.value.message)
    engine.predict(texts(8, 5))
    engine.predict({"ids": texts(8, 5)["ids"]})
    with pytest.raises(BatchError, match="the batch differs between ranks"):
        engine.predict(texts(8, 5) if rank == 0 else {"ids": texts(8, 5)["ids"]})
    loss = float(engine.step(texts(8, 6)))
    engine.close()
    return said, loss


def test_lengths_that_differ_between_ranks(world: World) -> None:
    model, _, _ = _built("none")
    losses = plain_losses(model, [texts(8, 5), texts(8, 6)])
    world.prepare(prepare, "two stages")
    for rank, (said, loss) in enumerate(world.run(unequal, CASES["pipeline"], num_ranks=2)):
        for text, sizes in zip(said[:2], ((5, 6), (6, 7)), strict=True):
            assert "the batch has different parts or sizes on different ranks" in text
            assert f"ids int64[b, {sizes[1]}] on rank 1, int64[b, {sizes[0]}] on rank 0" in text
        assert ("batch['labels'] is [rows, 6]" in said[2]) if rank else ("refused on rank 1: " in said[2]), said
        assert loss == pytest.approx(losses[1], rel=1e-5)


def pad(rows: list[Tensor]) -> Batch:
    """Pads to the longest of what it sees."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"ids": ids, "labels": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)}


def ragged() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in (5, 3, 4, 2, 6, 3, 7, 2)]


def load(rank: int, num_ranks: int, case: Case) -> tuple[str, list[float]]:
    engine = make_engine(case)
    with pytest.raises(BatchError) as caught:
        engine.step(next(iter(engine.loader(ragged(), global_batch_size=4, collate=pad))))
    losses = [float(engine.step(batch)) for batch in engine.loader(ragged(), global_batch_size=4, collate=pad, whole_batches=True)]
    engine.close()
    return str(caught.value), losses


def test_a_loader_that_pads_to_the_longest_row(world: World) -> None:
    model, _, _ = _built("none")
    losses = plain_losses(model, [pad(ragged()[:4]), pad(ragged()[4:])])
    world.prepare(prepare, "none")
    for said, found in world.run(load, Case("none", (1.0, 1.0)), num_ranks=2):
        assert "ids int64[b, 4] on rank 1, int64[b, 5] on rank 0" in said and "whole_batches=True" in said
        assert found == pytest.approx(losses, rel=1e-5)


class FixedRows(nn.Module):
    """Reads the number of rows as a number; in a loop over them if it is asked to."""

    def __init__(self, loops: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.loops = loops

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.loops:
            hidden = torch.stack([row * 2 for row in hidden])
        return torch.linalg.multi_dot([hidden.reshape(len(x), 6), self.second.weight.T, self.second.weight, self.second.weight.T])


def mean_of_squares(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch[:, :3]).square().sum() / (3 * len(output))


def fixed_rows(rank: int, num_ranks: int, loops: bool) -> list[float] | tuple[str, str]:
    torch.manual_seed(0)
    try:
        engine = whale.parallelize(
            FixedRows(loops),
            loss=mean_of_squares,
            optimizer=optimizer,
            batch=torch.randn(8, 4),
            cluster=make_cluster((3.0, 1.0)),
        )
        losses = [float(engine.step(squares(rows))) for rows in (8, 5, 8, 12)]
    except WhaleError as error:
        return type(error).__name__, str(error)
    engine.close()
    return losses


def squares(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def test_a_model_that_reads_the_number_of_rows(world: World) -> None:
    torch.manual_seed(0)
    model = FixedRows(False)
    made, losses = optimizer(model.parameters()), []
    for rows in (8, 5, 8, 12):
        loss = mean_of_squares(model(squares(rows)), squares(rows))
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    for found in world.run(fixed_rows, False, num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-5)


def test_a_loop_over_the_rows_is_refused_on_all_ranks(world: World) -> None:
    for kind, said in world.run(fixed_rows, True, num_ranks=2):
        assert kind == CaptureError.__name__
        assert "the model runs other ops for" in said and "rows than for 8" in said and "test_sizes.py" in said
