"""What carries the messages: NCCL where each rank has a GPU of its own, however many it sees; asked per kind of device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from whale.comm import backend_of, connect
from whale.comm.world import choose_backend


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (["a", "b", "c", "d"], "cpu:gloo,cuda:nccl"),
        (["a"], "cpu:gloo,cuda:nccl"),
        (["a", "b", "a", "b"], "gloo"),
        (["a", "", "b"], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_nccl_wants_a_gpu_for_each_rank(gpus: list[str], wanted: str) -> None:
    assert choose_backend(gpus) == wanted


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"), [("cpu:gloo,cuda:nccl", "gloo", "nccl"), ("cpu:gloo,cuda:gloo,xpu:gloo", "gloo", "gloo")]
)
def test_the_backend_of_a_kind_of_device(config: str, cpu: str, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_of(torch.device("cpu")) == cpu
    assert backend_of(torch.device("cuda", 1)) == cuda
    assert backend_of(torch.device("meta")) is None


def test_a_rank_without_a_launcher_computes_where_the_script_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert connect(60).device == torch.device("cuda", 3) and not chosen
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert connect(60).device == torch.device("cuda", 2) and chosen == [torch.device("cuda", 2)]
