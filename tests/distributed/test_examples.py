"""The examples run as their pages say: train on four ranks, go on with one, compare with torch's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--layers", "2", "--width", "32", "--context", "32")


def run(*words: str) -> str:
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_gpt_trains_as_two_pipelines_and_goes_on_alone(tmp_path: Path) -> None:
    script = ("examples/train_gpt.py", *SMALL, "--global-batch-size", "8", "--evaluate-batches", "1", "--checkpoint", str(tmp_path))
    recipe = "strategies/recipes/pipeline_data_parallel.yaml"
    first = run("-m", "whale", "run", "--ranks", "4", "--recipe", recipe, *script, "--steps", "4", "--evaluate-every", "2")
    assert "2 replica(s) x 2 stage(s) on 4 device(s)" in first
    assert {path.name for path in tmp_path.iterdir()} >= {"step_2", "step_4"}
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", first)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6, "it learns"
    (tmp_path / "step_4").rename(tmp_path / "of_four_steps")
    second = run(*script, "--resume", "--steps", "4", "--evaluate-every", "4")
    assert "resumed from" in second and "step_2" in second
    repeated = float(re.findall(r"held-out loss ([\d.]+)", second)[-1])
    assert abs(repeated - losses[1]) < 2e-3, "one device goes on exactly as four would have"


def test_the_overhead_benchmark_writes_its_ratios(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    run("examples/benchmarks/overhead.py", *SMALL, "--pairs", "1", "--steps", "1", "--warmup", "1", "--json", str(file))
    results = json.loads(file.read_text())
    assert set(results) == {"single", "data_parallel", "pipeline"}
    assert all(result["ratio"] > 0 for result in results.values())


def test_the_split_classifier_trains_on_two_ranks_as_on_one() -> None:
    script = ("examples/split_classifier.py", "--classes", "4001", "--width", "64", "--steps", "20", "--print-every", "5")
    alone, split = run(*script), run("-m", "whale", "run", "--ranks", "2", *script)
    assert "groups of 2 cut classes 2001:2000" in split
    losses = [[float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for text in (alone, split)]
    assert len(losses[0]) == len(losses[1]) == 5 and losses[0][-1] < losses[0][0]
    assert all(abs(one - two) < 2e-3 for one, two in zip(*losses, strict=True))


def test_the_mixture_of_experts_trains_on_two_ranks_as_on_one() -> None:
    script = ("examples/moe.py", "--layers", "1", "--width", "32", "--context", "32", "--steps", "20", "--print-every", "10")
    alone, divided = run(*script), run("-m", "whale", "run", "--ranks", "2", *script)
    assert "groups of 2 cut blocks.0.gate.experts:0 4:4" in divided
    losses, loads = ([re.findall(pattern, text) for text in (alone, divided)] for pattern in (r"loss ([\d.]+)", r"per expert ([\d ]+);"))
    assert len(losses[0]) == len(losses[1]) == len(loads[0]) == len(loads[1]) == 3
    assert float(losses[0][2]) < float(losses[0][0]) - 1, "it learns"
    assert all(abs(float(a) - float(b)) < 2e-3 for a, b in zip(*losses, strict=True))
    assert loads[0][0] == loads[1][0], "the same tokens chose the same experts"
    of_devices = re.findall(r"\S+/\d+ (\d+)", divided.partition("per device")[2].splitlines()[0])
    assert len(of_devices) == 2
    assert sum(map(int, of_devices)) == sum(int(number) for number in loads[1][0].split()) == 16 * 32 * 2
