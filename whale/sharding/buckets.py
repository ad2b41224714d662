"""Which gradients travel together: parameters of equal owners share buckets, in reverse order of first use.

    backward   |layer 3|layer 2|layer 1|
    bucket 0           |--- layers 3, 2 ---|
    bucket 1                           |-- layer 1 --|     a parameter of layers 3 and 1 is whole after layer 1

The runtime sums what stands here, and the estimate prices it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.ir.graph import DTYPE_BYTES, ModelGraph
from whale.ir.reach import reached_parameters
from whale.sharding.parameters import ParameterShardings
from whale.sharding.sharding import Piece

Places = tuple[tuple[int, int], ...]
"""(Replica, stage) pairs."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        pieces: of the parameters, with their names, in the order of the flat buffer.
        num_bytes: of the gradients.
        owners: ranks of the plan that hold them.
        stages: that use them, by replica.
        is_at_one_place: whether all who hold it come to it at the same place of equal schedules; else it starts when all else is done.
    """

    pieces: tuple[tuple[str, Piece], ...]
    num_bytes: int
    owners: tuple[int, ...]
    stages: Places
    is_at_one_place: bool

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.pieces))


@dataclass
class _OpenBucket:
    """A bucket that still takes pieces."""

    pieces: list[tuple[str, Piece]] = field(default_factory=list)
    num_bytes: int = 0


def plan_buckets(shardings: ParameterShardings, model: ModelGraph, alike: Sequence[int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets of a whole plan, equal on every rank, in the order in which they start.

    Pieces that nobody has to wait for are in none, and parameters that get no gradient neither.

    Args:
        shardings: who holds what.
        model: sizes, and the order of first use.
        alike: per replica a number, equal for those that run equal schedules.
        bucket_bytes: a bucket is closed when it has this many bytes.
    """
    first_use = model.first_reads
    growing: dict[tuple[Places, tuple[int, ...], str], _OpenBucket] = {}
    closed: list[Bucket] = []

    def close(key: tuple[Places, tuple[int, ...], str], bucket: _OpenBucket) -> None:
        is_at_one_place = len({(alike[replica], stage) for replica, stage in key[0]}) == 1
        closed.append(Bucket(tuple(bucket.pieces), bucket.num_bytes, key[1], key[0], is_at_one_place))

    for name in sorted(reached_parameters(model).intersection(shardings.parameters), key=lambda name: (-first_use[name], name)):
        dtype = model.parameter_by_name[name].spec.dtype
        for piece in shardings.gradient(name).pieces:
            if piece.is_complete:
                continue
            key = shardings.places(name), piece.owners, dtype
            bucket = growing.setdefault(key, _OpenBucket())
            bucket.pieces.append((name, piece))
            bucket.num_bytes += shardings.num_elements(model, name, piece.region) * DTYPE_BYTES[dtype]
            if bucket.num_bytes >= bucket_bytes:
                close(key, growing.pop(key))
    for key, bucket in growing.items():
        close(key, bucket)

    def order(bucket: Bucket) -> tuple[object, ...]:
        """Later stages first, and in a stage what is first used last first: the order in which gradients are whole."""
        name, piece = bucket.pieces[0]
        return not bucket.is_at_one_place, -max(stage for _, stage in bucket.stages), -first_use[name], name, piece.region.intervals

    return tuple(sorted(closed, key=order))
