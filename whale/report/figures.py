"""What the page shows beside the picture: tiles, tables of devices and links, and what runs where, equal replicas once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape

from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Edge, Plan, Replica, Stage, describe_shards
from whale.ir.timeline import StepRecording
from whale.report.drawing import Track
from whale.units import counted, format_bytes, format_count, format_seconds, format_share


def tiles(plan: Plan, step: StepEstimate, recording: StepRecording | None) -> Iterator[str]:
    """What a reader asks first."""
    slow, full = step.straggler, max(step.devices, key=lambda each: each.peak.total / each.capacity)
    yield tile("Step, predicted", format_seconds(step.step_seconds), _rate(plan.planned_rows, step.step_seconds))
    if recording is not None:
        seconds, rows = recording.step_seconds, recording.num_rows
        times = f", {seconds / step.step_seconds:.2f} times the prediction" if step.step_seconds and rows == plan.planned_rows else ""
        yield tile("Step, measured", format_seconds(seconds), _rate(rows, seconds) + times)
    yield tile("Bubble rate", f"{step.bubble_rate:.1%}", "predicted, of the rank that takes longest")
    yield tile("Exposed communication", format_seconds(slow.exposed), f"predicted, of {slow.devices[0]}")
    share = format_share(full.peak.total / full.capacity)
    yield tile("Fullest memory", format_bytes(round(full.peak.total)), f"{share} of {format_bytes(full.capacity)}, {full.devices[0]}")


def _rate(rows: int, seconds: float) -> str:
    return f"{counted(rows, 'row')}, {rows / seconds:,.0f} per second" if seconds else f"{counted(rows, 'row')}"


def device_table(cluster: Cluster, step: StepEstimate, tracks: Sequence[Track]) -> str:
    """A row for each track; what was measured stands beside what is predicted."""
    is_measured = any(track.measured for track in tracks)
    times = ("computes", *(("measured",) if is_measured else ()), "exposed", "idle")
    columns = ("device", "model", "stage", *times, "peak memory", "of limit", "filled by")
    rows = [_row(track, cluster, step.step_seconds, with_measured=is_measured) for track in tracks]
    beside = "; all but what is called measured is predicted" if is_measured else ""
    return table(f"Devices; those that do the same share a row{beside}", columns, rows, ("stage", *times, "peak memory", "of limit"))


def _row(track: Track, cluster: Cluster, step_seconds: float, *, with_measured: bool) -> tuple[str, ...]:
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
        format_seconds(each.idle(step_seconds)),
        format_bytes(round(each.peak.total)),
        format_share(each.peak.total / each.capacity),
        str(each.peak),
    )


def link_table(step: StepEstimate) -> str:
    """How much passes each link."""
    rows = [
        (
            link.name + (f" and {link.num_alike - 1} like it" if link.num_alike > 1 else ""),
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


MOST_DEVICES = 8
"""Names of a virtual device that are shown; the rest is counted."""


def structure(plan: Plan, graph: ModelGraph) -> str:
    """The replicas as rows of cards, a card per stage, an arrow for what it hands on."""
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
    others = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
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
        halves = ", in two halves that take turns" if stage.overlap else ""
        yield f"groups of {stage.split} cut {describe_shards(stage.shards)}{halves}"
    elif len(set(stage.shares)) > 1:
        yield f"rows {':'.join(map(str, stage.shares))}"
    if stage.recomputed:
        yield f"computes {counted(sum(map(len, stage.recomputed)), 'op')} again, in {counted(len(stage.recomputed), 'segment')}"


def _edge(edge: Edge) -> str:
    return f"stage {edge.source} to stage {edge.target}: {', '.join(edge.tensors)}, {format_bytes(edge.num_bytes)} for each micro-batch"


def _split_bridges(plan: Plan) -> str:
    """The bridges inside split stages, as the planner tells them."""
    rows = [(choice.subject, choice.decision, choice.cost) for choice in plan.choices if choice.pass_name == "bridges"]
    if not rows:
        return ""
    body = table("Bridges inside split stages, per micro-batch", ("tensor", "becomes", "moves"), rows)
    return f"<details><summary>Bridges inside split stages ({len(rows)})</summary>{body}</details>\n"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        caption: what it is a table of.
        columns: headings.
        rows: one text per column each.
        right: the columns that hold numbers.
    """
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
    """A part of the page under a heading.

    Args:
        name: its id.
        body: HTML.
    """
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n{body}</section>\n'


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>\n"
