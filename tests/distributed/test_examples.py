"""The examples run as their pages say: train on four ranks, go on with one, compare with torch's own.

They run on ranks that have their imports done, in the environment that ``whale run`` would make; one goes on as a plain script, without a
launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launched import python
from tests.distributed.test_probe import measure_little
from tests.distributed.world import World
from tests.examples import slow
from whale.config import RECIPE_VARIABLE

ROOT = Path(__file__).parents[2]
SMALL = ("--layers", "2", "--width", "32", "--context", "32")
BENCHMARKS = ROOT / "examples" / "benchmarks"


def run_script(rank: int, num_ranks: int, words: tuple[str, ...], recipe: str | None) -> str:
    """Runs a script with its words on one rank; what it printed."""
    os.chdir(ROOT)
    os.environ["WHALE_RUNTIME_RETRACE"] = "off"  # what that finds has tests of its own
    if recipe is not None:
        os.environ[RECIPE_VARIABLE] = recipe
    sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).parent.resolve())]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()


def printed_by(world: World, num_ranks: int, *words: str, recipe: str | None = None) -> str:
    return "".join(world.run(run_script, words, recipe, num_ranks=num_ranks))


def test_the_gpt_trains_as_two_pipelines_and_goes_on_alone(world: World, tmp_path: Path) -> None:
    script = ("examples/train_gpt.py", *SMALL, "--global-batch-size", "8", "--evaluate-batches", "1", "--checkpoint", str(tmp_path))
    recipe = "strategies/recipes/pipeline_data_parallel.yaml"
    first = printed_by(world, 4, *script, "--steps", "4", "--evaluate-every", "2", recipe=recipe)
    assert "2 replicas x 2 stages on 4 devices" in first
    assert {path.name for path in tmp_path.iterdir()} >= {"step_2", "step_4"}
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", first)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6, "it learns"
    shutil.rmtree(tmp_path / "step_4")
    result = python(*script, "--resume", "--steps", "4", "--evaluate-every", "4", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    second = result.stdout
    assert "step 1: loss" in first and "step 1: loss" not in second, "it goes on after step 2"
    repeated = float(re.findall(r"held-out loss ([\d.]+)", second)[-1])
    assert abs(repeated - losses[1]) < 2e-3, "one device goes on exactly as four would have"


@pytest.fixture
def benchmarks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the benchmarks, here and on ranks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    world.prepare(find_benchmarks)


def find_benchmarks() -> None:
    sys.path.append(str(BENCHMARKS))


def call(rank: int, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ["WHALE_RUNTIME_RETRACE"] = "off"
    return function(*arguments)


def test_benchmarks_write_their_results(
    world: World, benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import overhead
    import tracing

    def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return world.run(call, function, *arguments, num_ranks=num_ranks)[0]

    file = tmp_path / "results.json"
    for module, words in ((overhead, ("--steps", "1", "--only", "single")), (tracing, ())):
        monkeypatch.setattr(module, "on_ranks", on_ranks)
        monkeypatch.setattr(sys, "argv", ["benchmark", *SMALL, "--pairs", "1", "--warmup", "1", *words, "--json", str(file)])
        module.main()
        results = json.loads(file.read_text())
        assert results["single"]["ratio"] > 0 if module is overhead else results["num_pairs"] == 1
    assert "ms more" in capsys.readouterr().out


def predict(options: argparse.Namespace) -> Any:
    """The plans of the prediction benchmark for two ranks; small sizes, for what is measured is not looked at."""
    import prediction

    measure_little()
    return prediction.run_plans(2, options)


def test_the_prediction_benchmark_has_both_times_of_each_plan(
    world: World, benchmarks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import prediction

    cases = ["uneven", "split"]
    options = argparse.Namespace(
        steps=2, warmup=1, rounds=2, layers=2, width=32, context=32, rows=16, micro_batches=4, only=cases, raw=True
    )
    file, found = tmp_path / "prediction.json", {2: world.run(call, predict, options, num_ranks=2)[0]}
    prediction.report(found, file)
    printed, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert all(value > 0 for rank in figures["ranks"].values() for value in rank.values() if isinstance(value, float))
    assert any(isinstance(value, float) for rank in figures["ranks"].values() for value in rank.values())
    assert list(figures["plans"]) == cases and all(name in printed for name in cases)
    for plan in figures["plans"].values():
        assert plan["predicted"] > 0 and 0 < plan["fastest"] <= plan["measured"] <= plan["slowest"]
        assert plan["error"] == pytest.approx(plan["predicted"] / plan["measured"] - 1)
    assert -1 <= figures["rank_correlation"] <= 1


def test_orders_of_plans_are_compared_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import prediction

    assert prediction.rank_correlation([1, 2, 3], [10, 20, 99]) == pytest.approx(1)
    assert prediction.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert prediction.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9**0.5), "equal values share a rank"
    assert prediction.rank_correlation([1], [1]) == prediction.rank_correlation([1, 1], [1, 2]) == 0


def compare(case: str, options: argparse.Namespace) -> dict[str, float]:
    """One comparison of the overhead or the state benchmark, which fails where the two sides train unlike."""
    import overhead
    import state

    if case in state.CASES:
        shared: dict[str, float] = state.run_case(case, options)
        return shared
    size, make = overhead.CASES[case]
    assert size == 2
    result: dict[str, float] = overhead.measure(*make(options), options)
    return result


@pytest.mark.parametrize("case", ["data_parallel", "pipeline", "zero_1", "fp16"])
def test_benchmarks_compare_like_with_like(world: World, benchmarks: None, case: str) -> None:
    options = argparse.Namespace(pairs=1, steps=1, warmup=1, layers=2, width=32, context=32, rows=16, micro_batches=4)
    assert all(result["ratio"] > 0 for result in world.run(call, compare, case, options, num_ranks=2))


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: (?:held-out )?loss ([\d.]+)", text)]


THREE_STEPS = ("--global-batch-size", "8", "--steps", "3", "--print-every", "1", "--evaluate-batches", "1")


@pytest.fixture(scope="module")
def alone(world: World) -> list[float]:
    """The losses of three steps of the GPT on one rank, and of held-out text."""
    return losses_of(printed_by(world, 1, "examples/train_gpt.py", *SMALL, *THREE_STEPS))


@pytest.mark.parametrize("axis", ["heads", slow(None, id="chosen")])
def test_the_gpt_trains_in_split_stages_of_pipelines(world: World, alone: list[float], axis: str | None) -> None:
    assert len(alone) == 4 and alone[2] < alone[0], "after each step, and of held-out text"
    words = ("--axis", axis) if axis else ()
    script = ("examples/train_gpt.py", *SMALL, *THREE_STEPS)
    text = printed_by(world, 4, *script, "--stages", "2", "--split", "2", *words, recipe="strategies/recipes/gpt_3d.yaml")
    assert "1 replica x 2 stages on 4 devices" in text and text.count("groups of 2 cut") == 2
    if axis:
        assert text.count("cut blocks.0.attention.heads 2:2") == text.count("cut blocks.1.attention.heads 2:2") == 1
    assert losses_of(text) == pytest.approx(alone, abs=1.1e-3), "to the last digit that is printed"


def test_the_split_classifier_trains_on_two_ranks_as_on_one(world: World) -> None:
    size = ("--classes", "4001", "--width", "8", "--image", "8", "--global-batch-size", "16")
    script = ("examples/split_classifier.py", *size, "--steps", "20", "--print-every", "5")
    alone, split = printed_by(world, 1, *script), printed_by(world, 2, *script)
    assert "classes 2001:2000" in split, "the last layer is divided"
    assert split.count(": 8 rows, ") == 2, "each device has half of the rows in the backbone"
    losses = losses_of(alone)
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert losses_of(split) == pytest.approx(losses, abs=2e-3)


def test_the_split_classifier_trains_with_a_hundred_thousand_classes(world: World) -> None:
    size = ("--classes", "100000", "--depth", "18", "--width", "8", "--norm", "batch", "--image", "8", "--global-batch-size", "16")
    text = printed_by(world, 2, "examples/split_classifier.py", *size, "--steps", "4", "--print-every", "3")
    assert "classes 50000:50000" in text
    losses = losses_of(text)
    assert len(losses) == 2 and losses[1] < losses[0]


def test_the_mixture_of_experts_trains_on_two_ranks_as_on_one(world: World) -> None:
    script = ("examples/moe.py", "--layers", "1", "--width", "32", "--context", "32", "--steps", "20", "--print-every", "10")
    alone, divided = printed_by(world, 1, *script), printed_by(world, 2, *script)
    assert "groups of 2 cut batch 8:8 (whole in 3 ops), blocks.0.gate.experts:0 4:4" in divided, "tokens go to experts and back"
    losses, loads = ([re.findall(pattern, text) for text in (alone, divided)] for pattern in (r"loss ([\d.]+)", r"per expert ([\d ]+);"))
    assert len(losses[0]) == len(losses[1]) == len(loads[0]) == len(loads[1]) == 3
    assert float(losses[0][2]) < float(losses[0][0]) - 1, "it learns"
    assert all(abs(float(a) - float(b)) < 2e-3 for a, b in zip(*losses, strict=True))
    assert loads[0][0] == loads[1][0], "the same tokens chose the same experts"
    of_devices = re.findall(r"\S+/\d+ (\d+)", divided.partition("per device")[2].splitlines()[0])
    assert len(of_devices) == 2
    assert sum(map(int, of_devices)) == sum(int(number) for number in loads[1][0].split()) == 16 * 32 * 2
