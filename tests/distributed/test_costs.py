"""The golden page of counts: nothing that a user pays for grows unseen.

After an intended change run ``pytest tests/distributed/test_costs.py --update-golden``, and say why in the commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests import costs
from tests.conftest import GOLDEN
from tests.distributed.world import World

NEAR = 0.03
"""How far a count may be from the page: orders of sets and caches differ a little between runs."""

PIPELINE = {"stages": 2, "pipeline.num_micro_batch": 2, "pipeline.schedule": "1f1b"}
CASES: dict[str, dict[str, Any]] = {"data parallel": {}, "pipeline": PIPELINE, "split": {"replicas": [{"split": 2}]}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13.") or not platform.python_version().startswith("3.11."),
        reason="the counts are those of torch 2.13 and Python 3.11",
    ),
]


def step_of(rank: int, num_ranks: int, case: str) -> int:
    return costs.later_step(costs.parallelized(**CASES[case]))[0]


def of_one_process() -> costs.Counts:
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.costs"]
    done = subprocess.run(command, cwd=costs.ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600)
    found: costs.Counts = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_count_has_grown(world: World, request: pytest.FixtureRequest) -> None:
    now = of_one_process()
    for case in CASES:
        now[f"later step, 2 ranks, {case}: calls"] = max(world.run(step_of, case, num_ranks=2))
    page = GOLDEN / "costs.json"
    if request.config.getoption("--update-golden"):
        page.write_text(json.dumps(now, indent=1) + "\n")
    then: costs.Counts = json.loads(page.read_text())
    assert now.keys() == then.keys()
    odd = [f"{name}: {then[name]:,} -> {now[name]:,}" for name in then if abs(now[name] - then[name]) > NEAR * then[name]]
    assert not odd, f"counts differ by more than {NEAR:.0%} from tests/golden/costs.json: {'; '.join(odd)}"
