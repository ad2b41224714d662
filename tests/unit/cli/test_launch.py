"""`whale run`'s words and its account of a death, without starting any rank."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from whale.cli import deaths, launch
from whale.errors import ConfigError
from whale.runtime.execute.status import RankStatus


@dataclass
class Failure:
    """As torchrun's `ProcessFailure`."""

    exitcode: int
    pid: int = 100
    timestamp: int = 0
    error_file: str = "<N/A>"

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


@dataclass
class Failed:
    """As torchrun's `ChildFailedError`."""

    failures: dict[int, Failure] = field(default_factory=dict)


def status(rank: int, state: Any, action: str, *waits_for: int) -> RankStatus:
    return RankStatus(rank, 100 + rank, state, action, waits_for, len(waits_for), since=10.0)


NOBODY = deaths.Deaths()


def describe(failures: dict[int, Failure], *statuses: RankStatus, seen: deaths.Deaths = NOBODY) -> list[str]:
    return deaths.describe_failure(cast(Any, Failed(failures)), {s.rank: s for s in statuses}, 12.0, seen).splitlines()


def test_the_killed_rank_comes_before_those_that_lost_it() -> None:
    lines = describe(
        {0: Failure(1, timestamp=5), 1: Failure(-9, timestamp=6), 2: Failure(-15, timestamp=6)},
        status(0, "failed", "0RECV_B3: connection closed", 1),
        status(1, "running", "1F3"),
        status(2, "waiting", "2RECV_F3", 1),
    )
    assert lines == [
        "whale run: rank 1 (pid 100) was killed by SIGKILL; last running in 1F3, for 2.0 s",
        "whale run: rank 0 (pid 100) exited with code 1; last failed in 0RECV_B3: connection closed, while it waited for rank 1, 2.0 s ago",
        "whale run: rank 2 (pid 100) was stopped by SIGTERM; last waiting in 2RECV_F3 for rank 1, for 2.0 s",
    ]


def test_a_rank_that_failed_by_itself_comes_before_those_that_waited() -> None:
    failures = {0: Failure(1, timestamp=4), 1: Failure(1, timestamp=5)}
    lines = describe(failures, status(0, "failed", "0RECV_B3: closed", 1), status(1, "failed", "1F3: bad value"))
    assert lines[0].startswith("whale run: rank 1 ")


def test_a_rank_that_was_stopped_while_it_ended_comes_before_those_that_waited_for_it() -> None:
    failures = {0: Failure(1, timestamp=4), 1: Failure(-15, pid=7, timestamp=5)}
    lines = describe(failures, status(0, "failed", "0RECV_B3: rank 1 has failed", 1), status(1, "running", "STEP"), seen=deaths.Deaths(100))
    assert lines[0].startswith("whale run: rank 1 (pid 7) was stopped by SIGTERM; last running in STEP")


def test_a_rank_that_sigterm_ended_before_all_others_comes_before_them() -> None:
    lines = describe(
        {0: Failure(-15, pid=7), 1: Failure(1), 2: Failure(-15, pid=8)}, status(2, "waiting", "2RECV_F3", 1), seen=deaths.Deaths(first=8)
    )
    assert [line.split()[3] for line in lines if line.startswith("whale run: rank")] == ["2", "1", "0"]
    assert "was killed by SIGTERM" in lines[0] and "was stopped by SIGTERM" in lines[2]


def test_a_rank_that_stood_still_comes_before_those_that_waited_for_it() -> None:
    lines = describe({0: Failure(1), 1: Failure(-9, pid=7)}, status(0, "failed", "1RECV_F0", 1), seen=deaths.Deaths(100, {7}))
    assert lines[0].startswith("whale run: rank 1 (pid 7) was paused (SIGSTOP or a debugger), then killed;")


def test_ranks_that_had_not_begun_or_still_run_are_told_too() -> None:
    assert describe({0: Failure(1)}) == [
        "whale run: rank 0 (pid 100) exited with code 1; last seen before its first action",
        "  no rank had started a step",
    ]
    lines = describe({0: Failure(1)}, status(1, "waiting", "0SYNC", 0))
    assert lines[1] == "  rank 1 was waiting in 0SYNC for rank 0, for 2.0 s"


def test_words_before_the_script_are_ours_and_torchruns_those_after_are_its_own() -> None:
    words = ["--ranks", "3", "--timeout", "5", "--max-restarts", "1", "train.py", "--ranks", "7", "--recipe", "x"]
    arguments = launch.make_parser().parse_args(words)
    assert (arguments.nproc_per_node, arguments.timeout, arguments.max_restarts, arguments.recipe) == ("3", 5.0, 1, None)
    assert arguments.training_script == "train.py"
    assert arguments.training_script_args == ["--ranks", "7", "--recipe", "x"]


def test_help_shows_our_own_flags_first() -> None:
    text = launch.make_parser().format_help()
    assert text.startswith("usage: whale run [--ranks N] [--recipe R.yaml]")
    assert text.index("--timeout SECONDS     longest") < text.index("torchrun's flags:") < text.index("--nnodes NNODES")


