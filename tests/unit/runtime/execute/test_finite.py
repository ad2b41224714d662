"""Losses that are on their way from a GPU: looked at late, and not at all once their weights are replaced."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import pytest
import torch

from whale.comm import World
from whale.errors import RuntimeFault
from whale.ir.graph import LossTerm
from whale.runtime.execute.finite import LossWatch
from whale.runtime.execute.loss import LossAccount
from whale.runtime.state.host_copies import LateNumber


class Arrived:
    """An event that is over."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def watch_of(*losses: float) -> LossWatch:
    device = torch.device("cpu")
    watch = LossWatch(World(0, 1, 0, 1, device, timedelta(seconds=1)))
    for step_number, value in enumerate(losses):
        account = LossAccount((LossTerm(1.0, "loss", None),), 1, {}, device)
        watch._copied.append((step_number, account, LateNumber(torch.tensor(value), cast(torch.cuda.Event, Arrived()))))
    return watch


def test_what_is_on_its_way_is_looked_at_in_the_end() -> None:
    watch = watch_of(1.0, torch.inf, 1.0)
    watch.settle(2)
    with pytest.raises(RuntimeFault, match="inf at step 2"):
        watch.settle()


def test_losses_of_replaced_weights_are_forgotten() -> None:
    watch = watch_of(torch.nan, torch.nan, torch.nan)
    with pytest.raises(RuntimeFault, match="nan at step 1"):
        watch.settle(2)
    watch.forget()
    watch.settle()


def test_a_loss_that_is_no_number_is_in_the_weights_of_later_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(1.0, torch.nan, 1.0)
    assert not watch.has_bad(3), "updates are left out, or not made yet"
    watch.let_pass(2)
    assert [watch.has_bad(number) for number in range(4)] == [False, False, True, True]
    monkeypatch.setattr(LossWatch, "ranks_of", lost)
    with pytest.raises(RuntimeFault, match="a peer is lost"):
        watch.settle()
    assert [watch.has_bad(number) for number in range(4)] == [False, False, True, True], "it was looked at, and nobody was told"
    watch.forget()
    assert not watch.has_bad(3)


def lost(*_: object) -> None:
    raise RuntimeFault("a peer is lost")
