"""The report: one HTML page that opens from disk, with its style and its script inside.

Besides the drawing: tiles, tables of devices and links, and what runs where, equal replicas once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from whale.estimate import StepEstimate, bubble_rate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Edge, Plan, Replica, Stage, describe_degrees, describe_order, describe_shape, describe_shards
from whale.ir.timeline import RecordedRun, StepRecording, Timeline
from whale.report.drawing import Track, drawing, drawn_tracks, make_tracks
from whale.report.straggler import straggler_words
from whale.units import counted, format_bytes, format_count, format_seconds, format_share


def tiles(plan: Plan, step: StepEstimate, recording: StepRecording | None) -> Iterator[str]:
    """The main figures."""
    slow, full = step.straggler, max(step.devices, key=lambda each: each.peak.total / each.capacity)
    yield tile("Step, predicted", format_seconds(step.step_seconds), _rate(plan.planned_rows, step.step_seconds) + step.beside)
    if recording is not None:
        seconds, rows = recording.step_seconds, recording.num_rows
        times = (
            f", {seconds / step.training_seconds:.2f} times the prediction" if step.training_seconds and rows == plan.planned_rows else ""
        )
        yield tile("Step, measured", format_seconds(seconds), _rate(rows, seconds) + times)
    bubble, exposed = f"{step.bubble_rate:.1%}", format_seconds(slow.exposed)
    if recording is None:
        yield tile("Bubble rate", bubble, "predicted, of the rank that takes longest")
        yield tile("Exposed communication", exposed, f"predicted, of {slow.devices[0]}")
    else:
        measured = bubble_rate(Timeline(tuple(each.computations for each in recording.devices)))
        yield tile("Bubble rate, measured", f"{measured:.1%}", f"of the rank that takes longest; predicted {bubble}")
        most = max(recording.devices, key=lambda each: each.exposed)
        yield tile("Exposed communication, measured", format_seconds(most.exposed), f"of {most.device}, the most; predicted {exposed}")
        if (before := recording.seconds_before) is not None:
            yield tile("Between steps, measured", format_seconds(before), "of the script before this step: loading data, logging")
    share = format_share(full.peak.total / full.capacity)
    yield tile("Fullest memory", format_bytes(round(full.peak.total)), f"{share} of {format_bytes(full.capacity)}, {full.devices[0]}")


def _rate(rows: int, seconds: float) -> str:
    return f"{counted(rows, 'row')}, {rows / seconds:,.0f} per second" if seconds else f"{counted(rows, 'row')}"


def device_table(cluster: Cluster, step: StepEstimate, tracks: Sequence[Track]) -> str:
    """A row for each track, with predicted and measured times."""
    is_measured = any(track.measured for track in tracks)
    times = ("computes", *(("measured",) if is_measured else ()), "exposed", "idle")
    columns = ("device", "model", "stage", *times, "peak memory", "of limit", "filled by")
    rows = [_row(track, cluster, step, with_measured=is_measured) for track in tracks]
    beside = "; predicted, except what is called measured" if is_measured else ""
    return table(f"Devices; identical ones share a row{beside}", columns, rows, ("stage", *times, "peak memory", "of limit"))


def _row(track: Track, cluster: Cluster, step: StepEstimate, *, with_measured: bool) -> tuple[str, ...]:
    each = track.estimate
    ends = (min(track.measured_busy), track.slowest) if track.measured_busy else ()
    measured = " to ".join(dict.fromkeys(format_seconds(each) for each in ends)) or "-"
    return (
        each.name,
        cluster.by_name[each.devices[0]].model,
        ", ".join(map(str, each.stages)),
        format_seconds(each.busy),
        *((measured,) if with_measured else ()),
        format_seconds(each.exposed),
        format_seconds(step.idle(each)),
        format_bytes(round(each.peak.total)),
        format_share(each.peak.total / each.capacity),
        str(each.peak),
    )


def link_table(step: StepEstimate) -> str:
    """How much passes each link."""
    rows = [
        (
            link.name + (f" and {link.num_alike - 1} more" if link.num_alike > 1 else ""),
            format_bytes(round(link.num_bytes)),
            format_share(link.share),
        )
        for link in step.links
        if link.num_bytes
    ]
    if not rows:
        return ""
    return table(
        "Links, those most used first (predicted)",
        ("link", "bytes in a step", "of what could pass"),
        rows,
        ("bytes in a step", "of what could pass"),
    )


MOST_DEVICES = 8  # names shown of a virtual device


def structure(plan: Plan, graph: ModelGraph) -> str:
    """The replicas as rows of cards, a card per stage, an arrow for what it sends."""
    alike: dict[tuple[object, ...], list[Replica]] = {}
    for replica in plan.replicas:
        alike.setdefault(_likeness(replica), []).append(replica)
    return "".join(_replica(plan, graph, own) for own in alike.values()) + _split_bridges(plan)


def _likeness(replica: Replica) -> tuple[object, ...]:
    stages = tuple(
        (stage.task_graphs, stage.ops, stage.shares, stage.shards, len(stage.virtual_device.devices)) for stage in replica.stages
    )
    return replica.pipeline, replica.share, stages, replica.edges


def _replica(plan: Plan, graph: ModelGraph, alike: Sequence[Replica]) -> str:
    first = alike[0]
    start, stop = plan.replica_rows(plan.planned_rows)[first.index]
    others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    heading = f"replica {first.index}{others}: {counted(stop - start, 'row')}, {first.pipeline.order}"
    cards = "".join(_stage(graph, first, stage) for stage in first.stages)
    far = "".join(f"<li>{escape(_edge(edge))}</li>" for edge in first.edges if edge.target != edge.source + 1)
    beyond = f'<ul class="beyond">{far}</ul>' if far else ""
    return f'<h3>{escape(heading)}</h3>\n<ol class="stages">{cards}</ol>{beyond}\n'


def _stage(graph: ModelGraph, replica: Replica, stage: Stage) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in _lines(graph, stage))
    devices, rest = stage.virtual_device.devices[:MOST_DEVICES], len(stage.virtual_device.devices) - MOST_DEVICES
    chips = "".join(f"<li>{escape(name)}</li>" for name in devices) + (f"<li>and {rest} more</li>" if rest > 0 else "")
    edge = next((edge for edge in replica.edges if (edge.source, edge.target) == (stage.index, stage.index + 1)), None)
    arrow = "" if edge is None else f'<p class="arrow" title="{escape(_edge(edge))}">{escape(format_bytes(edge.num_bytes))}</p>'
    names = ", ".join(stage.task_graphs)
    return (
        f'<li><div class="stage"><h4>stage {stage.index} <span>{escape(names)}</span></h4>{lines}'
        f'<ul class="devices" aria-label="virtual device">{chips}</ul></div>{arrow}</li>\n'
    )


def _lines(graph: ModelGraph, stage: Stage) -> Iterator[str]:
    ops = [graph.by_name[name] for name in stage.ops]
    flops = sum(op.forward_flops + op.backward_flops for op in ops) / graph.num_rows
    yield f"{counted(len(ops), 'op')}, {format_count(flops)} FLOPs per row, {counted(len(stage.parameters), 'tensor')} held"
    if stage.shards:
        halves = ", in two alternating halves" if stage.overlap else ""
        yield f"groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    elif len(set(stage.shares)) > 1:
        yield f"rows {':'.join(map(str, stage.shares))}"
    if stage.recomputed:
        yield f"recomputes {counted(sum(map(len, stage.recomputed)), 'op')} in {counted(len(stage.recomputed), 'segment')}"


def _edge(edge: Edge) -> str:
    return f"stage {edge.source} to stage {edge.target}: {', '.join(edge.tensors)}, {format_bytes(edge.num_bytes)} for each micro-batch"


def _split_bridges(plan: Plan) -> str:
    """The bridges inside split stages, from the planner's choices."""
    rows = [(choice.subject, choice.decision, choice.cost) for choice in plan.choices if choice.pass_name == "bridges"]
    if not rows:
        return ""
    body = table("Bridges inside split stages, per micro-batch", ("tensor", "becomes", "moves"), rows)
    return f"<details><summary>Bridges inside split stages ({len(rows)})</summary>{body}</details>\n"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table that scrolls if it is wider than the page; the columns `right` hold numbers."""
    number = ' class="number"'
    styles = [number if column in right else "" for column in columns]
    head = "".join(f'<th scope="col"{style}>{escape(column)}</th>' for column, style in zip(columns, styles, strict=True))
    body = "".join(f"<tr>{_cells(row, styles)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _cells(row: Sequence[str], styles: Sequence[str]) -> str:
    first, *others = zip(row, styles, strict=True)
    return f'<th scope="row"{first[1]}>{escape(first[0])}</th>' + "".join(f"<td{style}>{escape(text)}</td>" for text, style in others)


def tile(name: str, value: str, note: str = "") -> str:
    """One figure with its name."""
    below = f'<dd class="note">{escape(note)}</dd>' if note else ""
    return f'<div class="tile"><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>{below}</div>\n'


def section(name: str, heading: str, body: str) -> str:
    """A part of the page (`name`: its id, `body`: HTML) under a heading."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n{body}</section>\n'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # the browser must fetch nothing


