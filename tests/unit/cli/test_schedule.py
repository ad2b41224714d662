"""``whale schedule``: timeline, figures, JSON, files, and wrong words."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from whale.cli import schedule as verb
from whale.errors import ConfigError, ScheduleError
from whale.schedules import BUILDERS


def run(words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    return verb.run(parser.parse_args(["schedule", *words.split()]))


def figures(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(f"{words} --json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert set(found) == {"makespan", "bubble_rate", "peak_in_flight", "exposed_sync", "ranks"}
    return found


def test_timeline_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    run("1f1b --stages 2 --micro-batches 2")
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 2 micro-batches, stages on ranks 0 1",
        "rank 0 |F0 F1       B0---    B1---",
        "rank 1 |   F0 B0--- F1 B1---",
        "peak in flight  2 1",
    ]


def test_timeline_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    run("gpipe --stages 2 --micro-batches 2 --forward 2 --backward-input 2 --sync 4")
    assert capsys.readouterr().out.splitlines() == [
        "gpipe: 2 micro-batches, stages on ranks 0 1",
        "rank 0 |F0 F1       B0 B1",
        "  sync |                  0SYNC",
        "rank 1 |   F0 F1 B0 B1",
        "  sync |               1SYNC",
        "makespan        16",
        "bubble          4, 0.3333 of the longest span",
        "exposed sync    4",
        "peak in flight  2 2",
    ]


def test_whole_backward_and_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    whole = figures("1f1b --stages 4 --micro-batches 8 --forward 1 --backward-input 2", capsys)
    parts = figures("1f1b --stages 4 --micro-batches 8 --forward 1 --backward-input 1.25 --backward-weight 0.75", capsys)
    assert whole == parts
    assert (whole["makespan"], whole["bubble_rate"], whole["peak_in_flight"]) == (33, 9 / 33, [4, 3, 2, 1])
    split = figures("zb_h1 --stages 4 --micro-batches 8 --forward 1 --backward-input 1 --backward-weight 1", capsys)
    assert split["bubble_rate"] == 3 / 27


def test_times_are_those_of_one_chunk_and_sync_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stages 4 --micro-batches 16 --chunks 4 --forward 0.25 --backward-input 0.5 --sync 32"
    assert figures(f"aiao {words}", capsys)["makespan"] == 58.25
    found = figures(f"interleaved --group 8 {words}", capsys)
    assert (found["makespan"], found["exposed_sync"]) == (70.25, 20)
    assert max(found["peak_in_flight"]) == 31  # type: ignore[call-overload]


def test_recompute_is_plain_where_the_schedule_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stages 4 --micro-batches 8 --forward 1 --backward-input 2 --recompute 1"
    assert figures(f"1f1b {words}", capsys)["makespan"] == 44
    assert figures(f"shifted_critical_path {words}", capsys)["makespan"] == 38
    assert figures("recompute_early --stages 4 --micro-batches 8 --forward 1 --backward-input 2", capsys)["makespan"] == 41


def test_ranks_are_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures("gpipe --stages 1 --micro-batches 1", capsys)["ranks"] == [["0F0", "0B0", "0SYNC", "STEP"]]
    talking = figures("gpipe --stages 2 --micro-batches 1 --communication", capsys)["ranks"]
    assert talking == [
        ["0F0", "0SEND_F0", "LOSS", "1POST_B0", "0RECV_B0", "0B0", "0SYNC", "STEP"],
        ["0POST_F0", "1RECV_F0", "1F0", "LOSS", "1B0", "1SYNC", "1SEND_B0", "STEP"],
    ]


def test_a_file_round_trip(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("zb_v --stages 2 --micro-batches 3 --communication --text")
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out)
    words = "--forward 1 --backward-input 1 --backward-weight 1 --transfer 0.5"
    assert figures(f"--file {path} {words}", capsys) == figures(f"zb_v --stages 2 --micro-batches 3 --communication {words}", capsys)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("1B1 ", "", "1B1 is missing on rank 1\n  at {path}:4"),
        ("1B1 ", "1B1 1B1 ", "1B1 occurs twice on rank 1: actions 4 and 5\n  at {path}:4"),
        ("1B1 ", "1X1 ", "'1X1' is not an action\n  at {path}:4"),
        ("rank 1:", "rank 2:", "expected 'rank 1: ...', got 'rank 2: "),
        ("schedule", "timetable", "expected 'schedule NAME, M micro-batches"),
    ],
)
def test_a_wrong_file(old: str, new: str, wanted: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("1f1b --stages 2 --micro-batches 2 --text")
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out.replace("rank 1:", "\nrank 1:").replace(old, new, 1))
    with pytest.raises(ScheduleError) as caught:
        run(f"--file {path}")
    assert wanted.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("1f1b --stages 2", "--micro-batches or --file is missing"),
        ("--stages 2 --micro-batches 2", "NAME or --file is missing"),
        ("1f2b --stages 2 --micro-batches 2", "did you mean 1f1b"),
        ("interleaved --stages 4 --micro-batches 8 --chunks 2 --group 3", "group size 3 is too small"),
        ("1f1b --stages 2 --micro-batches 2 --forward 1", "given together"),
        ("1f1b --stages 2 --micro-batches 2 --backward-weight 1", "needs --backward-input"),
    ],
)
def test_wrong_words(words: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        run(words)


def test_wrong_words_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text("schedule s, 1 micro-batches, stages on ranks 0\nrank 0: 0F0 0B0 0SYNC STEP\n")
    with pytest.raises(ConfigError, match="--stages cannot be given together with --file"):
        run(f"--file {path} --stages 2")
    with pytest.raises(ConfigError, match="no R actions"):
        run(f"--file {path} --forward 1 --backward-input 1 --recompute 1")
    with pytest.raises(ScheduleError, match="cannot be read"):
        run(f"--file {tmp_path / 'other.txt'}")


def test_times_are_finite_and_not_negative(capsys: pytest.CaptureFixture[str]) -> None:
    for time in ("-1", "nan", "x"):
        with pytest.raises(SystemExit) as caught:
            run(f"1f1b --stages 2 --micro-batches 2 --transfer {time}")
        assert caught.value.code == 2


PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
PICTURES = re.findall(r"^```bash\nwhale schedule ([^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("words", "picture"), PICTURES, ids=[words.split()[0] for words, _ in PICTURES])
def test_pictures_of_the_page_are_what_is_printed(words: str, picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(words)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == picture.splitlines()


def test_the_page_names_every_schedule() -> None:
    assert PICTURES
    assert set(re.findall(r"^\| `(\w+)` \| [^|]*\| [^|]*\|$", PAGE.read_text(), re.MULTILINE)) == set(BUILDERS)
