"""`whale run --elastic`: launchers that are killed and that come, and losses that are those of an undisturbed training."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launched import PATIENCE_SECONDS, Started, python, start, wait_until
from tests.distributed.world import World
from whale.cli.elastic import SILENT_SECONDS
from whale.comm import Launched, connect
from whale.errors import RuntimeFault

SCRIPT = Path(__file__).parent / "elastic_script.py"
NUM_STEPS = 12


class Launchers:
    """Of one run, on this machine; the place where they meet is this process's.

    Args:
        folder: of the run.
        num_ranks: of each.
        words: faults, as the script takes them.
        silent_seconds: so long may one be silent; where none is lost, more than a busy machine ever holds one up.
    """

    def __init__(self, folder: Path, num_ranks: int, *words: str, bounds: str = "1:2", silent_seconds: int = PATIENCE_SECONDS) -> None:
        self.folder, self.words = folder, words
        self.started: list[Started] = []
        self.environment: dict[str, str] = {}
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        meeting = f"is_host=0,keep_alive_max_attempt={silent_seconds}"  # of one second each
        place = ("--rdzv-endpoint", f"localhost:{self._store.port}", "--rdzv-conf", meeting, "--local-addr", "localhost")
        flags = ("--elastic", bounds, *place, "--ranks", str(num_ranks), "--timeout", "60")
        self._words = ["-m", "whale", "run", *flags, str(SCRIPT), str(folder), str(NUM_STEPS), *words]

    def start(self, enough: int) -> None:
        """One more; its ranks train on until they are enough."""
        environment = {**os.environ, **self.environment, "ENOUGH_RANKS": str(enough)}
        self.started.append(start(*self._words, env=environment))

    def end(self) -> list[tuple[int, str]]:
        """The exit code of each, and what it said."""
        said = [launcher.communicate()[1] for launcher in self.started]
        return [(launcher.returncode, text) for launcher, text in zip(self.started, said, strict=True)]

    @property
    def losses(self) -> list[tuple[int, float, list[int]]]:
        """Step, loss and the rows of each rank, as they came."""
        return losses_in(self.folder)


def losses_in(folder: Path) -> list[tuple[int, float, list[int]]]:
    """What the script has written."""
    file = folder / "losses.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def launchers(folder: Path, num_ranks: int, *words: str, **settings: Any) -> Iterator[Launchers]:
    """Launchers that all end here."""
    folder.mkdir()
    found = Launchers(folder, num_ranks, *words, **settings)
    try:
        yield found
    finally:
        for launcher in found.started:
            launcher.kill()
            launcher.wait()


def check_undisturbed(losses: list[tuple[int, float, list[int]]], folder: Path) -> None:
    """Holds the last loss of each step to those of one rank that nothing happens to: no sample came twice, and none was left out."""
    last = {step: loss for step, loss, _ in losses}
    folder.mkdir()
    done = python(str(SCRIPT), str(folder), str(max(last)))
    assert done.returncode == 0, done.stderr
    assert last == pytest.approx({step: loss for step, loss, _ in losses_in(folder)}, rel=1e-10)


def test_a_launcher_is_killed_and_another_comes(tmp_path: Path) -> None:
    with launchers(tmp_path / "run", 1, "6:1:launcher", silent_seconds=SILENT_SECONDS) as run:
        run.start(enough=2)
        run.start(enough=2)
        wait_until(lambda: any(len(rows) == 1 for *_, rows in run.losses), "one rank goes on alone")
        run.start(enough=2)
        ended = run.end()
        assert sorted(code for code, _ in ended) == [-9, 0, 0], ended
        sizes = [len(rows) for *_, rows in run.losses]
        assert sizes[0] == sizes[-1] == 2 and 1 in sizes
        (survivor,) = (text for code, text in ended[:2] if code == 0)
        assert "whale run: rank 0 " in survivor and "all ranks restart" in survivor, survivor
        source = r"(?:memory of 1 rank|\S+/step_\d+)"  # of the same step the checkpoint comes first
        resumes = rf"whale: resumes after step (\d+), from {source}; lost: [\d.]+ s, 0 steps; (gone|new): 1 x cpu"
        assert re.findall(resumes, survivor)[0] == ("6", "gone"), survivor
        # Rank 0 says it: of the launcher with the lower process number, which is the other one where these numbers begin anew.
        told = [each for code, text in ended if code == 0 for each in re.findall(resumes, text)]
        assert {kind for _, kind in told} == {"gone", "new"}, ended
        check_undisturbed(run.losses, tmp_path / "alone")


def wait_for_a_silent_rank(rank: int, num_ranks: int, sign: Path) -> str:
    """Rank 2 sends nothing, and lives on until rank 0 has given up; rank 1 has hung up before. Of two groups one was destroyed."""
    world, store = connect(timeout_seconds=PATIENCE_SECONDS), dist.distributed_c10d._get_default_store()
    destroyed, used = dist.new_group(), dist.new_group()
    for group in (destroyed, used):
        world.waits.lines.add(group)
    dist.destroy_process_group(destroyed)
    if rank == 1:
        world.waits.lines.close_all()
        sign.touch()
    if rank > 0:
        store.get("has given up")
        return ""
    world.waits.heed(sign)
    with pytest.raises(RuntimeFault) as caught:
        world.waits.wait(Launched(dist.irecv(torch.zeros(1), 2, group=used), blocks_host=True), "1RECV_F0", [2])
    store.set("has given up", "")
    assert caught.value.lost_peers
    return str(caught.value)


def test_a_wait_is_given_up_when_the_launcher_says_that_others_cannot_be_reached(world: World, tmp_path: Path) -> None:
    said, *_ = world.run(wait_for_a_silent_rank, tmp_path / "lost", num_ranks=3)
    assert "1RECV_F0 with rank 2 did not complete: this host's launcher cannot reach ranks of another host" in said


CLUSTER = """
name: four
hosts: [{name: these, devices: [{model: cpu}, {model: cpu, slowdown: 3}, {model: cpu}, {model: cpu, slowdown: 2}]}]
"""


def test_launchers_come_one_by_one_with_devices_of_other_speeds(tmp_path: Path) -> None:
    with launchers(tmp_path / "run", 1, bounds="2:4") as run:
        file = tmp_path / "cluster.yaml"
        file.write_text(CLUSTER)
        run.environment["WHALE_CLUSTER_FILE"] = str(file)
        run.start(enough=4)
        for number in (2, 3, 4):
            run.start(enough=4)
            wait_until(lambda number=number: any(len(rows) == number for *_, rows in run.losses), f"{number} ranks train")
        ended = run.end()
        assert [code for code, _ in ended] == [0] * 4, ended
        shares = [rows for rows, _ in groupby(rows for *_, rows in run.losses)]
        assert [len(rows) for rows in shares] == [2, 3, 4]
        assert all(min(rows[::2]) > max(rows[1::2]) for rows in shares), f"slower devices take fewer: {shares}"
        told = re.findall(r"resumes after step \d+, from .*; lost: [\d.]+ s, (\d+) steps?; new: 1 x cpu", ended[0][1])
        assert told == ["0", "0"], ended
        steps = [step for step, *_ in run.losses]
        assert steps == [*range(1, len(steps) + 1)], "each step was done once"
        check_undisturbed(run.losses, tmp_path / "alone")


def test_faults_of_all_kinds_lose_no_step(tmp_path: Path) -> None:
    """Of one rank on each of two hosts, one is killed, then one stands still, then one is told to end."""
    with launchers(tmp_path / "run", 1, "3:1:KILL", "5:0:STOP", "7:1:TERM") as run:
        run.start(enough=2)
        run.start(enough=2)
        ended = run.end()
        assert [code for code, _ in ended] == [0, 0], ended
        said = "".join(text for _, text in ended)
        source = r"(?:memory of \d ranks?|\S+/step_8)"
        went_on = re.findall(rf"whale: resumes after step (\d+), from {source}; lost: [\d.]+ s, 0 steps\n", said)
        assert went_on[:2] == ["3", "5"] and int(went_on[2]) in (7, 8, 9), said
        assert "was killed by SIGKILL" in said and "was paused (SIGSTOP or a debugger), then killed" in said, said
        check_undisturbed(run.losses, tmp_path / "alone")
