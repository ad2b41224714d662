"""The stages that a rank runs in one mode: their programs, and the loss terms that it counts there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from whale.axes import Axes
from whale.axes.updates import Update
from whale.ir.graph import ModelGraph
from whale.ir.plan import Replica, Stage
from whale.ir.schedule import Action, Kind
from whale.ir.writes import written_buffers
from whale.runtime.execute.connections import Connections
from whale.runtime.execute.roster import RankPlace
from whale.runtime.execute.stage import StageRunner
from whale.runtime.program.lowering import StageShards
from whale.runtime.program.offload import offload_saved
from whale.runtime.program.shard import Slots
from whale.runtime.program.stage_source import Captured, StageSource
from whale.runtime.state.gathered import GatheredWeights
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.publishing import Publishing
from whale.runtime.state.updates import StepBuffers
from whale.sharding.parameters import ParameterShardings, Pattern

if TYPE_CHECKING:
    from whale.runtime.program.compiled import Compilation


@dataclass(frozen=True)
class RankStages:
    """A rank's stages; an idle rank has none."""

    runners: Mapping[int, StageRunner] = field(default_factory=dict)  # by stage
    outputs: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # of each stage's program
    counted: frozenset[int] = frozenset()  # see `Executor`

    def held_terms(self, model: ModelGraph) -> frozenset[int]:
        """Loss terms that this rank computes, counted here or on another device of its split group."""
        made = {name for outputs in self.outputs.values() for name in outputs}
        return frozenset(index for index, term in enumerate(model.loss) if term.sum in made)

    def loss_stages(self, model: ModelGraph) -> dict[int, tuple[int, ...]]:
        """Per loss term, the stages in which this rank counts it."""
        counted = sorted(self.counted)
        return {index: tuple(stage for stage in counted if term.sum in self.outputs[stage]) for index, term in enumerate(model.loss)}


def make_stages(
    replica: Replica,
    rank_place: RankPlace,
    actions: Sequence[Action],
    captured: Captured,
    updates: Mapping[str, Update],  # of the buffers that passes write into copies
    known: Collection[int],  # loss terms whose weights are known in advance
    tensors: Mapping[str, torch.Tensor],  # what this rank owns, and the constants
    axes: Axes | None,  # of the model; None where no stage is cut
    holdings: Holdings,  # who holds which part of what, in all modes
    lent: Mapping[str, torch.Tensor],  # whole tensors that its stages read in this mode and do not hold
    connections: Connections,
    weights: GatheredWeights | None = None,
    publishing: Publishing | None = None,  # None unless some weights are waited for late
    compilation: Compilation | None = None,  # compiles runs of ops; None for none
) -> RankStages:
    """Makes the stages of a rank."""
    device = connections.roster.world.device
    runners, outputs = {}, {}
    mine = replica.pipeline.stages_of(rank_place.pipeline_rank)
    for index in mine:
        stage = replica.stages[index]
        shards = shards_of(replica, stage, captured.graph, axes, holdings, rank_place.position)
        splits = any(action.kind is Kind.BACKWARD_WEIGHT and action.stage == index for action in actions)
        lacks = holdings.lacks(replica.index, stage)
        transient, awaited = (
            {} if each is None else {name: own for name, own in each.numbers.items() if name not in lacks} for each in (weights, publishing)
        )
        source = StageSource(
            captured,
            replica,
            stage,
            set(known),
            device,
            splits,
            shards,
            transient,
            awaited,
            connections.watch,
            compilation,
        )
        group = connections.split_group(stage, rank_place.position)
        written = written_buffers(captured.graph, frozenset(stage.ops))
        buffers = StepBuffers(tensors, {name: updates[name] for name in written if name in updates})
        own = {**tensors, **{name: lent[name] for name in lacks}}
        keeping = partial(offload_saved, watch=connections.watch) if stage.offloads else None
        runners[index] = StageRunner(source, own, device, buffers, rank_place.position // stage.split, group, weights, publishing, keeping)
        outputs[index] = source.outputs
    return RankStages(runners, outputs, frozenset(index for index in mine if rank_place.position % replica.stages[index].split == 0))


def shards_of(
    replica: Replica, stage: Stage, model: ModelGraph, axes: Axes | None, holdings: Holdings, position: int
) -> StageShards | None:
    """The cuts of a stage in this mode, over what its devices hold in all modes."""
    held = holdings.shardings.pattern_at[replica.index, stage.index]
    if not held.shards:
        return None
    assert axes is not None, "a cut stage needs the axes of the model"
    here, own = ParameterShardings((), axes, ()), Pattern(stage.parameters, stage.split, stage.shards)
    gathered = {}
    for name in model.parameters_read(stage.ops):
        parts = holdings.shardings.parts(held, name) if name in held.parameters else None
        if parts is not None and here.parts(own, name) is None:
            dim = next(dim for dim, runs in enumerate(zip(*parts, strict=True)) if len(set(runs)) > 1)
            size = model.parameter_by_name[name].spec.shape[dim]
            gathered[name] = Slots(dim, size, tuple(device[dim] for device in parts), position % stage.split)
    is_alike = holdings.plan.is_alike(stage)
    return StageShards(axes, stage.shards, position % stage.split, stage.split, held.partial, gathered, is_alike)
