"""``whale doctor``: whether a model can be captured, under which plans its numbers stay exact, and the user's lines that decide it.

The captured model is planned in a few ways on invented devices; what capture, planner and axes report is put together. With ``--axes``:
per TaskGraph its logical axes, what has them, which may be cut and why others may not.
"""

from __future__ import annotations

import argparse
import json
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from whale.axes import Axes, Mixing, axes_of, discover
from whale.cli.inputs import add_source_arguments, build_model, is_function, read_graph
from whale.cli.tables import paragraph, print_table
from whale.config import Config
from whale.errors import WhaleError, first_few
from whale.hardware import CPU, DeviceProfile, make_cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, describe_shards
from whale.ir.scope import Scope
from whale.planning import make_plan
from whale.planning.explain.mixing import mixed_apart, place_of
from whale.search.changes import PLENTY_BYTES
from whale.units import counted

if TYPE_CHECKING:
    from whale.capture.batch import BatchStructure, Leaf


NOT_EXACT = 3
"""The command's end where the model is captured and something is not exact."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="check that a model can be captured and stays exact",
        description="Checks whether a model can be captured, which plans keep the numbers of one device, and which lines are the reason. "
        f"Exit code 0: all is well; 1: the capture is refused; {NOT_EXACT}: something else is refused or not exact.",
    )
    add_source_arguments(parser)
    parser.add_argument("--axes", action="store_true", help="print the logical axes of the model instead, and which may be cut")
    parser.add_argument("--all", action="store_true", help="with --axes: also axes that no parameter has and that cannot be cut")
    parser.add_argument("--json", action="store_true", help="print the findings, or the axes, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Captures the model, tries a few plans, and prints what is found; or its axes."""
    if arguments.axes:
        _show_axes(read_graph(arguments.source, arguments.arg), every=arguments.all, as_json=arguments.json)
        return 0
    findings = _examine(arguments.source, arguments.arg)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(_finding_lines(findings)))
    return end_of(findings)


def end_of(findings: Sequence[Finding]) -> int:
    if findings[0].answer == "refused":
        return 1
    return 0 if all(finding.answer in ("yes", "exact", "fixed") for finding in findings) else NOT_EXACT


def _examine(source: str, pairs: Sequence[str]) -> tuple[Finding, ...]:
    if not is_function(source):
        return diagnose(read_graph(source, pairs))
    model, batch, loss, batch_dims = build_model(source, pairs)
    from whale.api.mode import CapturedMode

    try:
        captured = CapturedMode(model, batch, loss, "train", batch_dims)
    except WhaleError as error:
        return (refused("capture", error),)
    shapes = [_beside_rows(part) for part in captured.structure.inputs]
    tried = sizes(shapes, lambda size: CapturedMode(model, _halved(captured.structure, size), loss, "train"))
    return diagnose(captured.graph, captured.graph_for, tried)


def _beside_rows(part: Leaf) -> tuple[int, ...]:
    return part.shape[1 if part.has_rows else 0 :]


