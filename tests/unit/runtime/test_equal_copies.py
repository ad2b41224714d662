"""Checksums of weights are of their bits and places; what is rounding is told from what is not."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.execute import equal_copies
from whale.runtime.execute.equal_copies import checksum

TYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.bool,
)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_checksum_is_of_bits_and_places(dtype: torch.dtype) -> None:
    value = torch.randn(6, 7).relu().mul(4).to(dtype)
    assert checksum(value) == checksum(value.clone()) == checksum(value.t().contiguous().t())
    for other in (value.flip(0), value[:, :-1], torch.zeros_like(value)):
        assert checksum(value) != checksum(other)
    assert checksum(value[:0]) == 0 and checksum(value[0, 0]).dtype == torch.int64


def test_what_compares_unequal_or_equal_alike_is_of_one_bit_pattern_only() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert checksum(nan) == checksum(nan.clone())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_large_tensors_are_read_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_copies, "_CHUNK", 8)
    value = torch.randn(30)
    assert checksum(value) == checksum(value.clone())
    assert len({int(checksum(value.roll(shift))) for shift in range(0, 30, 2)}) == 15


@pytest.mark.parametrize(
    ("own", "other", "is_apart"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], False),
        ([1.0, 2.0], [1.0, 2.01], True),
        ([1.0, torch.nan], [1.0, torch.nan], False),
        ([1.0, torch.nan], [1.0, 2.0], True),
        ([1.0, torch.inf], [1.0, torch.inf], False),
        ([1.0, torch.inf], [1.0, -torch.inf], True),
        ([0.0], [-0.0], False),
        ([3], [4], True),
    ],
)
def test_rounding_is_let_pass(own: list[float], other: list[float], is_apart: bool) -> None:
    distance, place = equal_copies._farthest(torch.tensor(own), torch.tensor(other))
    assert (distance > 0) == is_apart and place == (len(own) - 1 if is_apart else 0)
