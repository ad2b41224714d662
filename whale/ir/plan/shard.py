"""One axis of a split stage, divided over the devices of each split group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from whale.units import counted

BATCH = "batch"
"""The name of the axis that samples lie along."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One axis of a split stage, divided over the devices of each split group.

    Where nothing else is said, every op that meets the axis works on parts of it, and every parameter that has it is held in
    parts. An op meets one axis that is cut at most; where its operands are cut along another, a bridge stands between.

    Attributes:
        axis: name of the logical axis.
        sizes: per device of a group, its units of the axis; their sum is the axis. For the batch, shares of the rows.
        whole_in: ops that meet the axis, but do not work on parts of it.
        whole_parameters: parameters and buffers that have the axis, but are not held in parts of it.
        scattered: ops that sum over another axis that is cut: each device keeps its part of this axis of the sum.
        arriving: values from other stages of which each device is handed its part only.
        handed_on: values for other stages that stay in parts, whatever parts they arrive in.
    """

    axis: str
    sizes: tuple[int, ...]
    whole_in: tuple[str, ...] = ()
    whole_parameters: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()
    handed_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.axis} {':'.join(str(size) for size in self.sizes)}"


def describe_shards(shards: Iterable[Shard]) -> str:
    """Cuts as text; those whose names differ only in numbers (of layers) and that have equal sizes are told once.

    Says how many ops meet an axis but work on all of it: ``hidden 16:16 (whole in 43 ops)``.
    """
    found: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for shard in shards:
        pattern = ".".join("*" if part.isdigit() else part for part in shard.axis.split("."))
        found.setdefault((pattern, shard.sizes), []).append(shard)
    texts = []
    for (pattern, sizes), own in found.items():
        num_whole = sum(len(shard.whole_in) for shard in own)
        note = f" (whole in {counted(num_whole, 'op')})" if num_whole else ""
        texts.append((str(own[0]) if len(own) == 1 else f"{len(own)} x {Shard(pattern, sizes)}") + note)
    return ", ".join(texts)