def report_html(
    plan: Plan, graph: ModelGraph, cluster: Cluster, step: StepEstimate, recordings: Sequence[StepRecording] = (), *, title: str = ""
) -> str:
    """The report of a step, as a page that needs no network and no other file.

    Args:
        plan: the decision.
        graph: its model.
        cluster: its devices.
        step: the prediction.
        recordings: of a real run; the median one with as many rows as the plan is for (else of all) is shown.
        title: of the page.
    """
    run = recorded_run(plan, step, recordings)
    alike, recording = run.alike, run.shown
    tracks = make_tracks(plan, step, recording)
    drawn = drawn_tracks(tracks, step.straggler.devices[0])
    heading = title or f"One step on {plan.cluster}"
    notes = _left_out(tracks, drawn), _of_recording(recordings, alike, recording)
    words = straggler_words(plan, graph, cluster, step, tracks)
    parts = (
        header(heading, [run.plan], tiles(plan, step, recording)),
        section("straggler", "What limits the step", "".join(map(paragraph, words))),
        section("time", "Time", time_section(notes, is_measured=recording is not None)),
        section("memory", "Memory", _memory(recording)),
        section("structure", "What runs where", structure(plan, graph)),
        section("devices", "Devices and links", _noise(cluster) + device_table(cluster, step, tracks) + link_table(step)),
        section("why", "Why this plan", _choices(plan)),
    )
    return whole_page(heading, "".join(parts), drawing(drawn))


