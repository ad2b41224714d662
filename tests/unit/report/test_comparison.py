"""Two recorded runs: each figure of both, bars on one scale, and what is in one run alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.planning.graphs import cluster
from tests.unit.report.pages import Page
from tests.unit.report.test_page import made, slowed
from whale.cli import main
from whale.ir.serialization import from_json, to_json
from whale.ir.timeline import STEPS, RecordedRun
from whale.report import comparison_html, differences, recorded_run


def run(factor: float, *others: float) -> RecordedRun:
    plan, _, _, step = made(cluster((3e9, 1e9)), num_stages=2, num_micro_batch=4)
    return recorded_run(plan, step, [slowed(step, each) for each in (factor, *others)])


def test_each_figure_stands_beside_the_other() -> None:
    a, b = run(2.0), run(1.0)
    found = {name: rest for name, *rest in differences(a, b)}
    assert found["step"][2] == found["h0/0 computes"][2] == "-50.0%" and found["step, predicted"][2] == "+0.0%"
    assert found["bubble rate"][2] == "+0.0 points" and found["between steps"][:2] == ["250 ms", "250 ms"]
    assert {"h0/0 exposed communication", "h0/1 computes"} <= found.keys()
    alone = replace(b, steps=tuple(replace(each, devices=(replace(each.devices[0], device="h9/0"),)) for each in b.steps))
    found = {name: rest for name, *rest in differences(a, alone)}
    assert found["h0/1 computes"][1:] == ["-", "-"] and found["h9/0 computes"][0] == "-"


def test_a_page_draws_both_on_one_scale() -> None:
    a, b = run(3.0, 2.0, 1.0), run(4.0)
    assert a.shown is a.steps[1]
    page = Page(comparison_html(a, b, ("before", "after")))
    assert page.references == [] and page.data["names"] == ["A", "B"] and page.data["isTogether"]
    ends = [max(bar[4] for track in page.data["tracks"] for bar in track["runs"][number]["bars"]) for number in (0, 1)]
    assert ends[1] == page.data["ticks"] and ends[0] == pytest.approx(ends[1] / 2, rel=1e-3)
    assert "A: before, 1 replica x 2 stages" in page.text and "of 3 that were recorded, which took " in page.text
    assert len(page.data["tracks"]) == 2 and [track["title"] for track in page.data["tracks"]] == ["stage 0", "stage 1"]


def test_a_device_of_one_run_has_an_empty_row_in_the_other() -> None:
    a, b = run(1.0), run(1.0)
    fewer = replace(b, steps=tuple(replace(each, devices=each.devices[:1], num_rows=32) for each in b.steps))
    page = Page(comparison_html(a, fewer, ("a", "b")))
    assert [[len(own["bars"]) > 0 for own in track["runs"]] for track in page.data["tracks"]] == [[True, True], [True, False]]
    assert "other numbers of rows: A 64, B 32" in page.text


def test_the_verb_reads_what_a_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in (("a", run(2.0)), ("b", run(1.0))):
        (tmp_path / name).mkdir()
        (tmp_path / name / STEPS).write_text(to_json(found))
        assert from_json(RecordedRun, to_json(found)) == found
    words = ["report", str(tmp_path / "a"), "--against"]
    output = ["--output", str(tmp_path / "page.html")]
    assert main([*words, str(tmp_path / "b"), *output]) == 0
    assert "-50.0%" in capsys.readouterr().out and Page((tmp_path / "page.html").read_text()).data["tracks"]
    assert main([*words, str(tmp_path / "c"), *output]) == 1
    assert "holds no recorded run" in capsys.readouterr().err
    (tmp_path / "b" / STEPS).write_text("{}")
    assert main([*words, str(tmp_path / "b"), *output]) == 1
    assert "RecordedRun lacks plan, planned_rows, predicted_seconds, steps" in capsys.readouterr().err
