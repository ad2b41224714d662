"""The figures that are read off a timeline."""

from __future__ import annotations

from whale.ir.timeline import Span, Timeline


def bubble(timeline: Timeline) -> float:
    """Idle time of the rank whose computations span longest, from its first start to its last end."""
    spans = _longest(timeline)
    return _length(spans) - sum(span.end - span.start for span in spans)


def bubble_rate(timeline: Timeline) -> float:
    """`bubble` as a share of that rank's span; 0 where nothing takes time."""
    length = _length(_longest(timeline))
    return bubble(timeline) / length if length else 0.0


def _longest(timeline: Timeline) -> tuple[Span, ...]:
    return max(timeline.ranks, key=_length, default=())


def _length(spans: tuple[Span, ...]) -> float:
    return spans[-1].end - spans[0].start if spans else 0.0
