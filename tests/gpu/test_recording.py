"""A recorded step on a GPU: times of the device's stream, bytes of its memory, and the numbers of a run without."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whale
from tests.gpu.gpu import Gpu, needs_memory


def _losses(directory: Path | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    batch = torch.randn(16, 64)
    config = {"pipeline.num_micro_batch": 2, "trace.first_step": 1, "trace.directory": None if directory is None else str(directory)}
    engine = whale.parallelize(
        model,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        batch=batch,
        config=config,
    )
    losses = [float(engine.step(batch)) for _ in range(3)]
    engine.close()
    return losses


def _measured(directory: Path) -> list[dict[str, Any]]:
    """The events of the step as it was."""
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    (measured,) = {event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"].startswith("measured")}
    return [event for event in events if event["pid"] == measured]


def test_a_recorded_step_has_the_devices_times(gpu: Gpu, tmp_path: Path) -> None:
    assert _losses(tmp_path) == _losses(None)
    slices = [event for event in _measured(tmp_path) if event["ph"] == "X"]
    assert [event["name"] for event in slices if event["cat"] == "compute"][:4] == ["0F0", "0B0", "0F1", "0B1"]
    assert all(event["dur"] >= 0 for event in slices)
    assert all(first["ts"] + first["dur"] <= second["ts"] + 1.0 for first, second in pairwise(slices))


@needs_memory
def test_a_recorded_step_has_the_devices_bytes(gpu: Gpu, tmp_path: Path) -> None:
    _losses(tmp_path)
    assert any(event["ph"] == "C" and event["args"]["bytes"] > 0 for event in _measured(tmp_path))