def _halved(structure: BatchStructure, size: int) -> BatchStructure:
    """The structure with half of a size wherever there is one, but for the rows."""
    parts = (
        replace(part, shape=part.shape[: 1 if part.has_rows else 0] + tuple(s // 2 if s == size else s for s in _beside_rows(part)))
        for part in structure.parts
    )
    return replace(structure, parts=tuple(parts))


def _finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One paragraph per finding; lines that several have are printed with the first."""
    first: dict[tuple[ReasonLine, ...], str] = {}
    for finding in findings:
        start = f"{finding.question:<15}{finding.answer:<13}"
        yield from paragraph(start, finding.detail)
        known = first.setdefault(finding.places, finding.question)
        if finding.places and known != finding.question:
            yield f"  the lines under {known}"
        else:
            for place in finding.places:
                yield from _reason_lines(place)
        if finding.hint:
            yield from paragraph("  hint: ", finding.hint)


def _reason_lines(place: ReasonLine) -> Iterator[str]:
    yield f"  {place.where}" + (f": {place.text}" if place.text else "")
    yield from paragraph("    ", place.reason)


Answer = Literal["yes", "exact", "fixed", "not exact", "cannot tell", "refused"]


@dataclass(frozen=True, slots=True)
class ReasonLine:
    """A line of the user's that is the reason for an answer."""

    where: str  # ``file:line``; else a module or an op
    text: str  # the line; "" where unknown
    reason: str = ""  # what it does; "" where the answer tells


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    question: str  # ``capture``, ``rows``, ``sizes``, ``replicas``, ``micro-batches``, ``stages`` or ``split``
    answer: Answer  # ``fixed``: the example's sizes only; ``refused``: an error; ``cannot tell``: an operator has no rule
    detail: str
    hint: str = ""  # what to do; "" where unknown
    places: tuple[ReasonLine, ...] = ()  # the lines that are the reason


def diagnose(graph: ModelGraph, capture_at: Callable[[int], object] | None = None, tried: Finding | None = None) -> tuple[Finding, ...]:
    """Answers all questions about a captured model.

    Args:
        graph: the captured training.
        capture_at: captures the model at another number of rows, or raises a `WhaleError`; None without the model.
        tried: what `sizes` found; None without the model.
    """
    found = (Finding("capture", "yes", f"one graph of {counted(len(graph.ops), 'op')}"), _rows(graph, capture_at), tried, *exactness(graph))
    return tuple(finding for finding in found if finding is not None)


def sizes(shapes: Iterable[Sequence[int]], capture_with: Callable[[int], object]) -> Finding:
    """Which sizes of a batch, besides its rows, may change: each is tried at half of the example's.

    Args:
        shapes: of the inputs, without their rows.
        capture_with: captures the model with half of a size, wherever the example has it, or raises a `WhaleError`.
    """
    found = sorted({size for shape in shapes for size in shape if size > 1})
    free = [size for size in found if _is_taken(capture_with, size)]
    fixed = [size for size in found if size not in free]
    said = [f"{_listing(free)} may change, with a capture for each (half was tried)"] if free else []
    said += [f"{_listing(fixed)} may not change"] if fixed else []
    return Finding("sizes", "yes" if free or not found else "fixed", "; ".join(said) or "no sizes besides the rows")


def _is_taken(capture_with: Callable[[int], object], size: int) -> bool:
    try:
        capture_with(size)
    except WhaleError:
        return False
    return True


def _listing(found: Sequence[int]) -> str:
    return ", ".join(map(str, found))


def refused(question: str, error: WhaleError) -> Finding:
    places = () if error.where is None else (ReasonLine(str(error.where), _text_at(str(error.where))),)
    return Finding(question, "refused", error.message, error.hint or "", places)


def exactness(graph: ModelGraph) -> tuple[Finding, ...]:
    """Whether the numbers are those of one device with replicas, micro-batches, stages, or splits.

    The scopes are left out: whether they can be honoured depends on the devices, and `whale plan` tells.
    """
    bare = _under(graph, ())
    axes = discover(bare)
    return (
        _apart("replicas", bare, axes, 2, {}, "2 copies of the model, half of the rows each"),
        _apart("micro-batches", bare, axes, 1, {"pipeline.num_micro_batch": 2}, "2 micro-batches, half of the rows each"),
        _apart("stages", bare, axes, 2, {"pipeline.num_stages": 2}, "a pipeline of 2 stages"),
        _split(graph),
    )


def _apart(question: str, graph: ModelGraph, axes: Axes, num_devices: int, settings: Mapping[str, object], detail: str) -> Finding:
    try:
        plan = _plan(graph, num_devices, settings)
    except WhaleError as error:
        return refused(question, error)
    found = mixed_apart(plan, graph, axes)
    if not found:
        return Finding(question, "exact", detail)
    answer: Answer = "not exact" if any(mixing.kind == "mixes" for mixing in found) else "cannot tell"
    return Finding(question, answer, f"{detail}: rows that depend on each other are separated", places=tuple(_places(found, graph)))


def _split(graph: ModelGraph) -> Finding:
    whole = Scope("split", 2, None, None, None, 0)
    try:
        plan = _plan(_under(graph, (whole,)), 2, {})
    except WhaleError as error:
        return refused("split", error)
    return Finding("split", "exact", f"a split over 2 devices would cut {describe_shards(plan.replicas[0].stages[0].shards)}")


def _plan(graph: ModelGraph, num_devices: int, settings: Mapping[str, object]) -> Plan:
    cluster, _ = make_cluster([DeviceProfile("host", CPU, PLENTY_BYTES, 1.0)] * num_devices)
    return make_plan(graph, cluster, Config().with_values(settings))


def _under(graph: ModelGraph, scope: tuple[Scope, ...]) -> ModelGraph:
    return replace(graph, ops=tuple(replace(op, scope=scope) for op in graph.ops))


def _rows(graph: ModelGraph, capture_at: Callable[[int], object] | None) -> Finding:
    """Whether batches may have other numbers of rows: tried, where one capture does not serve all."""
    if graph.dynamic:
        return Finding("rows", "yes", "any number of them, with one capture")
    if capture_at is None:
        return Finding("rows", "cannot tell", "the code reads their number; it can be tried for another number only with FILE.py:FUNCTION")
    try:
        capture_at(graph.num_rows // 2)
    except WhaleError as error:
        return refused("rows", error)
    return Finding("rows", "yes", "any number of them, with a capture for each: the code reads it as a number")


def _places(found: Iterable[Mixing], graph: ModelGraph) -> Iterable[ReasonLine]:
    reasons: dict[str, str] = {}
    for mixing in found:
        reasons.setdefault(place_of(mixing, graph), mixing.reason)
    return (ReasonLine(where, _text_at(where), reason) for where, reason in reasons.items())


def _text_at(where: str) -> str:
    """What is written at ``file:line``; "" where there is no such file or line."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class AxisRow:
    task_graph: str  # the innermost scope around its ops; "" for ops under none
    axis: str
    size: int  # at the example's rows
    held_by: tuple[str, ...]  # dimensions of this TaskGraph's parameters that have it: ``fc.weight:0``
    may_be_cut: bool  # whether all of this TaskGraph's ops can work on a part of it
    why: str  # the first reason where not


def describe_axes(axes: Axes, graph: ModelGraph) -> tuple[AxisRow, ...]:
    """One row per TaskGraph and axis, in the order of the graph."""
    reasons: dict[tuple[str, str], str] = {}
    held: dict[tuple[str, str], dict[str, None]] = {}
    for op in graph.ops:
        if op.name not in axes.ops:
            continue
        group = op.scope[-1].key if op.scope else ""
        for axis, role in axes.ops[op.name].roles.items():
            why = f"{op.target} {role.reason}" + (f" at {op.where}" if op.where else "") if role.kind == "whole" else ""
            reasons[group, axis] = reasons.get((group, axis)) or why
        for parameter in graph.parameters_among(op.inputs):
            for index, dimension in enumerate(axes.parameters.get(parameter.name, ())):
                for axis in axes_of(dimension):
                    held.setdefault((group, axis), {})[f"{parameter.name}:{index}"] = None
    return tuple(
        AxisRow(group, axis, axes.by_name[axis].size, tuple(held.get((group, axis), ())), not why, why)
        for (group, axis), why in reasons.items()
    )


def _show_axes(graph: ModelGraph, *, every: bool, as_json: bool) -> None:
    axes = discover(graph)
    rows = [row for row in describe_axes(axes, graph) if every or row.held_by or row.may_be_cut]
    if as_json:
        print(json.dumps(_axes_data(rows, axes), indent=1))
    else:
        print_axes(rows, axes, graph)


def print_axes(rows: list[AxisRow], axes: Axes, graph: ModelGraph) -> None:
    for number, name in enumerate(dict.fromkeys(row.task_graph for row in rows)):
        own = [row for row in rows if row.task_graph == name]
        title = f"TaskGraph {name}" if name else "ops under no scope"
        body = [(row.axis, str(row.size), first_few(row.held_by or ("-",), 1), "yes" if row.may_be_cut else row.why) for row in own]
        print("\n" * bool(number), end="")
        print_table(f"{title} (sizes at {counted(graph.num_rows, 'row')})", ("axis", "size", "held by", "may be cut"), body, ("size",))
    for mixing in axes.mixing:
        print(f"samples are not independent: {mixing}")


def _axes_data(rows: list[AxisRow], axes: Axes) -> dict[str, object]:
    mixing = [{"op": m.op, "kind": m.kind, "reason": m.reason, "where": None if m.where is None else str(m.where)} for m in axes.mixing]
    return {"axes": [asdict(row) for row in rows], "mixing": mixing}
