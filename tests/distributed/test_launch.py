"""`whale run`: passes flags on, ends well with its ranks, and names a dead rank, its last action and who waited."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launched import PATIENCE_SECONDS, interpreter, python, start, wait_until
from tests.examples import slow

SCRIPT = Path(__file__).parent / "death_script.py"
NEVER = str(10 * PATIENCE_SECONDS)


def whale_run(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "whale", "run", *words)


@pytest.mark.parametrize(
    ("how", "said"), [("kill", r"rank 1 \(pid \d+\) was killed by SIGKILL"), ("raise", r"rank 1 \(pid \d+\) exited with code 1")]
)
def test_a_rank_that_dies_is_named_with_its_action_and_its_peers(how: str, said: str) -> None:
    run = interpreter if how == "kill" else python
    result = run("-m", "whale", "run", "--ranks", "3", "--timeout", NEVER, str(SCRIPT), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: {said}; last running in 1F3", result.stderr), result.stderr
    for rank, action in ((0, "0RECV_B3"), (2, "2RECV_F3")):
        assert re.search(rf"rank {rank} .*waiting in {action} for rank 1", result.stderr), result.stderr
    assert result.stderr.index("rank 1 (pid") < result.stderr.index("0RECV_B3"), "the cause comes first"


def test_a_script_gets_its_own_words_and_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batch: 4\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "from whale.runtime.execute.status import StatusBoard\n"
        "dist.init_process_group('gloo')\n"
        "board = StatusBoard.open(dist.get_rank())\n"
        "dist.barrier()\n"
        "board.finish()\n"
        "dist.destroy_process_group()\n"
        "found = sys.argv[1:], os.environ['WHALE_RECIPE'], os.environ['OMP_NUM_THREADS']\n"
        "open(f'{os.path.dirname(__file__)}/{os.environ[\"RANK\"]}.txt', 'w').write(repr(found))\n"
    )
    result = interpreter("-m", "whale", "run", "--nproc-per-node", "2", "--recipe", str(recipe), str(script), "--ranks", "7", "--recipe=x")
    assert result.returncode == 0 and "whale run:" not in result.stderr, result.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == repr((["--ranks", "7", "--recipe=x"], str(recipe), "1"))


def test_a_faulty_recipe_starts_no_rank(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pipeline:\n  num_micro_batches: 4\n")
    result = whale_run("--ranks", "2", "--recipe", str(recipe), str(SCRIPT), "kill")
    assert result.returncode == 1
    assert "ConfigError" in result.stderr and "num_micro_batch" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("how", "timeout", "said"),
    [
        ("KILL", NEVER, "was killed by SIGKILL; last running in STEP"),
        slow("TERM", NEVER, "was killed by SIGTERM; last running in STEP", id="TERM"),
        ("STOP", "10", r"was paused \(SIGSTOP or a debugger\), then killed; last running in STEP"),
        # torchrun may stop it while it ends, as rank 0 ends at the same time
        ("WARN", NEVER, "(exited with code 1|was stopped by SIGTERM); last failed in STEP: the end"),
    ],
    ids=["KILL", None, "STOP", "WARN"],
)
def test_a_pipeline_that_loses_a_rank_ends_and_says_where(how: str, timeout: str, said: str) -> None:
    """A dead rank is noticed at once, and one that stands still after the time that a rank may wait; it is named first."""
    result = whale_run("--ranks", "2", "--timeout", timeout, str(SCRIPT.with_name("engine_death_script.py")), how)
    assert result.returncode == 1
    assert re.search(rf"whale run: rank 1 \(pid \d+\) {said}", result.stderr), result.stderr
    # on a busy machine rank 0 is told to end before it has come to wait
    assert re.search(r"whale run: rank 0 .*((waited|waiting in [^;]+) for rank 1|running in)", result.stderr), result.stderr
    assert result.stderr.index("whale run: rank 1") < result.stderr.index("whale run: rank 0"), "the cause comes first"
    assert "forcefully" not in result.stderr, "torchrun did so, half a minute later"
    if how == "WARN":
        assert "with rank 1 did not complete: rank 1 has failed: UserWarning: the end" in result.stderr, result.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_ranks_end_with_a_launcher_that_is_killed_or_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    """After Ctrl-C the launcher cleans up; after a kill the next run does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "with open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}.part', 'w') as file:\n"
        "    file.write(f'{os.getpid()} {os.environ[\"WHALE_RUN_DIR\"]}')\n"
        "os.rename(file.name, file.name.removesuffix('.part'))\n"
        "signal.pause()\n"
    )
    launcher = start("-m", "whale", "run", "--ranks", "2", str(script), str(tmp_path))
    said = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(path.exists() for path in said), "the ranks have begun", launcher)
    launcher.send_signal(how)
    assert launcher.wait(PATIENCE_SECONDS) == (130 if how is signal.SIGINT else -how)
    pids, directories = zip(*(path.read_text().split() for path in said), strict=True)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the ranks have ended")
    if how is signal.SIGKILL:
        (empty := tmp_path / "empty.py").touch()
        assert whale_run("--ranks", "1", str(empty)).returncode == 0
    assert not Path(directories[0]).exists()