def test_ranks_get_the_recipe_the_timeout_the_trace_one_thread_and_a_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(2, "eth0"), (1, "lo")])
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("pipeline:\n  num_micro_batch: 2\n")
    words = ["--ranks", "2", "--recipe", "recipe.yaml", "--timeout", "5", "--trace", "recorded", "--progress"]
    words += ["--log", "steps.jsonl", "train.py"]
    assert launch._variables(launch.make_parser().parse_args(words)) == {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "WHALE_RECIPE": str(tmp_path / "recipe.yaml"),
        "WHALE_COMMUNICATION_TIMEOUT_SECONDS": "5.0",
        "WHALE_TRACE_DIRECTORY": str(tmp_path / "recorded"),
        "WHALE_RUNTIME_PROGRESS": "true",
        "WHALE_RUNTIME_LOG_FILE": str(tmp_path / "steps.jsonl"),
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert launch._variables(launch.make_parser().parse_args(["--nnodes", "2", "train.py"])) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--timeout", "0", "train.py"], "--timeout must be more than 0"),
        (["--recipe", "none.yaml", "train.py"], "none.yaml"),
        (["--ranks", "0", "train.py"], "--ranks 0 is not"),
        (["--ranks", "two", "train.py"], "--ranks two is not"),
        (["missing.py"], "no script missing.py"),
    ],
)
def test_bad_flags_start_nothing(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=re.escape(said)):
        launch.run(words)


def test_what_was_recorded_is_told_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch._tell_recorded(None, 0.0)
    launch._tell_recorded(str(tmp_path), 0.0)
    assert capsys.readouterr().err == "", "no folder, or nothing in it: another host's, or a run that ended before"
    report = tmp_path / "report.html"
    report.touch()
    launch._tell_recorded(str(tmp_path), report.stat().st_mtime + 1)
    assert capsys.readouterr().err == "", "of an earlier run"
    launch._tell_recorded(str(tmp_path), report.stat().st_mtime - 1)
    assert f"recorded {report} for a browser" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_a_rank_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} of this host, for the ranks to connect, is not available: Address already in use"
        ):
            launch.run(["--ranks", "1", "--master-port", str(port), str(script)])
        with pytest.raises(ConfigError, match=rf"launchers cannot connect to each other at 127.0.0.1:{port}: .*in use"):
            launch.run(["--nnodes", "2", "--master-port", str(port), str(script)])


def test_a_disk_without_room_for_a_run_is_told_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match=f"no rank can be started: .*{script}"):
        launch.run(["--ranks", "1", "--log-dir", str(script), str(script)])

    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(ConfigError, match=r"cannot record what the ranks do in .*: No space left on device"):
        launch.run(["--ranks", "1", str(script)])


def test_folders_of_runs_that_are_killed_are_removed_and_others_are_not() -> None:
    with launch._run_directory() as running:
        left = Path(tempfile.mkdtemp(prefix="whale_run_", dir=Path(running).parent))
        with launch._run_directory() as another:
            assert Path(running).exists() and Path(another).exists()
            assert not left.exists(), "nobody held its lock"


def test_what_is_no_folder_of_a_run_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "whale_run_pipe")
    (link := tmp_path / "whale_run_link").symlink_to(tmp_path)
    writer = os.open(pipe, os.O_RDWR)  # else what waits for a writer would wait forever
    for path in (pipe, link):
        with pytest.raises(NotADirectoryError):
            launch._locked(path)
    os.close(writer)


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_RECIPE", "before")
    monkeypatch.delenv("WHALE_RUN_DIR", raising=False)
    with launch._environment({"WHALE_RECIPE": "inside", "WHALE_RUN_DIR": "somewhere"}):
        assert (os.environ["WHALE_RECIPE"], os.environ["WHALE_RUN_DIR"]) == ("inside", "somewhere")
    assert os.environ["WHALE_RECIPE"] == "before" and "WHALE_RUN_DIR" not in os.environ


def test_a_folder_for_the_record_that_cannot_be_made_is_told_before_a_rank_starts(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "file"
    for path in (script, file):
        path.touch()
    for directory in (file, file / "below"):
        with pytest.raises(ConfigError, match=re.escape(f"cannot record steps in {directory}: ")):
            launch._check(launch.make_parser().parse_args(["--trace", str(directory), str(script)]))
    launch._check(launch.make_parser().parse_args(["--nnodes", "2", "--trace", str(file), str(script)]))
    launch._check(launch.make_parser().parse_args(["--trace", str(tmp_path / "new"), str(script)]))
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(("codes", "is_so"), [([143, 143], True), ([143, -15], True), ([-15, -15], False), ([143, 1], False), ([], False)])
def test_ranks_that_have_saved_at_sigterm_are_no_failure(codes: list[int], is_so: bool) -> None:
    assert launch.is_preempted(codes) is is_so
