"""Random numbers in a split group: equal where tensors are whole, different where they are cut."""

from __future__ import annotations

import torch
from torch import Tensor

from whale.runtime.program.shard.call import draw_by_position

aten = torch.ops.aten


def drawn(position: int, seed: int = 5) -> list[Tensor]:
    """A whole dropout, two on parts, and a whole one again, at one position."""
    torch.manual_seed(seed)
    ones = torch.ones(1000)
    first = aten.dropout.default(ones, 0.5, True)
    apart = [draw_by_position(position, aten.dropout.default, ones, 0.5, True) for _ in range(2)]
    return [first, *apart, aten.dropout.default(ones, 0.5, True)]


def test_positions_agree_on_whole_tensors_only() -> None:
    here, there = drawn(0), drawn(1)
    assert torch.equal(here[0], there[0]) and torch.equal(here[3], there[3])
    assert not torch.equal(here[1], there[1]) and not torch.equal(here[2], there[2])


def test_every_draw_is_new_and_can_be_repeated() -> None:
    values = drawn(0)
    assert len({tuple(value.tolist()) for value in values}) == 4
    assert all(torch.equal(a, b) for a, b in zip(values, drawn(0), strict=True))
    assert all(400 < int(value.count_nonzero()) < 600 for value in values)
