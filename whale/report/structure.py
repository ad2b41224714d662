"""What runs where: TaskGraphs in stages on virtual devices, and the bridges between them; equal replicas once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from whale.ir.graph import ModelGraph
from whale.ir.plan import Edge, Plan, Replica, Stage, describe_shards
from whale.report.elements import table
from whale.units import counted, format_bytes, format_count

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
