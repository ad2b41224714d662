"""A timeline as text: one line per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whale.ir.schedule import Action
from whale.ir.timeline import Span, Timeline

# rank 0 |F0 F1    B0--- B1---
# rank 1 |   F0 B0--- F1 B1---          a letter and a micro-batch; with several stages on a rank the stage before them

_FINEST = 8  # columns are no finer than this share of the longest action


def draw(timeline: Timeline) -> list[str]:
    """Draws the computations of each rank, and below them its gradient sums where they take time.

    An action starts with its text and is as wide as it is long; text that does not fit is cut.
    """
    column = _scale(timeline)
    label = _labels(timeline)
    margin = len(f"rank {len(timeline.ranks) - 1} ")
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        lines.append(f"{f'rank {rank}':<{margin}}|{_line(spans, column, label)}")
        syncs = [span for span in timeline.syncs[rank] if span.end > span.start] if timeline.syncs else []
        if syncs:
            lines.append(f"{'  sync':<{margin}}|{_line(syncs, column, str)}")
    return lines


def _line(spans: Iterable[Span], column: Callable[[float], int], label: Callable[[Action], str]) -> str:
    parts, length = [], 0
    for span in spans:
        start, end = column(span.start), column(span.end)
        room = max(0, end - start - 1)
        parts.append(" " * (start - length) + f"{label(span.action)[:room]:-<{room}}")
        length = start + room
    return "".join(parts)


def _scale(timeline: Timeline) -> Callable[[float], int]:
    """Columns of a time, such that the shortest action has room for its text."""
    durations = [span.end - span.start for spans in timeline.ranks for span in spans if span.end > span.start]
    unit = max(min(durations), max(durations) / _FINEST) if durations else 1.0
    label = _labels(timeline)
    width = 1 + max((len(label(span.action)) for spans in timeline.ranks for span in spans), default=1)
    return lambda time: round(time / unit * width)


def _labels(timeline: Timeline) -> Callable[[Action], str]:
    """The action's text, without its stage if every rank has only one."""
    if all(len({span.action.stage for span in spans}) <= 1 for spans in timeline.ranks):
        return lambda action: f"{action.kind.value}{action.micro_batch}"
    return str
