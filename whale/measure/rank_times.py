"""What ranks have timed of a model's ops, pooled over ranks of one kind: medians, with what an earlier profile knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from whale.ir.cluster import Device
from whale.ir.figure import Figure
from whale.ir.profile import KindProfile, OpTimes
from whale.measure.op_times import OpRounds, PassRounds
from whale.units import counted


@dataclass(frozen=True)
class RankTimes:
    """What one rank has timed.

    Attributes:
        kind: of its device.
        machine: what that calls itself.
        ops: by signature, per number of rows.
        passes: of the whole model, per number of rows; empty where they are known.
    """

    kind: Device
    machine: str
    ops: Mapping[str, tuple[OpRounds, ...]]
    passes: tuple[PassRounds, ...]


def pooled_kind(ranks: Sequence[RankTimes], before: KindProfile, signatures: Iterable[str], rows: tuple[int, ...]) -> KindProfile:
    """What ranks of one kind have timed together.

    Args:
        ranks: at least one.
        before: what was known of the kind.
        signatures: the model's distinct ops.
        rows: that were measured.
    """
    first = ranks[0]
    ops = tuple(_times(name, [rank.ops[name] for rank in ranks]) if name in first.ops else before.by_signature[name] for name in signatures)
    forward, backward = (before.forward, before.backward) if not first.passes else _passes([rank.passes for rank in ranks], rows)
    apart = before.apart if not first.passes else _apart([rank.passes for rank in ranks])
    return KindProfile(first.kind, first.machine, torch.__version__, rows, ops, forward, backward, apart)


def _times(name: str, ranks: Sequence[tuple[OpRounds, ...]]) -> OpTimes:
    reason = next((rounds.reason for rank in ranks for rounds in rank if rounds.reason), "")
    if reason:
        return OpTimes(name, reason=reason)
    forward = list(_figures(name, [[rounds.forward for rounds in rank] for rank in ranks]))
    backward = list(_figures(name, [[rounds.backward for rounds in rank] for rank in ranks]))
    spread = max(figure.spread for figure in (*forward, *backward))
    return OpTimes(name, tuple(figure.value for figure in forward), tuple(figure.value for figure in backward), round(spread, 3))


def _figures(name: str, ranks: Sequence[Sequence[Sequence[float]]]) -> Iterator[Figure]:
    """Per number of rows the figure of all ranks' rounds; none where nothing was timed."""
    for rounds in zip(*ranks, strict=True):
        samples = [seconds for own in rounds for seconds in own]
        if samples:
            yield Figure.of(name, "s", samples)


def _passes(ranks: Sequence[tuple[PassRounds, ...]], rows: tuple[int, ...]) -> tuple[tuple[Figure, ...], tuple[Figure, ...]]:
    """Figures of the forward and of the backward pass; none where the model did not fit at some number of rows.

    None of the backward pass where both passes took no longer than the forward pass alone.
    """
    if any(not rounds.forward for rank in ranks for rounds in rank):
        return (), ()
    forward = [_pass("forward pass", num_rows, [rank[at].forward for rank in ranks]) for at, num_rows in enumerate(rows)]
    both = [_pass("forward and backward pass", num_rows, [rank[at].both for rank in ranks]) for at, num_rows in enumerate(rows)]
    backward = tuple(map(_rest, both, forward, rows))
    return tuple(forward), backward if all(figure.value > 0.0 for figure in backward) else ()


def _pass(name: str, num_rows: int, ranks: Sequence[Sequence[float]]) -> Figure:
    """Of each round the slowest rank: a step waits for it."""
    return Figure.of(f"{name}, {counted(num_rows, 'row')}", "s", [max(seconds) for seconds in zip(*ranks, strict=True)])


def _apart(ranks: Sequence[tuple[PassRounds, ...]]) -> tuple[float, ...]:
    """What weight gradients that wait add, per number of rows; none where none can.

    By the ranks' own time, and stretched as ops are: it is less than what waiting for a core makes of a pass.
    """
    found = []
    for each in zip(*ranks, strict=True):
        samples = [seconds * passes[-1].stretch for rounds, passes in zip(each, ranks, strict=True) for seconds in rounds.apart]
        found += [max(median(samples), 0.0)] if samples else []
    return tuple(found) if len(found) == len(ranks[0]) else ()


def _rest(both: Figure, forward: Figure, num_rows: int) -> Figure:
    """The backward pass: what both passes take beside the forward pass; of noise alone it may be nothing or less."""
    value, low, high = (seconds - forward.value for seconds in (both.value, both.low, both.high))
    return replace(both, name=f"backward pass, {counted(num_rows, 'row')}", value=value, low=low, high=high)
