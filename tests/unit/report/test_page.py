"""The report: one page without references, in which every bar and message stands, the straggler is told, and big plans are small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.unit.planning.graphs import chain, cluster
from tests.unit.report.pages import Page
from whale.config import Config
from whale.estimate import StepEstimate, estimate
from whale.estimate.step.redundancy import Redundancy
from whale.ir.cluster import Cluster
from whale.ir.figure import Figure
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.timeline import DeviceTimeline, Span, StepRecording, Stretch
from whale.planning import make_plan
from whale.report import report_html
from whale.report.drawing import MOST_TRACKS, drawn_tracks, make_tracks

Made = tuple[Plan, ModelGraph, Cluster, StepEstimate]


def made(there: Cluster, rows: int = 64, layers: int = 8, **pipeline: object) -> Made:
    graph = chain(layers, width=64)
    plan = make_plan(graph, there, Config({f"pipeline.{name}": value for name, value in pipeline.items()}), rows=rows)
    return plan, graph, there, estimate(plan, graph, there)


@pytest.fixture(scope="module")
def pipeline() -> Made:
    """Two stages, the second on a device of a third of the speed."""
    return made(cluster((3e9, 1e9)), num_stages=2, num_micro_batch=4)


def slowed(step: StepEstimate, factor: float = 2.0) -> StepRecording:
    """A run in which all took so much longer."""
    timelines = []
    for name in (name for each in step.devices for name in each.devices):
        predicted = step.of(name).timeline
        spans = tuple(Span(span.action, factor * span.start, factor * span.end) for span in predicted.actions)
        timelines.append(DeviceTimeline(name, spans, waits=(Stretch("gradients", 0.0, 1e-6),)))
    return StepRecording(7, 64, tuple(timelines), 2e-6, 0.25)


def bars(page: Page, track: int, run: int = 0) -> list[tuple[str, int, int]]:
    return [
        (page.data["kinds"][kind], stage, micro_batch) for kind, stage, micro_batch, _, _ in page.data["tracks"][track]["runs"][run]["bars"]
    ]


def test_the_page_stands_alone(pipeline: Made) -> None:
    html = report_html(*pipeline)
    page = Page(html)
    assert page.references == []
    assert re.findall(r"https?://|url\(|@import|<link|<img", html) == []
    assert len(page.ids) == len(set(page.ids))
    assert {"straggler", "time", "memory", "structure", "devices", "why"} <= set(page.ids)


def test_every_bar_message_and_bucket_is_there(pipeline: Made) -> None:
    _, _, _, step = pipeline
    page = Page(report_html(*pipeline))
    for number, each in enumerate(step.devices):
        wanted = [(span.action.kind.value, span.action.stage, span.action.micro_batch) for span in each.compute]
        assert bars(page, number) == [(kind, -1 if s is None else s, -1 if m is None else m) for kind, s, m in wanted]
        assert len(page.data["tracks"][number]["runs"][0]["memory"]) == len(each.memory)
        assert len(page.data["tracks"][number]["runs"][0]["syncs"]) == len(each.syncs)
    assert {message[3] for message in page.data["messages"]} == {
        f"{a} -> {b}" for m in range(4) for a, b in ((0, f"1 F{m}"), (1, f"0 B{m}"))
    }
    ticks = [bar[4] for track in page.data["tracks"] for bar in track["runs"][0]["bars"]]
    assert max(ticks) == page.data["ticks"] and page.data["seconds"] == pytest.approx(step.step_seconds)


def test_the_straggler_is_told_with_its_reason() -> None:
    there = cluster((3e9,), (1e9,))
    plan, graph, _, step = made(there, rows=8)
    lopsided = replace(plan, replicas=tuple(replace(replica, share=1) for replica in plan.replicas))
    step = estimate(lopsided, graph, there)
    page = Page(report_html(lopsided, graph, there, step))
    assert f"{step.straggler.name} (" in page.text and "computes longest" in page.text
    assert "times the mean work at" in page.text
    assert "Its work runs slower than that of the others." in page.text or "It is of the slower device type" in page.text


def test_balanced_devices_are_said_to_be(pipeline: Made) -> None:
    plan, graph, there, step = made(cluster((1e9, 1e9)), rows=64)
    assert "All devices compute about equally long" in Page(report_html(plan, graph, there, step)).text


def test_copies_are_named_in_the_predicted_step(pipeline: Made) -> None:
    plan, graph, there, step = pipeline
    copied = replace(step, redundancy=Redundancy("host", 2, 0.5, "", ("h0/0", 8), (("h0", 16, 24),)))
    assert "per second, 250 ms of copies" in Page(report_html(plan, graph, there, copied)).text
    assert "of copies" not in Page(report_html(*pipeline)).text


def test_measured_stands_beside_predicted(pipeline: Made) -> None:
    *_, step = pipeline
    recorded = slowed(step)
    page = Page(report_html(*pipeline, recordings=[recorded]))
    assert all(len(track["runs"]) == 2 for track in page.data["tracks"])
    assert bars(page, 0, 1) == bars(page, 0, 0)
    assert page.data["seconds"] == pytest.approx(2 * step.step_seconds)
    assert "Step, measured" in page.text and "2.00 times the prediction" in page.text
    assert f"Measured: {step.straggler.devices[0]} computes longest, as predicted" in page.text
    assert "2.00 times the" in page.text and "It waited 1 us for gradients." in page.text
    assert page.text.index("Measured:") < page.text.index(f"Predicted: {step.straggler.name}")
    bubble = f"{step.bubble_rate:.1%}"
    assert f"Bubble rate, measured {bubble}" in page.text and f"predicted {bubble}" in page.text, "all took twice as long"
    assert "Exposed communication, measured 1 us" in page.text and "Between steps, measured 250 ms" in page.text
    assert "clocks agree within 2 us" in page.text and "step 7" in page.text


def test_exposed_communication_is_that_of_the_estimate_in_its_own_timeline() -> None:
    for there, options in (((3e9, 1e9), {"num_stages": 2}), ((1e9, 1e9, 1e9), {"num_stages": 3, "schedule": "gpipe"}), ((1e9, 2e9), {})):
        *_, step = made(cluster(there), num_micro_batch=4, **options)
        assert step.straggler.exposed > 0
        for each in step.devices:
            assert each.timeline.exposed == pytest.approx(each.exposed, rel=1e-6, abs=1e-12)


def test_of_several_recordings_the_middle_one_is_shown(pipeline: Made) -> None:
    *_, step = pipeline
    recorded = [slowed(step, factor) for factor in (9.0, 2.0, 3.0)]
    page = Page(report_html(*pipeline, recordings=recorded))
    assert "3.00 times the prediction" in page.text and "of middle length among the 3 recorded" in page.text


def test_a_recording_of_the_planned_rows_is_shown_before_others(pipeline: Made) -> None:
    *_, step = pipeline
    recorded = [replace(slowed(step, factor), num_rows=rows) for factor, rows in ((1.0, 16), (1.5, 16), (2.0, 64), (1.25, 16))]
    page = Page(report_html(*pipeline, recordings=recorded))
    assert "2.00 times the prediction" in page.text and "the only one recorded with the planned number of rows, 64 rows" in page.text
    page = Page(report_html(*pipeline, recordings=recorded[:2]))
    assert "16 rows" in page.text and "times the prediction" not in page.text, "another batch is not compared"


def test_figures_that_scatter_are_warned_of(pipeline: Made) -> None:
    plan, graph, there, step = pipeline
    noisy = replace(there, measured=(Figure("h0: memory", "B/s", 1e9, 0.5e9, 1.5e9, 11),))
    assert "Warning: measured figures vary by more than 25%: h0: memory: " in Page(report_html(plan, graph, noisy, step)).text


@pytest.mark.parametrize("policy", ["full", "blocks"])
def test_what_is_computed_again_counts_as_work(policy: str) -> None:
    """A replica that recomputes has more to do than its twin; it is not told to be slow."""
    graph, there = chain(8, width=64), cluster((1e9, 1e9))
    blocks = [{"devices": 1, "rows": 1, "recompute": policy}, {"devices": 1, "rows": 1}]
    plan = make_plan(graph, there, Config({"replicas": blocks}), rows=64)
    step = estimate(plan, graph, there)
    text = Page(report_html(plan, graph, there, step)).text
    assert step.straggler.devices == ("h0/0",) and "It has the larger part of the work" in text
    assert "runs slower than that of the others" not in text


def test_texts_are_escaped(pipeline: Made) -> None:
    plan, graph, there, step = pipeline
    page = Page(report_html(plan, graph, there, step, title="</script><b>x</b> & co"))
    assert "</script><b>x</b> & co" in page.text


def test_equal_replicas_are_shown_once_and_big_plans_stay_small() -> None:
    there = cluster(*((1e9,) * 4,) * 16)
    found = made(there, rows=64 * 16, num_stages=4, num_micro_batch=64)
    html = report_html(*found)
    page = Page(html)
    assert len(page.data["tracks"]) == 4 and page.data["tracks"][0]["alike"] == 15
    assert "replica 0 and 15 more" in page.text
    assert len(html) < 150_000


def test_more_tracks_than_a_page_holds_leave_the_stragglers_replica() -> None:
    plan, _, _, step = made(cluster(*((1e9, 1e9),) * 2), num_stages=2, num_micro_batch=2)
    track = make_tracks(plan, step)[0]
    many = [replace(track, estimate=replace(track.estimate, devices=(f"d{n}",)), replica=n // 2) for n in range(2 * MOST_TRACKS)]
    drawn = drawn_tracks(many, f"d{2 * MOST_TRACKS - 1}")
    assert len(drawn) == MOST_TRACKS
    assert [each.estimate.devices[0] for each in drawn[-2:]] == [f"d{2 * MOST_TRACKS - 2}", f"d{2 * MOST_TRACKS - 1}"]