def is_alive(pid: str) -> bool:
    """Whether a process, which may be nobody's child, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("words", [(), ("--elastic", "1")], ids=["plain", "elastic"])
def test_on_one_host_nothing_listens_to_others(tmp_path: Path, words: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, os, torch.distributed as dist, whale.comm\n"
        "world = whale.comm.connect(600)\n"
        "world.barrier()\n"
        "def sockets(pid):\n"
        "    for name in os.listdir(f'/proc/{pid}/fd'):\n"
        "        with contextlib.suppress(FileNotFoundError):  # closed since it was listed\n"
        "            yield os.readlink(f'/proc/{pid}/fd/{name}')\n"
        "own = {*sockets(os.getpid()), *sockets(os.getppid())}\n"
        "listens, places = '0A', []\n"
        "for name in ('tcp', 'tcp6'):\n"
        "    for line in open(f'/proc/net/{name}').read().splitlines()[1:]:\n"
        "        words = line.split()\n"
        "        if words[3] == listens and f'socket:[{words[9]}]' in own:\n"
        "            places.append(words[1].partition(':')[0])\n"
        "print(' '.join((*places, '\\n')), end='')\n"
        "world.barrier()\n"
    )
    result = whale_run(*words, "--ranks", "2", str(script))
    assert result.returncode == 0, result.stderr
    places = re.findall("[0-9A-F]{8,}", result.stdout)
    assert len(places) >= 4 and set(places) == {"0100007F"}, f"a store and a rank each, at 127.0.0.1: {result.stdout}"


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
    result = interpreter("-m", "whale", "run", "--ranks", "2", str(script))
    assert result.returncode == 0, result.stderr
    assert "runloop" not in result.stdout and "python" in result.stdout, result.stdout


def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    """By its launcher, where of several signals the first counts; then by one rank."""
    words = ["--ranks", "2", str(SCRIPT.with_name("preempted_script.py")), str(tmp_path)]
    for number in range(2):
        launcher = start("-m", "whale", "run", *words)
        wait_until(lambda run=number: len(list(tmp_path.glob(f"{run}_*"))) == 2, "the ranks have begun", launcher)
        if number == 0:
            launcher.send_signal(signal.SIGTERM)
            launcher.send_signal(signal.SIGTERM)
        else:
            (rank,) = tmp_path.glob(f"{number}_1.*")
            os.kill(int(rank.suffix[1:]), signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode == 128 + signal.SIGTERM, said
        assert re.search(r"whale: [12] of 2 ranks received SIGTERM: saved .*step_\d+; the run ends with exit code 143\n", said), said
        assert "whale run: stopped by SIGTERM" in said and "Traceback" not in said and "DataLoader" not in said, said
    result = whale_run(*words)
    assert result.returncode == 0, result.stderr
