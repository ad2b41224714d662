"""`whale run`: passes flags on, ends well with its ranks, and names a dead rank, its last action and who waited."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "death_script.py"
PATIENCE_SECONDS = 600
"""Of a machine that is busy; a run that takes so long does not end."""
NEVER = str(10 * PATIENCE_SECONDS)


def whale_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "whale", "run", *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("how", "said"), [("kill", r"rank 1 \(pid \d+\) was killed by SIGKILL"), ("raise", r"rank 1 \(pid \d+\) exited with code 1")]
)
def test_a_rank_that_dies_is_named_with_its_action_and_its_peers(how: str, said: str) -> None:
    result = whale_run("--ranks", "3", "--timeout", NEVER, str(SCRIPT), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: {said}; last running in 1F3", result.stderr), result.stderr
    for rank, action in ((0, "0RECV_B3"), (2, "2RECV_F3")):
        assert re.search(rf"rank {rank} .*waiting in {action} for rank 1", result.stderr), result.stderr
    assert result.stderr.index("rank 1 (pid") < result.stderr.index("0RECV_B3"), "the cause comes first"


def test_a_run_that_ends_well_returns_zero() -> None:
    result = whale_run("--nproc-per-node", "2", str(SCRIPT), "none")
    assert result.returncode == 0, result.stderr
    assert "whale run:" not in result.stderr


def test_a_script_gets_its_own_words_and_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batch: 4\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "found = sys.argv[1:], os.environ['WHALE_RECIPE'], os.environ['OMP_NUM_THREADS']\n"
        "open(f'{os.path.dirname(__file__)}/{os.environ[\"RANK\"]}.txt', 'w').write(repr(found))\n"
    )
    result = whale_run("--ranks", "2", "--recipe", str(recipe), str(script), "--ranks", "7", "--recipe=x")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == repr((["--ranks", "7", "--recipe=x"], str(recipe), "1"))


def test_a_faulty_recipe_starts_no_rank(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batches: 4\n")
    result = whale_run("--ranks", "2", "--recipe", str(recipe), str(SCRIPT), "none")
    assert result.returncode == 1
    assert "ConfigError" in result.stderr and "num_micro_batch" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("how", "timeout", "said"), [("dies", NEVER, "was killed by SIGKILL"), ("hangs", "30", "was stopped by SIGTERM")], ids=["dies", "hangs"]
)
def test_a_pipeline_that_loses_a_rank_ends_and_says_where(how: str, timeout: str, said: str) -> None:
    """A killed rank is noticed at once, one that hangs after the time that a rank may wait."""
    result = whale_run("--ranks", "2", "--timeout", timeout, str(SCRIPT.with_name("engine_death_script.py")), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: rank 1 \(pid \d+\) {said}; last running in STEP", result.stderr), result.stderr
    assert re.search(r"whale run: rank 0 .*(waited|waiting in [^;]+) for rank 1", result.stderr), result.stderr


KEPT_ENGINES = """
import atexit, os

def names():
    return sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))

atexit.register(lambda: print(names()))
import torch, whale

batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
engines = []
for whole, loss in ((whale.replicate(1), "mean"), (whale.replicate(1), "alike"), (whale.split(2), "mean")):
    torch.manual_seed(0)
    with whole:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    losses = {"mean": lambda output, _: output.square().mean(), "alike": lambda output, _: (output @ output.T).softmax(-1).square().mean()}
    engine = whale.parallelize(model, loss=losses[loss], batch=batch, config={"planning": {"search": "off"}})
    engines.append((engine, engines, engine.step(batch)))
    engine.state_dict()
"""
"""A script that keeps, in a ring of references, engines with groups of all sorts: of all ranks, of what replicas gather, of a split."""


def test_no_thread_of_a_process_group_outlives_the_script(tmp_path: Path) -> None:
    """One that lets go of a tensor while the interpreter ends aborts the process: a run that went well would fail, now and then."""
    script = tmp_path / "script.py"
    script.write_text(KEPT_ENGINES)
    result = whale_run("--ranks", "2", str(script))
    assert result.returncode == 0, result.stderr
    assert "runloop" not in result.stdout and "python" in result.stdout, result.stdout
