"""The stand-in device: it computes what the CPU does, refuses what mixes devices, and notes what is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.standin import DEVICE, StandIn, held, put

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.sum() > 0),
    "copy": lambda x: x.cpu(),
    "copy into": lambda x: torch.zeros(4, 4).copy_(x),
    "mask": lambda x: x[x > 0],
    "written mask": lambda x: x.index_put_((x > 0,), x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "arrival": lambda x: torch.ones(4, 4).to(DEVICE),
    "arrival into": lambda x: x.copy_(torch.ones(4, 4)),
}
MIXTURES: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + torch.ones(4, 4),
    "index": lambda x: x[torch.tensor([0, 2])],
    "one index": lambda x: x.index_select(0, torch.tensor(1)),
    "lookup": lambda x: F.embedding(torch.tensor([0, 2]), x),
    "several": lambda x: torch._foreach_add([x, x], [x, torch.ones(4, 4)]),
    "made of numbers": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE),
}
SILENT: dict[str, Callable[[Tensor], object]] = {
    "number": lambda x: x * 2 + torch.tensor(3.0),
    "made there": lambda x: x + torch.full((4, 4), 2.0, device=DEVICE) + torch.arange(4, device=DEVICE),
    "index": lambda x: x[torch.arange(2, device=DEVICE)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "arrival": lambda x: torch.ones(4, 4).to(DEVICE, non_blocking=True),
    "type": lambda x: x.double(),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_host_waits_for_is_noted(name: str) -> None:
    with StandIn() as device:
        READS[name](put(torch.randn(4, 4)))
    assert device.waits and all(__file__ in wait for wait in device.waits)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_fail(name: str) -> None:
    with StandIn(), pytest.raises(RuntimeError, match=r"mixes devices|of the host's numbers"):
        MIXTURES[name](put(torch.randn(4, 4)))


@pytest.mark.parametrize("name", SILENT)
def test_what_stays_on_the_device_is_not_noted(name: str) -> None:
    with StandIn() as device:
        result = SILENT[name](put(torch.randn(4, 4)))
    assert device.waits == []
    assert isinstance(result, Tensor) and result.device == DEVICE


def test_a_gradient_through_views_and_writes_is_that_of_the_cpu() -> None:
    def compute(x: Tensor) -> Tensor:
        y = x.clone()
        y[1:].mul_(2)
        y.t()[0].add_(x[0])
        return F.relu(y.view(2, 8)).square().sum()

    start = torch.randn(4, 4, dtype=torch.float64)
    plain = start.clone().requires_grad_()
    compute(plain).backward()
    with StandIn() as device:
        there = put(start).requires_grad_()
        compute(there).backward()
    assert device.waits == []
    assert there.grad is not None
    torch.testing.assert_close(held(there.grad), plain.grad, rtol=0, atol=0)


def test_nobody_computes_on_it_unseen() -> None:
    x = put(torch.ones(2))
    with pytest.raises(RuntimeError, match="nobody looks"):
        x + x


def test_an_asynchronous_copy_to_the_host_is_not_waited_for() -> None:
    with StandIn() as device:
        torch.zeros(4, 4).copy_(put(torch.ones(4, 4)), non_blocking=True)
    assert device.waits == []
