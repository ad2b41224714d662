"""`whale run`: passes flags on, ends well with its ranks, and names a dead rank, its last action and who waited."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "death_script.py"


def whale_run(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "whale", "run", *words], capture_output=True, text=True, timeout=100)
    return result, time.monotonic() - begin


@pytest.mark.parametrize(
    ("how", "said"), [("kill", r"rank 1 \(pid \d+\) was killed by SIGKILL"), ("raise", r"rank 1 \(pid \d+\) exited with code 1")]
)
def test_a_rank_that_dies_is_named_with_its_action_and_its_peers(how: str, said: str) -> None:
    result, seconds = whale_run("--ranks", "3", "--timeout", "60", str(SCRIPT), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: {said}; last running in 1F3", result.stderr), result.stderr
    for rank, action in ((0, "0RECV_B3"), (2, "2RECV_F3")):
        assert re.search(rf"rank {rank} .*waiting in {action} for rank 1", result.stderr), result.stderr
    assert result.stderr.index("rank 1 (pid") < result.stderr.index("0RECV_B3"), "the cause comes first"
    assert seconds < 60


def test_a_run_that_ends_well_returns_zero() -> None:
    result, _ = whale_run("--nproc-per-node", "2", str(SCRIPT), "none")
    assert result.returncode == 0, result.stderr
    assert "whale run:" not in result.stderr


def test_a_script_gets_its_own_words_and_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batch: 4\n")
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['WHALE_RECIPE'], os.environ['OMP_NUM_THREADS'])\n")
    result, _ = whale_run("--ranks", "2", "--recipe", str(recipe), str(script), "--ranks", "7", "--recipe=x")
    assert result.stdout.splitlines() == [f"['--ranks', '7', '--recipe=x'] {recipe} 1"] * 2, result.stderr


def test_a_faulty_recipe_starts_no_rank(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batches: 4\n")
    result, _ = whale_run("--ranks", "2", "--recipe", str(recipe), str(SCRIPT), "none")
    assert result.returncode == 1
    assert "ConfigError" in result.stderr and "num_micro_batch" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("how", "said"), [("dies", "was killed by SIGKILL"), ("hangs", "was stopped by SIGTERM")])
def test_a_pipeline_that_loses_a_rank_ends_and_says_where(how: str, said: str) -> None:
    """A killed rank is noticed at once, one that hangs after the time that a rank may wait."""
    result, seconds = whale_run("--ranks", "2", "--timeout", "5", str(SCRIPT.with_name("engine_death_script.py")), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: rank 1 \(pid \d+\) {said}; last running in STEP", result.stderr), result.stderr
    assert re.search(r"whale run: rank 0 .*(waited|waiting in \S+) for rank 1", result.stderr), result.stderr
    assert seconds < 60


def test_no_thread_of_a_process_group_outlives_the_script(tmp_path: Path) -> None:
    """One that lets go of a tensor while the interpreter ends aborts the process: a run that went well would fail, now and then."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, torch\n"
        "names = lambda: sorted(open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task'))\n"
        "atexit.register(lambda: print(names()))\n"
        "import whale\n"
        "batch = torch.randn(4, 4)\n"
        "engine = whale.parallelize(torch.nn.Linear(4, 4), loss=lambda output, batch: output.square().mean(), batch=batch)\n"
        "engine.step(batch)\n"
    )
    result, _ = whale_run("--ranks", "2", str(script))
    assert result.returncode == 0, result.stderr
    assert "runloop" not in result.stdout and "python" in result.stdout, result.stdout
