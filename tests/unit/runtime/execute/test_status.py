"""The status board: what is written is what others read, cut to its place, and half-made records are left out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.runtime.execute.status import RUN_DIRECTORY, RankStatus, StatusBoard, read_all


def open_in(directory: Path, rank: int) -> StatusBoard:
    return StatusBoard.open(rank, {RUN_DIRECTORY: str(directory)})


def test_others_read_what_a_rank_wrote(tmp_path: Path) -> None:
    boards = [open_in(tmp_path, rank) for rank in (0, 1, 12)]
    boards[0].set("0F0")
    boards[1].set("1RECV_F0", (0, 12))
    boards[2].finish()
    found = read_all(tmp_path)
    assert list(found) == [0, 1, 12]
    assert (found[0].state, found[0].action, found[0].waits_for) == ("running", "0F0", ())
    assert (found[1].state, found[1].action, found[1].waits_for) == ("waiting", "1RECV_F0", (0, 12))
    assert found[12].state == "finished"
    assert found[0].pid == os.getpid()


def test_the_record_outlives_the_board(tmp_path: Path) -> None:
    board = open_in(tmp_path, 3)
    board.set("1RECV_B0", (2,))
    board.fail("no bytes from rank 2 for 300 s")
    board.close()
    assert read_all(tmp_path)[3].state == "failed"
    assert read_all(tmp_path)[3].action == "no bytes from rank 2 for 300 s"
    assert read_all(tmp_path)[3].waits_for == (2,), "what it waited for when it failed"


@given(action=st.text(max_size=300), peers=st.lists(st.integers(0, 2**40), max_size=50))
def test_any_action_and_any_peers_are_kept_as_far_as_they_fit(action: str, peers: list[int]) -> None:
    board = StatusBoard.open(0, {})
    board.set("an earlier and longer text than many", (7, 8, 9))
    board.set(action, peers)
    status = board.read()
    assert status.num_waits == len(peers)
    assert list(status.waits_for) == peers[:32]
    kept = status.action.rstrip("\ufffd")
    assert action.encode(errors="replace").startswith(kept.encode(errors="replace"))
    assert status.state == ("waiting" if peers else "running")


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    StatusBoard.open(0, {}).set("0F0")
    assert list(tmp_path.iterdir()) == []


def test_half_made_records_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_00000").write_bytes(b"")
    open_in(tmp_path, 1)
    length = (tmp_path / "rank_00001").stat().st_size
    (tmp_path / "rank_00002").write_bytes(bytes(length))
    assert list(read_all(tmp_path)) == [1]


def test_a_status_reads_as_a_sentence() -> None:
    many = RankStatus(0, 1, "waiting", "0SYNC", tuple(range(32)), 40, since=10.0)
    assert RankStatus(0, 1, "waiting", "1RECV_B3", (2,), 1, since=10.0).describe(10.4) == "waiting in 1RECV_B3 for rank 2, for 0.4 s"
    assert RankStatus(0, 1, "running", "", (), 0, since=10.0).describe(9.0) == "running in no action yet, for 0.0 s"
    assert "30, 31 and 8 more" in many.describe(10.0)
    failed = RankStatus(0, 1, "failed", "1RECV_B3: connection closed", (2,), 1, since=10.0)
    assert failed.describe(11.0) == "failed in 1RECV_B3: connection closed, while it waited for rank 2, 1.0 s ago"
    assert RankStatus(0, 1, "finished", "", (), 0, since=10.0).describe(11.0) == "finished, 1.0 s ago"


def test_a_full_disk_is_told_and_ends_nothing(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        (tmp_path / "full").write_bytes(bytes(4096))
        with pytest.warns(UserWarning, match=rf"cannot record what rank 1 does in {tmp_path}: No space left on device"):
            board = open_in(tmp_path, 1)
        board.set("0F0")
        assert board.read().action == "0F0" and read_all(tmp_path) == {}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
