"""What a split stage costs whose rows are computed in two halves, one while the other's messages travel.

Halves start every kernel twice and pay every latency twice; in return a message costs only what the other half's work
around it does not hide. Each of `n` messages one way has its share of the work of that direction, by all `g` gaps:

    at once    work + messages                      in halves    work' + max(first or last message, messages' - work' n / g)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.estimate.costs.line import Line
from whale.estimate.costs.started import Started
from whale.estimate.prices.tolls import Tolls, moves
from whale.sharding.bridges import Bridge


@dataclass(frozen=True)
class Messages:
    """What the devices of a group exchange during one micro-batch.

    Attributes:
        forward, backward: seconds of those that other work may hide, by rows; what devices handle is work of theirs.
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
    with_rows = [bridge for bridge in bridges if bridge.tensor in tolls.prices.activations]
    for bridge in with_rows:
        there, back = tolls.both_ways(bridge)
        forward += [there] if moves(bridge.forward) else []
        backward += [back] if moves(bridge.backward) and tolls.prices.training else []
        gaps += moves(bridge.forward) or moves(bridge.backward)
    there_volume, back_volume = tolls.volumes(with_rows)
    awaited = tolls.awaited(Line.sum(forward), there_volume), tolls.awaited(Line.sum(backward), back_volume)
    return Messages(*awaited, len(forward), len(backward), gaps)


def halved(at_once: Started, messages: Line, num_messages: int, num_gaps: int, rows: float) -> Started:
    """One direction of a stage in two halves.

    Args:
        at_once: messages included.
        messages: seconds of them.
        num_messages: in this direction.
        num_gaps: in both.
        rows: about which lines are taken.
    """
    work, host = _twice(at_once.device + messages * -1), 2 * at_once.host
    if not num_messages:
        return Started(work, host)
    both = _twice(messages)
    exposed = both * (0.5 / num_messages), both + work * (-num_messages / num_gaps)
    return Started(work + max(exposed, key=lambda line: line.at(rows)), host)


def _twice(line: Line) -> Line:
    """Two halves of the rows, one after the other."""
    return Line(2 * line.fixed, line.per_row)
