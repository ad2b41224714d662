"""What ``--elastic`` sets of torchrun, and when ranks that fail are given up."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo

from whale.cli import deaths, launch
from whale.cli.deaths import MOST_IN_VAIN, Deaths
from whale.cli.elastic import KEEP, MEETING, MOST_RESTARTS, be_elastic, leave_kept, left_at, take_up_kept
from whale.cli.meeting import Meeting, _listener, _meeting
from whale.comm import Launched, World
from whale.errors import ConfigError
from whale.runtime.execute.call_check import WorldSums
from whale.runtime.execute.status import LOST, RankStatus, StatusBoard
from whale.runtime.program.watch import Watch


def test_torchruns_rendezvous_is_set_and_the_users_words_win() -> None:
    flags = ["--elastic", "2:128", "--rdzv-endpoint", "first:29500"]
    arguments = launch.make_parser().parse_args([*flags, "train.py"])
    assert be_elastic(arguments)["WHALE_CLUSTER_PARTIAL"] == "true"
    assert (arguments.nnodes, arguments.rdzv_backend, arguments.max_restarts) == ("2:128", MEETING, MOST_RESTARTS)
    assert arguments.rdzv_conf == "last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=4"
    arguments = launch.make_parser().parse_args([*flags, "--rdzv-conf", "last_call_timeout=60", "--max-restarts", "5", "train.py"])
    be_elastic(arguments)
    assert arguments.max_restarts == 5 and arguments.rdzv_conf.endswith(",last_call_timeout=60")
    alone = launch.make_parser().parse_args(["--elastic", "1", "train.py"])
    be_elastic(alone)
    assert alone.rdzv_conf == "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
    assert (alone.nnodes, alone.rdzv_endpoint, alone.local_addr) == ("1:1", "localhost:0", "localhost")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elastic", "3:2"], "--elastic 3:2 is not MIN:MAX"),
        (["--elastic", "0:2"], "--elastic 0:2 is not MIN:MAX"),
        (["--elastic", "two"], "--elastic two is not MIN:MAX"),
        (["--elastic", "1:2"], "--elastic 1:2 needs --rdzv-endpoint HOST:PORT"),
        (["--elastic", "1:2", "--nnodes", "2"], "--nnodes cannot be given together with --elastic"),
        (["--elastic", "1:2", "--standalone"], "--standalone cannot be given together with --elastic"),
    ],
)
def test_bad_numbers_of_launchers_start_nothing(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        launch.run([*words, "train.py"])


def test_the_store_of_launchers_listens_at_the_named_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str) -> Any:
        with closing(listener) if (listener := _listener(host, 0)) is not None else nullcontext():
            return None if listener is None else listener.getsockname()[0]

    def lookup(host: str, *_: object, **__: object) -> list[Any]:
        addresses = {"first": "127.0.1.1", "ours": "127.0.0.5", "theirs": "192.0.2.7"}
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], 0))]

    assert found("localhost") == found("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert found("first") is None, "its own name, which stands for another address elsewhere"
    with pytest.raises(OSError, match="Cannot assign requested address"):
        found("theirs")
    monkeypatch.setattr("whale.cli.meeting.ip_address", lambda _: SimpleNamespace(is_loopback=False))
    assert found("ours") == "127.0.0.5"


class ThreeLaunchers(RendezvousHandler):
    """A rendezvous at which this launcher and two others meet."""

    store, num_waiting, closed = HashStore(), 0, False

    def get_backend(self) -> str:
        return "three"

    def get_run_id(self) -> str:
        return "run"

    def next_rendezvous(self) -> RendezvousInfo:
        self.store = HashStore()
        return RendezvousInfo(self.store, 0, 3, RendezvousStoreInfo("localhost", 1))

    def num_nodes_waiting(self) -> int:
        return self.num_waiting

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def shutdown(self) -> bool:
        return True


def beat(meeting: Meeting, *stores: HashStore, at: float = 0.0) -> None:
    """A sign of life of a launcher at a time, behind those of the others in some stores."""
    for store in stores:
        store.add("beat 1", 1), store.add("beat 2", 1)
    with patch.object(time, "monotonic", lambda: at):
        meeting._beat()


def test_agents_begin_anew_where_a_launcher_has_gone_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEEP, str(tmp_path / "kept"))
    others, sign = ThreeLaunchers(), tmp_path / "kept" / LOST
    meeting = Meeting(others, 3600.0, 10.0)
    meeting.next_rendezvous()
    beat(meeting, others.store)
    beat(meeting, others.store, at=20.0)
    beat(meeting, at=30.0)
    assert meeting.num_nodes_waiting() == 0 and not sign.exists()
    others.num_waiting = 1  # all begin anew; ranks hear of silent launchers while agents wait for them to end
    assert meeting.num_nodes_waiting() == 1
    beat(meeting, at=31.0)
    assert meeting.num_nodes_waiting() == 2 and sign.exists()
    assert "whale run: 2 of 3 launchers cannot be reached" in capsys.readouterr().err
    beat(meeting, at=32.0)
    assert meeting.num_nodes_waiting() == 2 and capsys.readouterr().err == "", "it is said once"
    before, others.num_waiting = others.store, 0
    meeting.next_rendezvous()
    beat(meeting, others.store, at=40.0)
    assert meeting.num_nodes_waiting() == 0 and not sign.exists()
    assert int(before.get("beat 0")) == 6, "others may still be ending their ranks of the meeting before"
    meeting.set_closed()
    beat(meeting, at=60.0)
    assert meeting.num_nodes_waiting() == 0 and not sign.exists(), "they have ended"
    assert meeting.shutdown()


def test_a_launcher_meets_by_what_torch_makes_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEP, str(tmp_path / "kept"))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    own = {"is_host": "1", "keep_alive_interval": "60", "last_call_timeout": "1"}
    meeting = _meeting(RendezvousParameters(MEETING, "localhost:0", "run", 1, 1, "localhost", **own))
    assert Meeting.__bases__ == (RendezvousHandler,), "another version of torch may name the parts of its own otherwise"
    assert meeting.next_rendezvous().world_size == 1 and meeting.num_nodes_waiting() == 0
    meeting._beat()
    assert meeting.use_agent_store and meeting.shutdown() and meeting.is_closed()


class Done:
    """Communication that has succeeded."""

    def wait(self, _: timedelta) -> None: ...


def test_a_fault_of_what_all_ranks_agree_on_counts() -> None:
    board = StatusBoard.open(0, {})
    sums = WorldSums(World(0, 2, 0, 2, torch.device("cpu"), timedelta(seconds=1)), cast(Any, None), board, Watch())
    with pytest.raises(ValueError, match="unlike"), board.reporting():
        sums.finish(Launched(cast(Any, Done()), blocks_host=True), "comparing the batch")
        raise ValueError("unlike batches")
    found = Deaths(num_in_vain=MOST_IN_VAIN)
    assert found.fell(board.read(), 0, by_itself=True), board.read()


def test_a_launcher_that_stops_tells_of_no_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = SimpleNamespace(si_pid=7, si_status=signal.SIGTERM, si_code=os.CLD_KILLED)
    monkeypatch.setattr(deaths, "rank_processes", lambda _: [7])
    monkeypatch.setattr(deaths, "_look_at", lambda _, what: ended if what == os.WEXITED else None)
    deaths._look_for_the_next(Deaths(is_stopping=True), str(tmp_path))
    assert capsys.readouterr().err == "" and [*tmp_path.iterdir()] == []
    deaths._look_for_the_next(Deaths(), str(tmp_path))
    assert "was killed by SIGTERM; last seen before its first action; all ranks restart" in capsys.readouterr().err


def test_ranks_that_fail_by_themselves_without_a_step_between_are_given_up() -> None:
    seen = Deaths()
    waited = RankStatus(0, 1, "failed", "1RECV_F0", (1,), 1, 0.0)
    for step in (3, 4):  # each new step counts from the start
        assert not any(seen.fell(None, step, by_itself=True) for _ in range(MOST_IN_VAIN))
    assert not seen.fell(waited, 4, by_itself=True), "it failed because of another"
    assert not seen.fell(None, 4, by_itself=False), "it was told to end"
    assert seen.fell(None, 3, by_itself=True), "a step that is done again is no way on"


def test_what_was_kept_is_left_for_the_next_start_of_the_same_run(tmp_path: Path) -> None:
    def place(*words: str) -> Path:
        return left_at(tmp_path, launch.make_parser().parse_args(["--rdzv-endpoint", *words]))

    first, again = place("first:29500", "train.py"), place("first:29500", "train.py")
    assert first == again and len({first, place("second:29500", "train.py"), place("first:29500", "other.py")}) == 3
    kept, taken = tmp_path / "run" / "kept", tmp_path / "next"
    kept.mkdir(parents=True)
    (kept / LOST).touch()
    assert not leave_kept(kept, first) and not first.exists()
    for name in ("a_0.json", "a_0.safetensors", "fall.json"):
        (kept / name).touch()
    assert leave_kept(kept, first)
    other = tmp_path / "other" / "kept"  # of another launcher of this host
    other.mkdir(parents=True)
    (other / "a_1.json").touch()
    assert leave_kept(other, first)
    take_up_kept(again, taken)
    assert {file.name for file in taken.iterdir()} == {"a_0.json", "a_0.safetensors", "fall.json", "a_1.json"} and not first.exists()
    taken.chmod(0o777)  # anybody may have written to it
    taken.rename(first)
    assert not leave_kept(other, first)
    take_up_kept(first, taken)
    assert not taken.exists()


def test_a_rendezvous_that_is_lost_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(_: object) -> None:
        run = Path(os.environ["WHALE_RUN_DIR"])
        (run / "process.1").touch()
        (run / "kept").mkdir()
        (run / "kept" / "a_0.json").touch()
        raise DistNetworkError("recvValue failed\nException raised from recvBytes\nframe #0")

    monkeypatch.setattr("torch.distributed.run.run", lose)
    monkeypatch.setattr(launch, "_memory", lambda: tmp_path)
    (script := tmp_path / "train.py").touch()
    assert launch.run(["--elastic", "1", str(script)]) == 1
    said = capsys.readouterr().err
    [left] = tmp_path.glob("whale_kept_*")
    assert said.startswith("whale run: the rendezvous at localhost:0 does not answer any more: ") and f"is left in {left}. Start" in said
    assert said.count("\n") == 1 and [file.name for file in left.iterdir()] == ["a_0.json"]
