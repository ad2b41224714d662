"""Grouped attention of a part of a causal sequence: keys and values are repeated where a device's kernel takes no groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whale.runtime.program import grouped
from whale.runtime.program.shard.contractions import causal_part

RUNS = ((0, 2), (5, 8))


@pytest.mark.parametrize("has_kernel", [True, False])
def test_groups_are_repeated_where_no_kernel_takes_them(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 8, 6), torch.randn(2, 2, 8, 6), torch.randn(2, 2, 8, 6)
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def noted(query: Tensor, key: Tensor, *more: Any, enable_gqa: bool, **settings: Any) -> Tensor:
        seen.append((key.shape[1], enable_gqa))
        found: Tensor = attend(query, key, *more, enable_gqa=enable_gqa, **settings)
        return found

    def asked(dtype: torch.dtype, device: torch.device, *, has_mask: bool) -> bool:
        assert dtype == torch.float32 and has_mask, "the second run needs a mask on the CPU"
        return has_kernel

    monkeypatch.setattr(grouped, "has_grouped_kernel", asked)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    rows = torch.cat([torch.arange(*run) for run in RUNS])
    found = causal_part(query[:, :, rows], key, value, RUNS, 0.0, None, True)
    assert seen == [(2, True) if has_kernel else (4, False)] * 2
    torch.testing.assert_close(found, attend(query, key, value, is_causal=True, enable_gqa=True)[:, :, rows])


@pytest.mark.parametrize(
    ("dtype", "capability", "has_mask", "expected"),
    [
        (torch.bfloat16, (8, 0), False, True),
        (torch.float16, (9, 0), False, True),
        (torch.float16, (7, 0), False, False),
        (torch.float32, (9, 0), False, False),
        (torch.bfloat16, (9, 0), True, False),
    ],
)
def test_which_devices_have_such_a_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], has_mask: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped.has_grouped_kernel(dtype, torch.device("cuda", 0), has_mask=has_mask) == expected
    assert grouped.has_grouped_kernel(dtype, torch.device("cpu"), has_mask=has_mask)
