"""The part of every parameter that a rank holds, as tensors: cut out of the whole, and indexed by pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whale.axes import Axes, discover
from whale.comm import Groups, Waits
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Stage
from whale.runtime.program.shard.pieces import Index, as_index, part
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.state.host_copies import HostCopies
from whale.runtime.state.perform import Whole
from whale.sharding import Piece, Region
from whale.sharding.buckets import Bucket
from whale.sharding.parameters import ParameterShardings, parameter_shardings


@dataclass(frozen=True)
class Holdings:
    """What all ranks hold, by a plan and its parameter shardings."""

    plan: Plan
    shardings: ParameterShardings

    @staticmethod
    def of(plan: Plan, model: ModelGraph, axes: Axes | None) -> Holdings:
        """The holdings of a plan for a model; `axes` are needed where some stage is sharded."""
        return Holdings(plan, parameter_shardings(plan, model, axes))

    def held(self, name: str, rank: int) -> Region:
        """The region of a parameter that a rank of the plan holds."""
        return self.shardings.gradient(name).held[rank]

    def kept(self, name: str, rank: int | None) -> Region | None:
        """The region of a parameter that a rank's optimizer steps; None if it has none of it."""
        return None if rank is None else self.shardings.kept(name).held.get(rank)

    def kept_index(self, name: str, rank: int) -> tuple[Index, ...] | None:
        """Index of that in what the rank holds; None for all."""
        region = self.kept(name, rank)
        assert region is not None, "who keeps nothing of it does not ask"
        return self.index(name, region, self.held(name, rank))

    def gradient_stays(self, name: str) -> bool:
        """Whether every owner keeps its gradient until the next step."""
        form = self.plan.state_of(name).gradient
        return form is None or form.sharding == "stage"

    def gradient_is_sparse(self, name: str) -> bool:
        form = self.plan.state_of(name).gradient
        return form is not None and form.is_sparse

    def pieces(self, name: str) -> tuple[Piece, ...]:
        return self.shardings.gradient(name).pieces

    def is_sharded(self, name: str) -> bool:
        """Whether some rank holds only a part."""
        return self.shardings.is_sharded(name)

    def lacks(self, replica: int, stage: Stage) -> list[str]:
        """The parameters and buffers that a stage reads in some mode without holding them."""
        held = frozenset(self.shardings.pattern_at[replica, stage.index].parameters)
        return [name for name in stage.parameters if name not in held]

    def borrowers(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """The parameters and buffers that stages lack in a mode with this plan, and the ranks of the plan that borrow them."""
        found: dict[str, set[int]] = {}
        for replica in plan.replicas:
            for stage in replica.stages:
                for name in self.lacks(replica.index, stage):
                    found.setdefault(name, set()).update(plan.rank_of[device] for device in stage.virtual_device.devices)
        return {name: tuple(sorted(ranks)) for name, ranks in sorted(found.items())}

    def holders_of_parts(self, name: str) -> list[int]:
        """The ranks of the plan that keep a part of a parameter, and not all of it."""
        return [rank for rank, region in self.shardings.kept(name).held.items() if self.index(name, region) is not None]

    def whole(self, model: ModelGraph, name: str, dtype: torch.dtype | None = None) -> Whole:
        """A parameter or buffer in a dtype, by default that of its lasting form, for `perform`."""
        dtype = getattr(torch, self.plan.state_of(name).kept.dtype) if dtype is None else dtype
        return Whole(name, model.parameter_by_name[name].spec.shape, dtype, self.shardings.space(name))

    def read_type(self, name: str, rank: int) -> torch.dtype:
        """The dtype in which ops of a rank read a parameter or buffer."""
        found: torch.dtype = getattr(torch, self.plan.type_on(rank, self.plan.state_of(name).compute.dtype))
        return found

    def index(self, name: str, region: Region, within: Region | None = None) -> tuple[Index, ...] | None:
        """Index of a region in a tensor that holds `within` (by default the whole parameter); None for all."""
        outer = self.shardings.gradient(name).hull if within is None else within
        if region == outer or (not outer.axes and self.shardings.is_all_rows(name, region)):
            return None
        return tuple(map(as_index, self.shardings.space(name).positions(region, outer)))

    def cut_out(self, name: str, rank: int, whole: Tensor) -> Tensor:
        """The part of a parameter or buffer that a rank holds; a view if possible."""
        index = self.index(name, self.held(name, rank))
        return whole if index is None else part(whole, index)

    def answered_for(self, name: str, rank: int) -> list[tuple[Index, ...] | None]:
        """Per piece of which a rank is the lowest keeper of its sync group, its index in what the rank keeps; None for all."""
        kept = self.kept(name, rank)
        pieces = self.shardings.kept(name).pieces if kept is not None else ()
        return [self.index(name, piece.region, kept) for piece in pieces if self.plan.together(rank, piece.owners)[0] == rank]


@dataclass(frozen=True)
class RankLinks:
    """How this rank of a plan exchanges gradients and weights with their other owners."""

    holdings: Holdings
    rank: int  # of the plan
    world_ranks: Sequence[int]  # per rank of the plan, the rank in the world
    groups: Groups  # one per owner set
    waits: Waits
    copies: HostCopies  # between the device and its host
    watch: Watch = NOBODY

    def in_world(self, bucket: Bucket) -> tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]:
        """The owners of a bucket that keep a copy with this rank, and their runs, by ranks of the world."""
        own = next((group for group in bucket.groups if self.rank in group), bucket.owners)
        runs = tuple((self.world_ranks[keeper], start, stop) for keeper, start, stop in bucket.runs if keeper in own)
        return tuple(sorted(self.world_ranks[owner] for owner in own)), runs

    def between(self, bucket: Bucket) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """What this rank sums with the keepers of other copies, by ranks of the world."""
        own = (each for each in bucket.between if self.rank in each[0])
        return tuple((tuple(sorted(self.world_ranks[keeper] for keeper in keepers)), start, stop) for keepers, start, stop in own)


def discover_if_sharded(plan: Plan, model: ModelGraph) -> Axes | None:
    """The axes of a model, if some stage of the plan is cut; else they are not needed."""
    return discover(model) if plan.is_sharded else None
