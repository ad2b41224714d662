"""What Whale costs in counts that are the same on every machine: calls, of Python and C functions, files of the package, kernels, bytes.

    python -m tests.costs            # in a fresh interpreter, prints them as JSON

`tests/golden/costs.json` holds them; `tests/distributed/test_costs.py` compares.
"""

from __future__ import annotations

import cProfile
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

import whale
from whale.config import Config
from whale.hardware import parse_cluster
from whale.planning import make_plan
from whale.search.searching import search
from whale.workloads import GPT

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import gpt
import kernels
import planning

ROOT = Path(__file__).parents[1]
Counts = dict[str, int]
BATCH = {name: torch.arange(128).view(8, 16) + shift for shift, name in enumerate(("ids", "targets"))}
WARM_STEPS = 4
CLUSTERS = {
    "4 devices": "hosts: [{name: v, devices: 2 x V100-32GB}, {name: t, devices: 2 x T4}]\nnetwork: ethernet-25g",
    "16 devices": "hosts: [{name: a, devices: 8 x A100-80GB}, {name: t, devices: 8 x T4}]\nnetwork: ethernet-10g",
}
MODEL = GPT(layers=12, hidden=768, heads=12, sequence=512, vocabulary=30_000)
LARGE, DEEP = planning.SIZES[-1], 16
"""Devices and layers of the large plans."""
STEPS = (("gpt2", "float32"), ("gpt2", "bf16"), ("llama", "float32"), ("resnet50", "float32"), ("lstm", "float32"))
"""Whose kernels and bytes are counted, beside the plain loop's."""


def counted(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of a call, the calls that it made, and the files of the package whose functions it entered."""
    profile = cProfile.Profile()
    result = profile.runcall(call)
    entries, package = profile.getstats(), str(Path(whale.__file__).parent)
    files = {each.code.co_filename for each in entries if isinstance(each.code, CodeType) and each.code.co_name != "<module>"}
    return result, sum(each.callcount for each in entries), sum(file.startswith(package) for file in files)


def parallelized(stages: int = 0, **config: Any) -> whale.Engine:
    """A GPT of two layers, on the ranks of this world."""
    torch.manual_seed(0)
    config = {"planning.search": "off"} | config
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return whale.parallelize(gpt.GPT(2, 32, 4, 16, stages), loss=gpt.loss_fn, optimizer=optimizer, batch=BATCH, config=config)


def later_step(engine: whale.Engine) -> tuple[int, int]:
    """Calls and files of a step when all is there."""

    def step() -> Tensor:
        return engine.step(BATCH)

    for _ in range(WARM_STEPS):
        step()
    return counted(step)[1:]


def of_training() -> Counts:
    engine, calls, files = counted(parallelized)
    _, first, _ = counted(partial(engine.step, BATCH))
    later, later_files = later_step(engine)
    return {
        "parallelize: calls": calls,
        "parallelize: files": files,
        "first step: calls": first,
        "later step: calls": later,
        "later step: files": later_files,
    }


def of_planning() -> Counts:
    found, graph = {}, MODEL.graph()
    for name, text in CLUSTERS.items():
        cluster = parse_cluster(text)
        found[f"plan, {name}, searched: calls"] = counted(lambda cluster=cluster: search(graph, cluster, Config(), rows=64))[1]
        staged = Config({"pipeline.num_stages": 4, "pipeline.num_micro_batch": 4})
        found[f"plan, {name}, 4 stages: calls"] = counted(lambda cluster=cluster, staged=staged: search(graph, cluster, staged, rows=64))[1]
    large, rows = planning.mixed_cluster(LARGE), LARGE * planning.ROWS_PER_DEVICE
    for name in ("stages", "split"):
        case = planning.CASES[name]
        scopes = planning.Scopes() if case.scopes is None else case.scopes(LARGE)
        deep = planning.transformer(DEEP, scopes)
        call = partial(make_plan, deep, large, Config(case.settings), rows=rows)
        found[f"plan, {LARGE:,} devices, {planning.NUM_STAGES} stages{', split' * (name == 'split')}: calls"] = counted(call)[1]
    return found


def of_kernels() -> Counts:
    found = {}
    for name, dtype in STEPS:
        pair = kernels.compare(kernels.CASES[name], dtype)
        for side, counts in (("Whale", pair.whale), ("plain", pair.plain)):
            found[f"step of {name}, {dtype}, {side}: kernels"] = counts.kernels.total()
            found[f"step of {name}, {dtype}, {side}: bytes"] = counts.num_bytes
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(of_training() | of_planning() | of_kernels()))


if __name__ == "__main__":
    main()
