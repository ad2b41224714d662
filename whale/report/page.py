"""The report: one HTML page that opens from disk, with all that it shows, its style and its script inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, describe_order, describe_shape
from whale.ir.timeline import StepRecording
from whale.report.drawing import Track, drawing, drawn_tracks, make_tracks
from whale.report.figures import device_table, link_table, paragraph, section, structure, table, tiles
from whale.report.straggler import straggler_words
from whale.units import counted, format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser is told to fetch nothing."""


def report_html(
    plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate, recordings: Sequence[StepRecording] = (), *, title: str = ""
) -> str:
    """The picture of a step.

    Args:
        plan: the decision.
        graph: the model that it is for.
        cluster: the devices that it names.
        step: what is predicted.
        recordings: of a real run; of those with as many rows as the plan is for, else of all, the one of middle length is shown.
        title: of the page, beside the plan's own words.

    Returns:
        A page that needs no network and no other file.
    """
    alike = [each for each in recordings if each.num_rows == plan.planned_rows] or recordings
    recording = sorted(alike, key=lambda each: each.step_seconds)[len(alike) // 2] if alike else None
    tracks = make_tracks(plan, step, recording)
    drawn = drawn_tracks(tracks, step.straggler.devices[0])
    heading = title or f"One step on {plan.cluster}"
    figures = f'<dl class="tiles">{"".join(tiles(plan, step, recording))}</dl>'
    words = straggler_words(plan, graph, cluster, step, tracks)
    parts = (
        f"<header><h1>{escape(heading)}</h1>\n{paragraph(_subtitle(plan))}{figures}</header>\n",
        section("straggler", "Who holds up the step", "".join(map(paragraph, words))),
        section("time", "Time", _time(tracks, drawn, _of_recording(recordings, alike, recording), is_measured=recording is not None)),
        section("memory", "Memory", _memory(recording)),
        section("structure", "What runs where", structure(plan, graph)),
        section("devices", "Devices and links", _noise(cluster) + device_table(cluster, step, tracks) + link_table(step)),
        section("why", "Why the plan is as it is", _choices(plan)),
    )
    return _page(heading, "".join(parts), json.dumps(drawing(drawn), separators=(",", ":")))


def _noise(cluster: Cluster) -> str:
    """What who believes the figures should know of those that they are predicted from."""
    return "".join(paragraph(f"Warning: {warning}.") for warning in cluster.warnings)


def _page(title: str, body: str, data: str) -> str:
    style, script = (Path(__file__).with_name(name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n{body}</main>\n"
        f'<script type="application/json" id="picture">{data.replace("<", chr(92) + "u003c")}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _subtitle(plan: Plan) -> str:
    where = f"on {plan.where}"
    return f"{describe_shape(plan.replicas)} {where}: {describe_order(plan.replicas)}, {counted(plan.planned_rows, 'row')}"


_TOOLS = (
    '<button type="button" data-do="in" aria-label="zoom in">+</button>'
    '<button type="button" data-do="out" aria-label="zoom out">-</button>'
    '<button type="button" data-do="all">whole step</button>'
    '<label><input type="checkbox" data-do="messages" checked> messages</label>'
)
_STRETCH = '<label><input type="checkbox" data-do="stretch"> each run to its own length</label>'
_TIMELINE = (
    '<canvas id="timeline" tabindex="0" role="application" aria-label="Bars of what each device computes when. '
    'Left and right go from bar to bar, up and down from row to row, plus and minus zoom, 0 shows the whole step."></canvas>'
)


def _time(tracks: Sequence[Track], drawn: Sequence[Track], told: str, *, is_measured: bool) -> str:
    tools = _TOOLS + (_STRETCH if is_measured else "")
    notes = [_left_out(tracks, drawn), told]
    return (
        f'<div class="tools">{tools}</div>\n<div class="legend" id="legend"></div>\n{_TIMELINE}\n<p id="told" aria-live="polite"></p>\n'
        + "".join(paragraph(note) for note in notes if note)
        + '<div id="tip" role="tooltip" hidden></div>\n'
    )


def _left_out(tracks: Sequence[Track], drawn: Sequence[Track]) -> str:
    missing = len(tracks) - len(drawn)
    return f"{missing} more rows of devices, which do otherwise, are in the table below and not drawn." if missing else ""


def _of_recording(recordings: Sequence[StepRecording], alike: Sequence[StepRecording], recording: StepRecording | None) -> str:
    if recording is None:
        return ""
    rows = " with the planned number of rows" if len(alike) < len(recordings) else ""
    which = f"of middle length among the {len(alike)}" if len(alike) > 1 else "the only one"
    others = f", {which} recorded{rows}" if len(recordings) > 1 else ""
    chosen = f"step {recording.step_number}{others}"
    error = f"clocks agree within {format_seconds(recording.clock_error)}" if recording.clock_error else "all devices have one clock"
    return (
        f"Measured: {chosen}, {counted(recording.num_rows, 'row')}; {error}. Of devices that share a row, one of the replica that computed "
        "longest is shown. A message ends when its receiver has waited for it: it may have come before."
    )


def _memory(recording: StepRecording | None) -> str:
    is_counted = recording is None or any(each.memory for each in recording.devices)
    told = "" if is_counted else " Only a GPU's bytes are counted in a run, so all of this is predicted."
    return (
        '<canvas id="held" role="img" aria-label="Bytes on each device over the step, under its limit"></canvas>\n'
        '<p class="note">Grey: parameters with their gradients and the optimizer\'s state. The red line is what a plan may use; '
        f"where it lies far above, it is drawn broken and told in words.{told}</p>\n"
    )


def _choices(plan: Plan) -> str:
    rows = [(c.pass_name, c.subject, c.decision, c.cost, c.bound, c.runner_up) for c in plan.choices if c.pass_name != "bridges"]
    if not rows:
        return paragraph("The plan was written by hand.")
    body = table("Choices of the planner", ("pass", "choice", "decision", "cost", "bound by", "runner-up"), rows)
    return f"<details><summary>{len(rows)} choices, what each costs, and the runner-up</summary>{body}</details>\n"
