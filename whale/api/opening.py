"""Putting a plan to work: who is who in it, what each rank holds, and the runtime for it. Done once, and again for each other plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from whale.api.apart import warn_where_apart
from whale.api.attach import Attachment, attach
from whale.api.joining import compare_settings
from whale.api.modes import Modes
from whale.api.state.optimizers import MakeOptimizer, MakeScheduler
from whale.api.tracing import Tracing
from whale.comm import World, on_first_rank, together
from whale.config import Config, Source, load_config
from whale.ir.plan import Plan
from whale.runtime.execute.batch.rank_batch import rank_pieces
from whale.runtime.execute.roster import Roster
from whale.runtime.program.watch import NOBODY
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.schedules import schedules_of
from whale.search import decide
from whale.telling import told_if_long


@dataclass(frozen=True)
class Opening:
    """What an engine is made of beside its plan and its state.

    Attributes:
        world: this process among its peers.
        modes: the captured model.
        attachment: the cluster, and its ranks.
        settings: to plan and run by.
        optimizer, scheduler: the user's functions.
    """

    world: World
    modes: Modes
    attachment: Attachment
    settings: Config
    optimizer: MakeOptimizer | None
    scheduler: MakeScheduler | None

    def with_settings(self, config: Source) -> Opening:
        """The same with some other settings, which win over its own and the environment's; all ranks of the world call it.

        Raises:
            ConfigError: unknown keys or wrong values, or ranks give unlike ones.
            ClusterError: as `attach`.
        """
        if config is None:
            return self
        settings = together(self.world, lambda: load_config(config, environment={}, base=self.settings))
        compare_settings(settings, self.world)
        attachment = self.attachment
        if settings.cluster != self.settings.cluster:
            attachment = attach(settings.cluster.file, self.world, settings.cluster.devices)
        return replace(self, settings=settings, attachment=attachment)

    def decide(self, plan: Plan | str | Path | None) -> Plan:
        """The plan, on all ranks; `whale.search.decide` says from what, and what is raised."""
        world, graph, cluster = self.world, self.modes.train.graph, self.attachment.cluster
        with told_if_long("planning", on_first=world.rank == 0) as tell:
            return on_first_rank(world, lambda: decide(plan, graph, cluster, self.settings, tell=tell)[0])

    def prepare(self, plan: Plan) -> tuple[Roster, Holdings]:
        """Who is who, and who holds what; the model is captured for the rows that this rank takes.

        Raises:
            CaptureError: it cannot be.
        """
        world, train = self.world, self.modes.train
        warn_where_apart(plan, train.graph, world)
        roster = self.attachment.roster(plan, world)
        pieces = rank_pieces(plan, roster.rank, plan.planned_rows)
        together(world, lambda: train.prepare({stop - start for start, stop in pieces}))
        return roster, Holdings.of(plan, train.graph, discover_if_sharded(plan, train.graph))

    def open(self, roster: Roster, holdings: Holdings, state: EngineState) -> tuple[Runtime, Tracing | None]:
        """The runtime of a plan for a state, and what records its steps."""
        tracing = None
        if self.optimizer is not None:
            tracing = Tracing.of(self.settings, self.modes.train.graph, self.attachment.cluster, roster)
        runtime = Runtime(
            roster=roster,
            schedules=schedules_of(roster.plan),
            holdings=holdings,
            captured=self.modes.train,
            state=state,
            config=self.settings,
            watch=NOBODY if tracing is None else tracing.recorder,
        )
        return runtime, tracing
