"""Comparison of two recorded runs: the bars of each device in both on one time scale, and the differences.

big/0     A | F0 F1 B0   B1 |
          B | F0  F1 B0  B1   |
"""

from __future__ import annotations

from collections.abc import Iterator

from whale.estimate import bubble_rate
from whale.ir.timeline import DeviceTimeline, RecordedRun, StepRecording, Timeline
from whale.report.drawing import busy_seconds, drawing_of_two
from whale.report.page import header, paragraph, section, table, tile, time_section, whole_page
from whale.units import counted, format_seconds

NAMES = ("A", "B")
NONE = "-"

Row = tuple[str, str, str, str]  # a figure, its values in both runs, and the second relative to the first


def differences(a: RecordedRun, b: RecordedRun) -> tuple[Row, ...]:
    """The figures of the shown steps of two runs, each with a step."""
    return tuple(_differences(a, b))


def _differences(a: RecordedRun, b: RecordedRun) -> Iterator[Row]:
    one, other = _shown(a), _shown(b)
    yield _row("step", one.step_seconds, other.step_seconds)
    yield _row("step, predicted", a.predicted_seconds, b.predicted_seconds)
    bubbles = [bubble_rate(Timeline(tuple(each.computations for each in step.devices))) for step in (one, other)]
    points = round(100 * (bubbles[1] - bubbles[0]), 1) + 0.0
    yield "bubble rate", f"{bubbles[0]:.1%}", f"{bubbles[1]:.1%}", f"{points:+.1f} points"
    yield _row("between steps", one.seconds_before, other.seconds_before)
    devices = [{each.device: each for each in step.devices} for step in (one, other)]
    for name in dict.fromkeys(name for own in devices for name in own):
        first, second = (own.get(name) for own in devices)
        yield _row(f"{name} computes", *(None if own is None else busy_seconds(own) for own in (first, second)))
        yield _row(f"{name} exposed communication", *(None if own is None else own.exposed for own in (first, second)))


def comparison_html(a: RecordedRun, b: RecordedRun, names: tuple[str, str]) -> str:
    """The page of two runs, each with a step, under these names."""
    one, other = _shown(a), _shown(b)
    timelines = [{each.device: each for each in step.devices} for step in (one, other)]
    devices = dict.fromkeys(name for own in timelines for name in own)
    pairs = [tuple(own.get(name, DeviceTimeline(name, ())) for own in timelines) for name in devices]
    heading = "Two recorded runs"
    figures = (
        tile("Step, A", format_seconds(one.step_seconds), _spread(a)),
        tile("Step, B", format_seconds(other.step_seconds), _spread(b)),
        tile("B against A", _relative(one.step_seconds, other.step_seconds), "of the steps that are drawn"),
    )
    texts = [f"{letter}: {name}, {run.plan}" for letter, name, run in zip(NAMES, names, (a, b), strict=True)]
    notes = [_chosen(letter, run) for letter, run in zip(NAMES, (a, b), strict=True)]
    if one.num_rows != other.num_rows:
        notes.append(f"The steps have other numbers of rows: A {one.num_rows}, B {other.num_rows}.")
    note = (
        "Exposed communication: time without computing while something for the device is on its way, and waits inside passes. Steps of "
        "one run differ too; a difference within that range means nothing."
    )
    columns = ("figure", "A", "B", "B against A")
    body = header(heading, texts, figures)
    body += section("time", "Time", time_section(notes, is_measured=True))
    body += section(
        "differences", "Differences", table("Of the steps that are drawn", columns, differences(a, b), columns[1:]) + paragraph(note)
    )
    return whole_page(heading, body, drawing_of_two(pairs, NAMES))


def _shown(run: RecordedRun) -> StepRecording:
    assert run.shown is not None, "a run without a step is not compared"
    return run.shown


def _row(name: str, one: float | None, other: float | None) -> Row:
    a, b = (NONE if own is None else format_seconds(own) for own in (one, other))
    return name, a, b, NONE if one is None or other is None else _relative(one, other)


def _relative(one: float, other: float) -> str:
    """The second relative to the first; "" if the first is zero."""
    return f"{other / one - 1:+.1%}" if one else ""


def _spread(run: RecordedRun) -> str:
    seconds = [each.step_seconds for each in run.alike]
    if len(seconds) == 1:
        return "the only one that was recorded"
    return f"of {len(seconds)} that were recorded, which took {format_seconds(min(seconds))} to {format_seconds(max(seconds))}"


def _chosen(letter: str, run: RecordedRun) -> str:
    step = _shown(run)
    error = f"clocks agree within {format_seconds(step.clock_error)}" if step.clock_error else "all devices have one clock"
    which = f", of middle length among the {len(run.alike)} recorded" if len(run.alike) > 1 else ""
    return f"{letter}: step {step.step_number}{which}, {counted(step.num_rows, 'row')}; {error}."
