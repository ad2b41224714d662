"""A steady step waits for no device: nothing of it is read, nothing is copied to it but the batch, nothing mixes devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.examples import slow
from tests.standin import DEVICE, StandIn, held
from whale.errors import OpFault
from whale.ir.plan import Plan, brought_back
from whale.runtime.execute.batch import BatchView

pytestmark = pytest.mark.slow

WIDTH, LENGTH, CLASSES, IGNORED, NUM_ROWS = 8, 4, 11, -100, 6
Batch = dict[str, Tensor]
Loss = Callable[[Any, Any], Any]
ADAM = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=True)  # a large eps: noise of no gradient stays noise


class Block(nn.Module):
    """Attention and a feed-forward part, each beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixing = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixing(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        fed: Tensor = self.feed(x)
        return x + fed


class Language(nn.Module):
    """Tokens to logits; what it makes in `forward` without a word of devices follows the parameters, and so do its constants."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.scale = torch.linspace(0.5, 1.0, WIDTH, dtype=torch.float64)
        self.blocks = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH)) * self.scale
        order = torch.arange(LENGTH).flip(0)
        logits: Tensor = F.linear(self.blocks(x[:, order]), self.tokens.weight)
        return logits


class Smoothed(nn.Module):
    """Running statistics, a convolution and an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, CLASSES, 3, padding=1))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.layers(self.tokens(tokens).transpose(1, 2))
        x += 1
        return x.transpose(1, 2)


def next_tokens(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def confident(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A sum whose weight is known only after the forward pass."""
    weight = 1 + logits.detach().softmax(-1).amax(-1)
    return (logits.square().mean(-1) * weight).sum(), weight.sum()


def texts(seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(CLASSES, (2, NUM_ROWS, LENGTH), generator=random)
    labels[:, 1] = IGNORED
    return {"tokens": tokens, "labels": labels}


@dataclass(frozen=True)
class Watched:
    """What a training has left.

    Attributes:
        results: the losses of the steps, norms of the last gradients where they are clipped, and weights and statistics.
        waits: of steps after the first, as `StandIn` notes them.
        strangers: host memory, other than that of batches, from which something was copied in steps after the first.
    """

    results: list[Tensor]
    waits: list[str]
    strangers: set[int]


def train(make: type[nn.Module], loss: Loss, optimizer: Any = ADAM, plan: Plan | None = None, **settings: object) -> Watched:
    """Three steps on the stand-in device, or on the CPU where nobody looks."""
    torch.manual_seed(0)
    device, batches = StandIn(), [texts(seed) for seed in range(3)]
    with mock.patch("whale.comm.world._device", return_value=DEVICE), device:
        engine = whale.parallelize(make().double(), loss=loss, optimizer=optimizer, batch=batches[0], config=settings, plan=plan)
        losses = [engine.step(batches[0])]
        device.forget()
        losses += [engine.step(batch) for batch in batches[1:]]
        losses += [engine.gradient_norm] if "gradient.clip_norm" in settings else []
    leaves = {leaf.untyped_storage().data_ptr() for batch in batches for leaf in batch.values()}
    return Watched([held(value) for value in [*losses, *engine.state.tensors.values()]], device.waits, device.arrivals - leaves)


def train_on_cpu(make: type[nn.Module], loss: Loss, **settings: object) -> list[Tensor]:
    """The results of the same steps on the CPU."""
    torch.manual_seed(0)
    engine = whale.parallelize(make().double(), loss=loss, optimizer=ADAM, batch=texts(0), config=settings)
    losses = [engine.step(texts(seed)) for seed in range(3)]
    losses += [engine.gradient_norm] if "gradient.clip_norm" in settings else []
    return [*losses, *(value.detach() for value in engine.state.tensors.values())]


@pytest.mark.parametrize(
    ("make", "loss", "settings"),
    [
        (Language, next_tokens, {"pipeline.num_micro_batch": 3, "pipeline.schedule": "zb_h1", "gradient.clip_norm": 0.1}),
        slow(Language, next_tokens, {"pipeline.num_micro_batch": 3, "recompute.policy": "full"}),
        slow(Language, confident, {"pipeline.num_micro_batch": 2, "gradient.clip_norm": 0.1}),
        (Smoothed, next_tokens, {"pipeline.num_micro_batch": 2, "recompute.policy": "full"}),
    ],
)
def test_a_steady_step(make: type[nn.Module], loss: Loss, settings: dict[str, object]) -> None:
    watched = train(make, loss, **settings)
    assert watched.waits == []
    assert watched.strangers == set()
    for found, expected in zip(watched.results, train_on_cpu(make, loss, **settings), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("back", [(), ("tokens.weight", "blocks.mixing.weight")])
def test_the_host_steps_what_it_keeps(back: tuple[str, ...]) -> None:
    settings = {"gradient.clip_norm": 0.1}
    batch = texts(0)
    plan = whale.parallelize(Language().double(), loss=next_tokens, batch=batch, config=settings | {"memory.offload": "optimizer"}).plan
    plan = replace(plan, parameter_states=brought_back(plan.parameter_states, back))
    for optimizer in (ADAM, partial(ADAM, foreach=None)):
        watched = train(Language, next_tokens, optimizer, plan, **settings)
        assert watched.strangers, "weights come back"
        for found, expected in zip(watched.results, train_on_cpu(Language, next_tokens, **settings), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_weights_come_from_the_host_before_ops_read_them() -> None:
    torch.manual_seed(0)
    settings, batches, device = {"pipeline.num_micro_batch": 2}, [texts(seed) for seed in range(3)], StandIn()
    with mock.patch("whale.comm.world._device", return_value=DEVICE), device:
        own = settings | {"memory.offload": "optimizer+parameters"}
        engine = whale.parallelize(Language().double(), loss=next_tokens, optimizer=ADAM, batch=batches[0], config=own)
        losses = [held(engine.step(batch)) for batch in batches]
    assert not [wait for wait in device.waits if "to the host" in wait], "gradients are copied beside other work"
    assert all(value.device.type == "cpu" for value in engine.state.kept.values())
    for found, expected in zip([*losses, *engine.state.lasting.values()], train_on_cpu(Language, next_tokens, **settings), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_what_is_kept_for_backward_waits_on_the_host() -> None:
    watched = train(Language, next_tokens, **{"pipeline.num_micro_batch": 2, "memory.offload": "activations"})
    assert watched.waits and all("to the host" in wait and "offload.py" in wait for wait in watched.waits), (
        "on a GPU nobody waits for these"
    )
    assert watched.strangers, "it comes back"
    for found, expected in zip(watched.results, train_on_cpu(Language, next_tokens, **{"pipeline.num_micro_batch": 2}), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Reading(torch.optim.SGD):
    """Looks at a gradient before it applies it."""

    def step(self, closure: None = None) -> None:
        gradient = self.param_groups[0]["params"][0].grad
        if gradient.isfinite().all():
            super().step(closure)


def test_a_step_that_reads_is_found() -> None:
    watched = train(Smoothed, next_tokens, partial(Reading, lr=0.1, foreach=True))
    assert len(watched.waits) == 2 and all("_local_scalar_dense" in wait and __file__ in wait for wait in watched.waits), watched.waits


def test_a_batch_left_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchView, "rows_on", lambda self, device, *place: self.rows(*place))
    with pytest.raises(OpFault, match="mixes devices"):
        train(Language, next_tokens)
