"""Opening a plan: which rank is which device, what each rank holds, and the runtime for it; and the move to another plan.

Which rank stands for which device follows from host and hardware of the ranks, never from their numbers.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from whale.api.initial_state import MakeOptimizer, MakeScheduler, with_optimizer
from whale.api.loader import DataPosition, Loader
from whale.api.modes import Modes, warn_where_apart
from whale.api.row_source import RowSource
from whale.api.tracing import Tracing
from whale.comm import World, on_first_rank, together
from whale.config import Config, Source, load_config
from whale.config.sections import ClusterSettings
from whale.errors import ClusterError, ConfigError, PlanError, first_few, warn
from whale.hardware import DeviceProfile, compute_type, half_type, load_cluster, make_cluster, select
from whale.ir.cluster import Cluster, Device
from whale.ir.plan import Plan
from whale.ir.precision import Precision
from whale.measure import rank_profiles
from whale.planning.whole import whole_plan
from whale.progress import progress
from whale.runtime.checkpoint.moving import move_state
from whale.runtime.execute.batch import rank_pieces
from whale.runtime.execute.roster import Roster
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.runtime.state.joint import check_elementwise
from whale.runtime.state.optimizer_state import read_optimizer
from whale.runtime.state.scaling import LossScaling, ScaleRule
from whale.schedules import schedules_of
from whale.search import decide
from whale.units import counted, listed


@dataclass(frozen=True)
class Decided:
    plan: Plan
    own_seconds: tuple[float, ...] = ()  # predicted computing time of a step per rank of the plan; empty without a prediction
    seconds: float = 0.0  # of the decision


@dataclass(frozen=True)
class Opening:
    """What an engine is made of besides its plan and its state."""

    world: World
    modes: Modes
    attachment: Attachment
    settings: Config
    optimizer: MakeOptimizer | None
    scheduler: MakeScheduler | None
    given: Plan | str | Path | None = None  # the user's plan; None where none was given

    def on(self, cluster: Cluster) -> Opening:
        """The same for the same devices with other figures.

        Raises:
            ClusterError: they are others.
        """
        known, found = (sorted(each.by_name) for each in (self.attachment.cluster, cluster))
        if known != found:
            raise ClusterError(
                f"the cluster has other devices ({first_few(found)}) than the run ({first_few(known)})",
                hint="engine.replan(cluster=) takes the same devices with other figures; cluster.devices in config= names fewer",
            )
        return replace(self, attachment=replace(self.attachment, cluster=cluster))

    def checked_slowdowns(self, slowdowns: Mapping[str, float]) -> dict[str, float]:
        """Slowdowns by device.

        Raises:
            ConfigError: a device is unknown, or a value is not above 0.
        """
        known = self.attachment.cluster.by_name
        wrong = [f"{name}: {value}" for name, value in slowdowns.items() if name not in known or not 0 < value < math.inf]
        if wrong:
            raise ConfigError(
                f"slowdowns must be numbers above 0 for devices of the run, not {first_few(wrong)}",
                hint=f"devices: {first_few(list(known))}",
            )
        return dict(slowdowns)

    def with_settings(self, config: Source) -> Opening:
        """The same with some other settings, which win over its own and the environment's; all ranks of the world call it.

        Raises:
            ConfigError: unknown keys or wrong values, or they differ between ranks.
            ClusterError: as `attach`.
        """
        if config is None:
            return self
        settings = together(self.world, lambda: load_config(config, environment={}, base=self.settings))
        compare_settings(settings, self.world)
        attachment = self.attachment
        if settings.cluster != self.settings.cluster:
            attachment = attach(settings.cluster, self.world)
        return replace(self, settings=settings, attachment=attachment)

    def decide(self) -> Decided:
        """The plan, on all ranks, as of `whale.search.decide`; one that needs no search has no figures."""
        world, graph, cluster, plan = self.world, self.modes.train.graph, self.attachment.cluster, self.given
        whole = self._whole_plan() if plan is None and world.size == 1 else None
        if whole is not None:
            return Decided(whole)
        begun = time.perf_counter()
        with progress("planning", on_first=world.rank == 0) as tell:

            def found() -> Decided:
                made, step = decide(plan, graph, cluster, self.settings, tell=tell)
                return Decided(made, step.own_seconds(made.devices))

            return replace(on_first_rank(world, found), seconds=time.perf_counter() - begun)

    def with_figures(self, plan: Plan) -> Plan:
        """A plan of this opening with its step time and reasons, computed now where it needed no search."""
        return decide(None, self.modes.train.graph, self.attachment.cluster, self.settings)[0] if plan == self._whole_plan() else plan

    def _whole_plan(self) -> Plan | None:
        return whole_plan(self.modes.train.graph, self.attachment.cluster, self.settings)

    def scaling(self, plan: Plan) -> LossScaling | None:
        """The loss scale of a training by a plan: one for all ranks where some device computes in float16, else none."""
        precision, asked = self.modes.precision, self.settings.precision
        if precision is None or "float16" not in (plan.half_types if precision.by_device else (precision.dtype,)):
            return None
        return LossScaling(ScaleRule(asked.loss_scale, asked.loss_scale_growth_steps, asked.loss_scale_hysteresis))

    def prepare(self, plan: Plan) -> tuple[Roster, Holdings]:
        """Roster and holdings of a plan; the model is captured for the rows that this rank takes.

        Raises:
            CaptureError: it cannot be.
            PlanError: this rank's programs are in another half-precision type than the plan gives its device.
        """
        world, train = self.world, self.modes.train
        warn_where_apart(plan, train.graph, world)
        roster = self.attachment.roster(plan, world)
        idle = sorted(set(roster.all_ranks) - set(roster.world_ranks))
        if idle and world.rank == 0:
            used = f"{len(roster.world_ranks)} of {counted(world.size, 'rank')}"
            print(f"whale: the plan uses {used}; idle: {listed('rank', idle)}", file=sys.stderr, flush=True)

        def prepared() -> None:
            self._check_half_type(plan, roster)
            train.prepare({stop - start for start, stop in rank_pieces(plan, roster.rank, plan.planned_rows)})

        together(world, prepared)
        return roster, Holdings.of(plan, train.graph, discover_if_sharded(plan, train.graph))

    def _check_half_type(self, plan: Plan, roster: Roster) -> None:
        precision, rank = self.modes.precision, roster.rank
        if precision is not None and precision.by_device and rank is not None and plan.half_types[rank] != precision.dtype:
            raise PlanError(
                f"rank {self.world.rank} computes in {precision.dtype} since it started, but the plan makes it {plan.devices[rank]} "
                f"({plan.device_models[rank]}), in {plan.half_types[rank]}",
                hint="a process keeps its device's half-precision type: start the run anew with these devices, from a checkpoint",
            )

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
            watch=self._watch() if tracing is None else tracing.recorder,
        )
        return runtime, tracing

    def _watch(self) -> Watch:
        """Measures how long this rank computes, unless it is alone or trains nothing."""
        if self.world.is_alone or self.optimizer is None:
            return NOBODY
        from whale.runtime.recording.meter import Meter  # needed among other ranks only

        return Meter(self.world.device)


@dataclass(frozen=True)
class CheckedMove:
    opening: Opening
    decided: Decided
    roster: Roster
    holdings: Holdings
    loaders: list[tuple[Loader, RowSource]]  # that the script still has, with what they read from under the plan

    @staticmethod
    def checked(opening: Opening, decided: Decided, state: EngineState, data: DataPosition) -> CheckedMove:
        """The move to a plan; all ranks of the world call it, and nothing has changed.

        Raises:
            WhaleError: it cannot be made.
        """
        begun = time.perf_counter()
        graph, optimizer = opening.modes.train.graph, state.optimizer
        roster, holdings = opening.prepare(decided.plan)

        def check() -> list[tuple[Loader, RowSource]]:
            kept = {name: holdings.shardings.kept(name) for name in roster.owned if name in graph.trained}
            read_optimizer(optimizer, state.kept)
            check_elementwise(optimizer, [name for name, own in kept.items() if own.is_sharded and roster.rank in own.held])
            return data.divided(roster.plan, roster.rank)

        loaders = together(opening.world, check)
        return CheckedMove(opening, replace(decided, seconds=decided.seconds + time.perf_counter() - begun), roster, holdings, loaders)

    def moved(self, state: EngineState, roster: Roster, holdings: Holdings) -> EngineState:
        """The state under the plan; the old one, with its roster and holdings, is used up. All ranks of the world call it."""
        opening, graph = self.opening, self.opening.modes.train.graph
        found, kept = move_state(state, roster, holdings, self.roster, self.holdings, graph)
        scaling = opening.scaling(self.decided.plan)  # device types may have come or gone
        found.scaling = scaling if scaling is None or state.scaling is None else state.scaling
        with_optimizer(found, graph, self.holdings, opening.optimizer, opening.scheduler, opening.world)
        together(opening.world, lambda: kept.give(found))
        return found


@dataclass(frozen=True)
class Attachment:
    """A cluster with the rank of each of its devices."""

    cluster: Cluster
    rank_of: dict[str, int]  # world rank by device name
    profiles: Sequence[DeviceProfile] = ()  # per rank, its own device, be it of the cluster or not

    def precision(self, settings: Config, rank: int) -> Precision | None:
        """The dtype to which autocast casts on a rank; None for the dtypes of the model. Raises ConfigError as `compute_type`."""
        found = compute_type(settings, self.cluster)
        if found is None or not found.by_device:
            return found
        names = (name for name, own in self.rank_of.items() if own == rank)
        device = next((self.cluster.by_name[name] for name in names if name in self.cluster.by_name), None)
        with suppress(ClusterError):  # an idle rank may have any device
            device = device or self.profiles[rank].device("idle")
        own = None if device is None else half_type(device)
        return found if own is None else replace(found, dtype=own)

    def roster(self, plan: Plan, world: World) -> Roster:
        return Roster(plan, world, tuple(self.rank_of[device] for device in plan.devices))


def attach(settings: ClusterSettings, world: World, cluster: Cluster | str | Path | None = None) -> Attachment:
    """Finds the ranks that stand for a cluster's devices; without a cluster, this machine's devices are the cluster.

    Ranks with the host and hardware of a device take it first, then those with its hardware; the others follow in order, so that a plan for
    other hardware can be tried on CPU ranks.

    Args:
        settings: the cluster file, which of its devices are used, and whether all must be there.
        world: this process among its peers.
        cluster: in place of the file.

    Raises:
        ClusterError: the cluster has more devices than the world has ranks, or lacks named ones.
    """
    described = together(world, lambda: _described(settings.file if cluster is None else cluster, settings.devices))
    profiles = rank_profiles(world)
    if described is None:
        found, names = make_cluster(profiles)
        part = found if settings.devices is None else together(world, lambda: select(found, str(settings.devices)))
        return Attachment(part, {name: rank for rank, name in enumerate(names)}, profiles)
    for warning in described.warnings if world.rank == 0 else ():
        warn(warning)
    num_devices = len(described.devices)
    if num_devices > world.size and not settings.partial:
        raise ClusterError(
            f"cluster {described.name} has {num_devices} devices, but {counted(world.size, 'rank')} started; each device needs one",
            hint=f"start {num_devices} ranks (whale run --ranks {num_devices} ...), or name fewer (cluster.devices)",
        )
    rank_of = _match(described, profiles)
    if num_devices > world.size:
        away = [device.name for device in described.devices if device.name not in rank_of]
        if world.rank == 0:
            text = f"{world.size} of {num_devices} devices of cluster {described.name} have a rank; missing: {first_few(away)}"
            print(f"whale: {text}", file=sys.stderr, flush=True)
        described = described.only(rank_of)
    return Attachment(described, rank_of, profiles)


def _described(cluster: Cluster | str | Path | None, devices: str | None) -> Cluster | None:
    whole = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    return whole if whole is None or devices is None else select(whole, devices)


def _match(cluster: Cluster, profiles: Sequence[DeviceProfile]) -> dict[str, int]:
    """The rank of each device, by its name; where ranks are fewer, of so many devices."""
    free = list(range(len(profiles)))
    rank_of: dict[str, int] = {}
    fits: tuple[Callable[[Device, DeviceProfile], bool], ...] = (
        lambda device, profile: (profile.host, profile.model) == (device.host, device.model),
        lambda device, profile: profile.model == device.model,
        lambda device, profile: True,
    )
    for is_it in fits:
        for device in cluster.devices:
            rank = next((rank for rank in free if is_it(device, profiles[rank])), None) if device.name not in rank_of else None
            if rank is not None:
                rank_of[device.name] = rank
                free.remove(rank)
    return rank_of


def compare_settings(settings: Config, world: World) -> None:
    """Raises, on all ranks, a ConfigError where settings differ between ranks."""
    # Rank 0 alone reads where it records and logs: hosts may write a path otherwise.
    own = ("trace.directory", "runtime.log_file", "runtime.keep_on_fault")
    own_values = {name: str(value) for name, value in settings.items() if name not in own}
    everyones = world.gather_objects(own_values)  # lines, which blocks know, do not travel
    first = everyones[0]
    assert isinstance(first, dict)
    for rank, other in enumerate(everyones):
        assert isinstance(other, dict)
        odd = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if odd:
            listing = "; ".join(f"{name}: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}" for name in odd)
            raise ConfigError(
                f"settings differ between ranks ({listing})",
                hint="start all ranks with the same environment (WHALE_...), recipe and arguments",
            )
