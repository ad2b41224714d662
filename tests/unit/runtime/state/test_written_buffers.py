"""Buffers that forward writes are as in the plain loop, to the bit, where one pass has the whole batch; a refused step leaves them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import RuntimeFault

SGD = partial(torch.optim.SGD, lr=0.1)


class Writer(nn.Module):
    """Writes buffers of all kinds, and of several types and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("total", torch.zeros(4, 2).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("rounded", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * y.mean(0))
            self.total += y.sum(0)
            self.count += 1
            self.seen[:1] = True
            self.rounded += 1
            self.turned *= 1j
        return y


def held(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def loss_of(y: Tensor, batch: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_buffers_are_written_as_in_the_plain_loop(recompute: str) -> None:
    torch.manual_seed(0)
    model, batches = Writer(), [torch.randn(5, 4), torch.randn(5, 4), torch.randn(3, 4)]
    engine = whale.parallelize(model, loss=loss_of, optimizer=SGD, batch=batches[0], config={"recompute.policy": recompute})
    optimizer = SGD(model.parameters())
    for batch in batches:
        engine.step(batch)
        optimizer.zero_grad()
        loss_of(model(batch), batch).backward()
        optimizer.step()
    state = engine.state_dict() or {}
    for name, buffer in held(model).items():
        torch.testing.assert_close(state[name], buffer, rtol=0, atol=0, msg=name)


def test_a_step_that_does_not_count_leaves_buffers_as_they_were() -> None:
    torch.manual_seed(0)
    batch = torch.randn(5, 4)
    engine = whale.parallelize(Writer(), loss=loss_of, optimizer=SGD, batch=batch)
    engine.step(batch)
    before = {name: value.clone() for name, value in (engine.state_dict() or {}).items()}
    bad = batch.clone()
    bad[0, 0] = torch.inf
    with pytest.raises(RuntimeFault, match="the loss is nan"):
        engine.step(bad)
    after = engine.state_dict() or {}
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
