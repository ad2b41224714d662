"""Memory is counted by what is alive: views are free, what is let go is given back, blocks are whole."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whale.dry_run import LiveBytes


def test_a_storage_counts_once_and_until_nobody_has_it() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        made = before + 1
        view = made.view(10, 10)[2:]
        view.add_(1)
        assert live.live == 400
        del made
        assert live.live == 400
        del view
        assert (live.live, live.peak) == (0, 400)
        assert live.start_anew() == live.peak == 0


def test_blocks_are_whole() -> None:
    with LiveBytes(block_bytes=512) as live:
        kept = [torch.zeros(1), torch.zeros(129)]
    assert live.live == 512 + 1024
    del kept


def test_the_peak_says_where_it_was() -> None:
    with LiveBytes() as live:
        live.action = "0F1"
        kept = [torch.zeros(8), torch.zeros(8).exp()]
        live.action = "0B1"
        kept.pop()
        kept.append(torch.ones(4))
    assert (live.peak, live.peak_action, live.peak_op) == (96, "0F1", "aten.exp.default")


def test_tensors_without_contents_count_as_others_do() -> None:
    def work() -> int:
        with LiveBytes(512) as live:
            weight = torch.nn.Parameter(torch.ones(64, 64))
            torch.nn.functional.gelu(torch.ones(8, 64) @ weight).sum().backward()
        return live.peak

    real = work()
    with FakeTensorMode():
        assert work() == real > 3 * 64 * 64
