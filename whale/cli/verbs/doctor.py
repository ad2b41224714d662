"""``whale doctor``: whether a model will be captured, under what its numbers stay exact, and which lines are the reason."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from whale.cli.diagnosis import Finding, Place, diagnose, refused, sizes
from whale.cli.inputs import add_source_arguments, build_model, is_function, read_graph
from whale.cli.tables import paragraph
from whale.errors import WhaleError

if TYPE_CHECKING:
    from whale.capture.batch import BatchStructure, Leaf

NOT_EXACT = 3
"""The command's end where the model is captured and something is not exact."""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Adds the verb's words."""
    parser = verbs.add_parser(
        "doctor",
        help="say whether a model is captured and stays exact",
        description="Says whether a model is captured, under what its numbers stay those of one device, and which lines are the reason. "
        f"Ends with 0 where all is well, 1 where the capture is refused, {NOT_EXACT} where something else is refused or not exact.",
    )
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Captures the model, tries a few plans, and prints what is found."""
    findings = _examine(arguments.source, arguments.arg)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(_lines(findings)))
    return end_of(findings)


def end_of(findings: Sequence[Finding]) -> int:
    """The exit code of findings."""
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


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One paragraph per finding; lines that several have are printed with the first."""
    first: dict[tuple[Place, ...], str] = {}
    for finding in findings:
        start = f"{finding.question:<15}{finding.answer:<13}"
        yield from paragraph(start, finding.detail)
        known = first.setdefault(finding.places, finding.question)
        if finding.places and known != finding.question:
            yield f"  the lines under {known}"
        else:
            for place in finding.places:
                yield from _place(place)
        if finding.hint:
            yield from paragraph("  hint: ", finding.hint)


def _place(place: Place) -> Iterator[str]:
    yield f"  {place.where}" + (f": {place.text}" if place.text else "")
    yield from paragraph("    ", place.reason)
