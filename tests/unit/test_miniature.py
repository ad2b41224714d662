"""Ranks slowed and joined by slow links, and everything undone at the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
from miniature import links, shares
from miniature.owners import is_left_over, name_of
from ranks import ended, terminable


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def quota_of(pid: int) -> list[str]:
    """What the kernel says of the group of a process, in either version of control groups."""
    for path in (shares.CGROUPS / "cpu" / name_of(pid) / "cpu.cfs_quota_us", shares.CGROUPS / name_of(pid) / "cpu.max"):
        if path.exists():
            return path.read_text().split()[:1]
    return []


@pytest.mark.parametrize(("share", "quota"), [(0.25, "1250"), (0.05, "1000")], ids=["of 5 ms", "the least there is"])
def test_a_share_is_kept_by_a_quota_and_undone(process: subprocess.Popen[bytes], share: float, quota: str) -> None:
    before = os.sched_getaffinity(process.pid)
    with pytest.raises(KeyError), shares.slowed([process.pid], [share]) as how:
        if how == "quota":
            assert quota_of(process.pid) == [quota]
        assert len(os.sched_getaffinity(process.pid)) == 1 <= len(before)
        raise KeyError
    assert quota_of(process.pid) == []


def test_a_group_weighs_as_much_as_its_process(process: subprocess.Popen[bytes]) -> None:
    os.setpriority(os.PRIO_PROCESS, process.pid, 5)
    with shares.slowed([process.pid], [0.25]) as how:
        found = [path.read_text().strip() for path in shares.CGROUPS.glob(f"**/{name_of(process.pid)}/cpu.[sw]*[se]")]
        if how == "quota":
            assert set(found) & {"336", "5"}


def test_without_control_groups_it_is_stopped_and_goes_on(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "CGROUPS", Path("/nowhere"))
    with shares.slowed([process.pid], [0.25]) as how:
        assert how == "signals"
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state in "SR"


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_part_of_a_core(process: subprocess.Popen[bytes], share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"), shares.slowed([process.pid], [share]):
        pass


def test_a_process_that_ends_meanwhile_leaves_nothing(process: subprocess.Popen[bytes]) -> None:
    with shares.slowed([process.pid], [0.5]):
        process.kill()
        process.wait()
    assert quota_of(process.pid) == []


@pytest.mark.parametrize(
    ("given", "cores", "found"),
    [
        ([1.0, 0.33], [0, 1], (0, 1)),
        ([0.33, 1.0], [4, 7], (7, 4)),
        ([0.6, 0.6, 0.3, 0.3], [0, 1], (0, 1, 0, 1)),
        ([0.25] * 4, [3], (3, 3, 3, 3)),
        ([0.7, 0.1, 0.2], [0], (0, 0, 0)),
    ],
)
def test_cores_are_filled_by_the_largest_shares_first(given: list[float], cores: list[int], found: tuple[int, ...]) -> None:
    assert shares.cores_of(given, cores) == found


def test_shares_need_room_on_the_cores() -> None:
    with pytest.raises(ValueError, match=r"on one core add up to at most 1 \(\[1.0, 0.33\] on 1 core"):
        shares.cores_of([1.0, 0.33], [0])


def test_what_a_dead_process_made_is_left_over(process: subprocess.Popen[bytes]) -> None:
    assert not is_left_over(name_of(0))
    assert not is_left_over(f"whale-{process.pid}-0")
    assert not is_left_over("whale-shop")
    process.kill()
    process.wait()
    assert is_left_over(f"whale-{process.pid}-0")


def test_a_left_over_group_goes_when_the_next_begins(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "cpu" / f"whale-{ended_process()}-7"
    group.mkdir(parents=True)
    monkeypatch.setattr(shares, "CGROUPS", tmp_path)
    dissolved: list[Path] = []
    monkeypatch.setattr(shares, "_dissolve", dissolved.append)
    with shares.slowed([process.pid], [0.5]):
        pass
    assert group in dissolved


def test_ranks_end_with_an_exception_where_they_were_started() -> None:
    rank = multiprocessing.get_context("fork").Process(target=signal.pause)
    rank.start()
    with pytest.raises(KeyError), ended([rank]):
        assert rank.is_alive()
        raise KeyError
    assert rank.exitcode == -signal.SIGKILL


def test_a_request_to_terminate_is_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, terminable():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def ended_process() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen(["true"]) as started:
        started.wait()
    return started.pid


@pytest.mark.skipif(not links.can_make_links(), reason="network namespaces need root and iproute2")
def test_namespaces_have_addresses_and_go_at_the_end() -> None:
    with links.slow_links(2, 100.0) as made:
        for name, address in zip(made.names, made.addresses, strict=True):
            shown = subprocess.run(["ip", "-n", name, "addr"], check=True, capture_output=True, text=True).stdout
            assert address in shown
            bucket = subprocess.run(["tc", "-n", name, "qdisc"], check=True, capture_output=True, text=True).stdout
            assert "rate 100Mbit" in bucket
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in made.names)
