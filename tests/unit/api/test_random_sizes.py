"""Batches of any sizes, one after another, by models that read sizes as numbers: each step is that of the plain loop, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.examples import at_most
from whale.errors import WhaleError

torch.set_num_threads(1)

Batch = dict[str, Tensor]
Step = Callable[["Sized", Tensor], Tensor]
WIDTH, LONGEST = 4, 6


class Sized(nn.Module):
    """Steps over ``[rows, length, width]``, each of which may read the rows, the length, or neither."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(names))
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.mask: Tensor | None
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("speeds", torch.linspace(0.1, 1, WIDTH))
        self.register_buffer("short", torch.ones(1), persistent=False)
        self.double()
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for name, layer in zip(self.names, self.layers, strict=True):
            h = STEPS[name](self, layer(h).tanh())
        return h.sum((1, 2))


def over_rows_as_a_number(net: Sized, h: Tensor) -> Tensor:
    return h * (1.0 + 1.0 / len(h))


def reshaped_by_rows(net: Sized, h: Tensor) -> Tensor:
    return h.reshape(len(h), -1).flip(1).reshape(h.shape)


def placed(net: Sized, h: Tensor) -> Tensor:
    return h + net.places(torch.arange(h.shape[1]))


def recurrent(net: Sized, h: Tensor) -> Tensor:
    return net.gru(h)[0] + h


def started(net: Sized, h: Tensor) -> Tensor:
    return net.gru(h, torch.zeros(1, len(h), WIDTH, dtype=h.dtype))[0]


def causal(net: Sized, h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def looped(net: Sized, h: Tensor) -> Tensor:
    state = torch.zeros_like(h[:, 0])
    for place in range(h.shape[1]):
        state = 0.5 * state + h[:, place]
    return h + state[:, None]


def longer_ways(net: Sized, h: Tensor) -> Tensor:
    return h.cumsum(1) if h.shape[1] > 3 else h.flip(1)


def odd_rows(net: Sized, h: Tensor) -> Tensor:
    return h * 2 if len(h) % 2 else h - 1


def averaged_length(net: Sized, h: Tensor) -> Tensor:
    return h - h.sum(1, keepdim=True) / h.shape[1]


def masked_once(net: Sized, h: Tensor) -> Tensor:
    """A mask that the longest batch so far has registered."""
    if net.mask is None or len(net.mask) < h.shape[1]:
        net.register_buffer("mask", torch.tril(torch.ones(h.shape[1], h.shape[1], dtype=h.dtype)), persistent=False)
    return torch.einsum("ts,bsd->btd", net.mask[: h.shape[1], : h.shape[1]], h)


def turned(net: Sized, h: Tensor) -> Tensor:
    """A rotary table, made of a buffer, that is registered where it is missing, and grows."""
    if not hasattr(net, "table") or len(net.table) < h.shape[1]:
        net.register_buffer("table", torch.outer(torch.arange(h.shape[1], dtype=h.dtype), net.speeds).cos())
    return h * net.table[: h.shape[1]]


def shifted(net: Sized, h: Tensor) -> Tensor:
    """A table in a buffer that is too short at first."""
    if len(net.short) < h.shape[1]:
        net.register_buffer("short", torch.ones(h.shape[1], dtype=h.dtype), persistent=False)
    return h + net.short[: h.shape[1], None]


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (over_rows_as_a_number, reshaped_by_rows, placed, recurrent, started, causal)
    + (looped, longer_ways, odd_rows, averaged_length, masked_once, turned, shifted)
}
Sizes = list[tuple[int, int]]


def mean(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["target"])


def by_length(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["target"]).abs().sum() / batch["x"].shape[0] / batch["x"].shape[1]


def by_tensor(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["target"]).square().sum() / torch.tensor(float(len(output)), dtype=output.dtype)


def by_filled(output: Tensor, batch: Batch) -> Tensor:
    return ((output - batch["target"]).square() * torch.full((len(output),), 0.5, dtype=output.dtype)).sum() / (
        2 * torch.tensor(len(output))
    )


def make_batch(rows: int, length: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    x, target = torch.randn(rows, length, WIDTH, generator=random), torch.randn(rows, generator=random)
    return {"x": x.double(), "target": target.double()}


@pytest.mark.parametrize("criterion", [by_tensor, by_filled])
def test_a_number_of_rows_in_a_tensor(criterion: Callable[..., Tensor]) -> None:
    plain, batches = Sized(("placed",)), [make_batch(rows, 3, rows) for rows in (8, 8, 5)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = whale.parallelize(
            Sized(("placed",)),
            loss=criterion,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=batches[0],
            config={"pipeline.num_micro_batch": 2},
        )
        for batch in batches:
            optimizer.zero_grad()
            expected = criterion(plain(batch["x"]), batch)
            expected.backward()
            optimizer.step()
            assert float(engine.step(batch)) == pytest.approx(expected.item(), rel=1e-12)
    engine.close()


@pytest.mark.parametrize("name", ["masked_once", "turned", "shifted"])
def test_tables_that_forward_registers(name: str) -> None:
    model, plain = Sized((name, name)), Sized((name, name))
    before = {key: dict(module._buffers) for key, module in model.named_modules()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = [make_batch(4, length, seed) for seed, length in enumerate((3, 5, 2, 3))]
    engine = whale.parallelize(model, loss=mean, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batches[0])
    for batch in batches:
        optimizer.zero_grad()
        expected = mean(plain(batch["x"]), batch)
        expected.backward()
        optimizer.step()
        assert float(engine.step(batch)) == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(engine.predict(batches[1]), plain(batches[1]["x"]).detach())
    after = {key: dict(module._buffers) for key, module in model.named_modules()}
    assert all(after[key].keys() == held.keys() and all(after[key][name] is held[name] for name in held) for key, held in before.items())
    engine.close()


@pytest.mark.slow
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3).map(tuple),
    criterion=st.sampled_from([mean, by_length, by_tensor, by_filled]),
    sizes=st.lists(st.tuples(st.integers(2, 7), st.integers(1, LONGEST)), min_size=2, max_size=3),
    num_micro_batch=st.integers(1, 2),
)
@at_most(10)
def test_silent_is_exact(names: tuple[str, ...], criterion: Callable[..., Tensor], sizes: Sizes, num_micro_batch: int) -> None:
    batches = [make_batch(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    model = Sized(names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            engine = whale.parallelize(
                Sized(names),
                loss=criterion,
                optimizer=partial(torch.optim.SGD, lr=0.1),
                batch=batches[0],
                config={"pipeline.num_micro_batch": num_micro_batch},
            )
        except WhaleError:
            return
        for batch in batches:
            try:
                found = float(engine.step(batch))
            except WhaleError:
                break
            optimizer.zero_grad()
            expected = criterion(model(batch["x"]), batch)
            expected.backward()
            optimizer.step()
            if any("the batch is needed whole here" in str(each.message) for each in told):
                break
            assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
        else:
            weights = model.state_dict()
            for name, value in (engine.state_dict() or {}).items():
                torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11)
    engine.close()
