"""A run of a stage's ops that is treated alike: kept, on the device or the host, or computed again, at once or in halves.

The segments of a stage are its program: they cover its ops in order, without gap or overlap.

    ops       embedding  linear  gelu  linear_1  add  linear_2
    program   |- kept --||------ recomputed ------||-- kept --|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of a stage, one behind the other.

    Attributes:
        first, last: names of the first and the last.
        recompute: whether their activations are not kept, but computed again in the backward pass.
        in_halves: whether the rows of a micro-batch go through them in two halves that take turns: one computes while what the
            other exchanges inside its split group is on the way.
        offload: whether what they keep for the backward pass (of what is computed again, what it reads) waits in the memory of the host.
    """

    first: str
    last: str
    recompute: bool = False
    in_halves: bool = False
    offload: bool = False


def program_of(
    ops: Sequence[str], recomputed: Sequence[tuple[str, str]] = (), *, in_halves: bool = False, offload: bool = False
) -> tuple[Segment, ...]:
    """The program of a stage of these ops: the runs to recompute, by first and last op in order, and what lies between them."""
    position = {name: index for index, name in enumerate(ops)}
    segments, start = [], 0
    for first, last in recomputed:
        if start < position[first]:
            segments.append(Segment(ops[start], ops[position[first] - 1], in_halves=in_halves, offload=offload))
        segments.append(Segment(first, last, recompute=True, in_halves=in_halves, offload=offload))
        start = position[last] + 1
    if start < len(ops):
        segments.append(Segment(ops[start], ops[-1], in_halves=in_halves, offload=offload))
    return tuple(segments)