def _noise(cluster: Cluster) -> str:
    """Warnings about the figures behind the predictions."""
    return "".join(paragraph(f"Warning: {warning}.") for warning in cluster.warnings)


def recorded_run(plan: Plan, step: StepEstimate, recordings: Sequence[StepRecording]) -> RecordedRun:
    """Recorded steps of a plan, with its prediction."""
    return RecordedRun(_subtitle(plan), plan.planned_rows, step.training_seconds, tuple(recordings))


def header(heading: str, texts: Iterable[str], tiles: Iterable[str]) -> str:
    """The top of a page: its heading, its subject, and figures."""
    note = "".join(map(paragraph, texts))
    return f'<header><h1>{escape(heading)}</h1>\n{note}<dl class="tiles">{"".join(tiles)}</dl></header>\n'


def whole_page(title: str, body: str, picture: Mapping[str, object]) -> str:
    """A page of `body` (HTML) without other files; the script draws `picture`."""
    data = json.dumps(picture, separators=(",", ":"))
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
    replicas, rows = plan.replicas, counted(plan.planned_rows, "row")
    return f"{describe_shape(replicas)} on {plan.where}; {describe_degrees(replicas)}; {describe_order(replicas)}, {rows}"


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


def time_section(notes: Iterable[str], *, is_measured: bool) -> str:
    """The canvas with its tools and notes below it; `is_measured`: whether there are two runs."""
    tools = _TOOLS + (_STRETCH if is_measured else "")
    return (
        f'<div class="tools">{tools}</div>\n<div class="legend" id="legend"></div>\n{_TIMELINE}\n<p id="told" aria-live="polite"></p>\n'
        + "".join(paragraph(note) for note in notes if note)
        + '<div id="tip" role="tooltip" hidden></div>\n'
    )


def _left_out(tracks: Sequence[Track], drawn: Sequence[Track]) -> str:
    missing = len(tracks) - len(drawn)
    return f"{missing} more rows of different devices are in the table below and not drawn." if missing else ""


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
        "longest is shown. A message ends when its receiver has waited for it: it may have arrived earlier."
    )


def _memory(recording: StepRecording | None) -> str:
    is_counted = recording is None or any(each.memory for each in recording.devices)
    note = "" if is_counted else " Only a GPU's bytes are counted in a run, so all of this is predicted."
    return (
        '<canvas id="held" role="img" aria-label="Bytes on each device over the step, under its limit"></canvas>\n'
        '<p class="note">Grey: parameters with their gradients and the optimizer\'s state. The red line is what a plan may use; '
        f"where it lies far above, it is drawn dashed, with its value as text.{note}</p>\n"
    )


def _choices(plan: Plan) -> str:
    rows = [(c.pass_name, c.subject, c.decision, c.cost, c.bound, c.runner_up) for c in plan.choices if c.pass_name != "bridges"]
    if not rows:
        return paragraph("The plan was written by hand.")
    body = table("Choices of the planner", ("pass", "choice", "decision", "cost", "bound by", "runner-up"), rows)
    return f"<details><summary>{len(rows)} choices, what each costs, and the runner-up</summary>{body}</details>\n"
