"""What carries the messages: NCCL where each rank has a GPU of its own, however many it sees; asked per kind of device."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from whale.comm import World, backend_of, connect
from whale.comm.world import _join, choose_backend


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


@pytest.mark.parametrize(("carrier", "backend", "seconds"), [("nccl", "nccl", 120), ("gloo", None, 60)])
def test_groups_are_of_what_carries_the_device_alone(
    carrier: str, backend: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And NCCL's own limit comes behind ours."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr("whale.comm.world.backend_of", lambda device: carrier)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: made.append((ranks, more)) or "group")
    world = World(0, 4, 0, 4, torch.device("cuda"), timedelta(seconds=60))
    assert (world.new_group((0, 2)), world.new_group((1, 3))) == ("group", None)
    wanted = {"timeout": timedelta(seconds=seconds), "backend": backend}
    assert made == [([0, 2], wanted), ([1, 3], wanted)]


@pytest.mark.parametrize(("gpu", "backend"), [("GPU-a", "cpu:gloo,cuda:nccl"), ("", "gloo")])
def test_the_world_has_two_limits(gpu: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host waits for by Gloo has ours."""
    made: list[tuple[object, ...]] = []
    limits: list[timedelta] = []
    carrier = SimpleNamespace(_set_default_timeout=limits.append)
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: carrier))
    store = SimpleNamespace(set=lambda key, value: None, multi_get=lambda keys: [gpu.encode()])
    monkeypatch.setattr("whale.comm.world._own_store", lambda timeout: (store, 0, 1))
    monkeypatch.setattr("whale.comm.world._gpu", lambda device: gpu)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: made.append((backend, more["timeout"])))
    monkeypatch.setattr(dist, "group", group)
    _join(torch.device("cuda", 0), timedelta(seconds=60))
    assert made == [(backend, timedelta(seconds=60))]
    assert limits == ([timedelta(seconds=120)] if gpu else [])


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
