"""Random numbers in a split group: equal where tensors are whole, different where they are cut, whatever other ops draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whale.runtime.program.shard.draws import WHOLE, draw, dropout, uniform

aten = torch.ops.aten
DROPOUT = aten.dropout.default


def drawn(position: int, seed: int = 5, *, num_others: int = 0) -> list[Tensor]:
    """A whole dropout, two on parts, and a whole one again, at one position; `num_others` numbers are taken between, as GPUs do."""
    torch.manual_seed(seed)
    ones, found = torch.ones(1000), []
    for number, where in enumerate((WHOLE, position, position, WHOLE)):
        found.append(draw(number, where, DROPOUT, ones, 0.5, True))
        torch.rand(num_others)
    return found


def test_positions_agree_on_whole_tensors_only() -> None:
    here, there = drawn(0), drawn(1)
    assert torch.equal(here[0], there[0]) and torch.equal(here[3], there[3])
    assert not torch.equal(here[1], there[1]) and not torch.equal(here[2], there[2])


def test_every_draw_is_new_and_can_be_repeated() -> None:
    values = drawn(0)
    assert len({tuple(value.tolist()) for value in values}) == 4
    assert all(torch.equal(a, b) for a, b in zip(values, drawn(0), strict=True))
    assert all(400 < int(value.count_nonzero()) < 600 for value in values)


@pytest.mark.parametrize("num_others", [1, 5, 1000])
def test_a_device_that_takes_more_numbers_draws_the_same(num_others: int) -> None:
    assert all(torch.equal(a, b) for a, b in zip(drawn(0), drawn(0, num_others=num_others), strict=True))


def test_masks_by_place_are_even_and_independent() -> None:
    numbers = uniform((1000, 100), 7, torch.device("cpu"))
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert bool((counts - 5000).abs().max() < 400)
    other = uniform((1000, 100), 8, torch.device("cpu"))
    pairs = torch.stack([numbers.flatten(), other.flatten(), numbers.flatten().roll(1), numbers.T.flatten()])
    assert float((torch.corrcoef(pairs) - torch.eye(4)).abs().max()) < 0.02
    assert torch.equal(numbers, uniform((1000, 100), 7, torch.device("cpu")))
    assert torch.equal(uniform((9,), (1 << 63) - 1, torch.device("cpu")), uniform((9,), (1 << 63) - 1, torch.device("cpu")))


def test_dropout_by_place_keeps_the_mean_and_its_gradient() -> None:
    value = torch.ones(100, 100, requires_grad=True)
    dropped = dropout(value, 0.25, 3)
    dropped.sum().backward()
    assert value.grad is not None and torch.equal(value.grad, dropped.detach())
    assert dropped.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(dropped.detach().mean()) == pytest.approx(1, abs=0.02)
    assert float(dropout(value, 1.0, 3).detach().abs().max()) == 0.0
