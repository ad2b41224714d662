"""What a split stage costs whose rows are computed in two halves, one while the other's messages travel.

Halves start every kernel twice and pay every latency twice; in return a message costs only what the other half's work
around it does not hide. Each of `n` messages one way has its share of the work of that direction, by all `g` gaps:

    at once    work + messages                      in halves    work' + max(first or last message, messages' - work' n / g)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.estimate.costs.line import Line
from whale.estimate.prices.tolls import Tolls
from whale.sharding.bridges import ON_THE_SPOT, Bridge, Transport


@dataclass(frozen=True)
class Messages:
    """What the devices of a group exchange during one micro-batch.

    Attributes:
        forward, backward: seconds of those that other work may hide, by rows.
        num_forward, num_backward: how many these are.
        num_gaps: places in the stage where something is exchanged, either way.
    """

    forward: Line
    backward: Line
    num_forward: int
    num_backward: int
    num_gaps: int


def messages_of(tolls: Tolls, bridges: Iterable[Bridge]) -> Messages:
    """What bridges exchange of values that have rows."""
    forward, backward, gaps = [], [], 0
    for bridge in bridges:
        if bridge.tensor in tolls.prices.activations:
            there, back = tolls.both_ways(bridge)
            forward += [there] if _moves(bridge.forward) else []
            backward += [back] if _moves(bridge.backward) and tolls.prices.training else []
            gaps += _moves(bridge.forward) or _moves(bridge.backward)
    return Messages(Line.sum(forward), Line.sum(backward), len(forward), len(backward), gaps)


def _moves(transport: Transport) -> bool:
    return transport not in ON_THE_SPOT


def halved(seconds: Line, messages: Line, num_messages: int, num_gaps: int, rows: float) -> Line:
    """One direction of a stage in two halves.

    Args:
        seconds: at once, messages included.
        messages: of them.
        num_messages: in this direction.
        num_gaps: in both.
        rows: about which the line is taken.
    """
    work = _twice(seconds + messages * -1)
    if not num_messages:
        return work
    both = _twice(messages)
    exposed = both * (0.5 / num_messages), both + work * (-num_messages / num_gaps)
    return work + max(exposed, key=lambda line: line.at(rows))


def _twice(line: Line) -> Line:
    """Two halves of the rows, one after the other."""
    return Line(2 * line.fixed, line.per_row)
