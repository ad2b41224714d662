"""The dry run of a plan: two steps of each distinct rank on fake tensors, with the runtime's own program and without peers.

Equal devices of identical replicas share one run. Memory is counted storage by storage, op by op, as an allocator would.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale.comm import World
from whale.comm.world import imagined_world
from whale.config import Config
from whale.errors import ConfigError, OpFault
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica
from whale.ir.precision import HALF
from whale.ir.schedule import Action, Kind, Schedule
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.roster import Roster
from whale.runtime.program.stage_source import Captured
from whale.runtime.program.watch import Watch
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.runtime.state.publishing import in_forms
from whale.schedules import schedules_of

__all__ = ["DryRun", "LiveBytes", "Peak", "dry_run"]


NUM_STEPS = 2
"""The first makes the optimizer's state and the programs; the last is measured."""

_LOOKS = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where their values are read."""

_OPTIMIZERS: Mapping[int, Callable[..., torch.optim.Optimizer]] = {
    0: torch.optim.SGD,
    1: partial(torch.optim.SGD, momentum=0.9),
    2: torch.optim.AdamW,
    3: partial(torch.optim.AdamW, amsgrad=True),
}
"""By the number of tensors that they keep for each parameter."""

_FUSED = (2, 3)
"""Those that step in one kernel, which needs no memory of its own; torch has none for complex numbers."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a rank used in a step."""

    num_bytes: int  # of all live tensors
    held_bytes: int  # of those that exist between steps: parameters, optimizer state, buckets of gradients that several ranks sum
    action: str  # during which it occurred
    op: str  # the operator that had just run


@dataclass(frozen=True)
class DryRank:
    """Runs the ranks of a plan on fake tensors, one at a time."""

    plan: Plan  # verified
    schedules: tuple[Schedule, ...]  # per replica, with communication
    holdings: Holdings
    captured: Captured
    config: Config
    _fakes: FakeTensorMode = field(default_factory=FakeTensorMode)

    def peak(self, rank: int) -> Peak:
        """The memory of a rank of the plan in a step after the first.

        Raises:
            ConfigError: no known optimizer keeps as many tensors as the plan says.
            OpFault: an op of the model depends on the values of tensors.
        """
        live = LiveBytes(BLOCK_BYTES)
        self._fakes.cache_enabled = not self.plan.gathers_weights  # a cached view would bring back memory of freed weights
        with _without_values(), imagined_world(rank, len(self.plan.devices)) as world, self._fakes:
            batch = _batch(self.captured.graph, self.plan.planned_rows)  # is the data source's memory, and not counted
            with live:
                runtime, state = self._start(world, _Following(live))
                for tensor in state.tensors.values():
                    live.measure(tensor)  # gathered weights have no memory at this point
                try:
                    for _ in range(NUM_STEPS):
                        state.forget_gradients()
                        held = live.start_anew()
                        _step(runtime, state, batch)
                        for tensor in self._on_host(state):
                            live.leave_out(tensor)
                finally:
                    runtime.close()
        return Peak(live.peak, held, live.peak_action, live.peak_op)

    def _start(self, world: World, watch: Watch) -> tuple[Runtime, EngineState]:
        roster = Roster(self.plan, world, tuple(range(world.size)))
        tensors = {name: self._tensor(name, world.rank) for name in roster.owned}
        state = EngineState(*in_forms(self.holdings, roster.rank, tensors, world.device))
        if state.kept:
            state.optimizer = self._optimizer(state.kept)
        own = getattr(torch, self.plan.type_on(world.rank, HALF))
        constants = {name: torch.empty_like(value, device=world.device) for name, value in self.captured.constants.items()}
        captured = _Empty(self.captured.graph, constants, partial(_in_type, self.captured.graph_for, own))
        runtime = Runtime(
            roster=roster,
            schedules=self.schedules,
            holdings=self.holdings,
            captured=captured,
            state=state,
            config=self.config.with_values({"runtime.compile": False}),
            watch=watch,
        )
        return runtime, state

    def _on_host(self, state: EngineState) -> Iterator[torch.Tensor]:
        """What the optimizer steps and keeps in host memory."""
        for name, kept in state.kept.items():
            if self.plan.state_of(name).kept.home == "host":
                yield kept
                if state.optimizer is not None:
                    yield from (own for own in state.optimizer.state[kept].values() if isinstance(own, torch.Tensor))

    def _tensor(self, name: str, rank: int) -> torch.Tensor:
        """A rank's part of a parameter or buffer."""
        parameter = self.captured.graph.parameter_by_name[name]
        shape = parameter.spec.shape
        if self.holdings.is_sharded(name):
            shape = self.holdings.shardings.space(name).shape(self.holdings.held(name, rank))
        value = torch.empty(shape, dtype=getattr(torch, self.plan.type_on(rank, self.plan.state_of(name).compute.dtype)))
        return nn.Parameter(value, requires_grad=parameter.trainable) if parameter.kind == "parameter" else value

    def _optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        if self.plan.rounds is not None and not self.plan.rounds.is_average:
            raise ConfigError(
                "a dry run does not support an outer optimizer (communication.outer_rate, outer_momentum)",
                hint="leave it out, or the dry run: it adds two tensors per parameter",
            )
        kept = max(self.plan.state_of(name).num_optimizer_tensors for name in parameters)
        if kept not in _OPTIMIZERS:
            raise ConfigError(
                f"a dry run does not support memory.optimizer_states: {kept}",
                hint=f"set memory.optimizer_states to {min(_OPTIMIZERS)}..{max(_OPTIMIZERS)}, or leave out the dry run",
            )
        groups = list[dict[str, Any]]()
        for is_complex in (False, True):
            own = [each for each in parameters.values() if each.is_complex() is is_complex]
            groups += [{"params": own} | ({"fused": not is_complex} if kept in _FUSED else {})] if own else []
        return _OPTIMIZERS[kept](groups, lr=1e-3)


@contextmanager
def _without_values() -> Iterator[None]:
    """Turns the error of an op that reads values into an `OpFault` that says so."""
    try:
        yield
    except (OpFault, *_LOOKS) as fault:
        if isinstance(fault, OpFault) and not isinstance(fault.__cause__, _LOOKS):
            raise
        raise OpFault(
            "a dry run cannot run this model: it reads values of tensors, and a dry run has shapes only",
            where=fault.where if isinstance(fault, OpFault) else None,
            hint="leave out the dry run; the estimate of memory needs no values",
        ) from fault


@dataclass(frozen=True)
class _Empty:
    """A captured model with fake constants."""

    graph: ModelGraph
    constants: Mapping[str, torch.Tensor]
    graph_for: Callable[[int], fx.Graph]


def _in_type(graph_for: Callable[[int], fx.Graph], own: torch.dtype, num_rows: int) -> fx.Graph:
    """A captured program in the half-precision type of a rank, where each has its own."""
    captured, stated = graph_for(num_rows), getattr(torch, HALF)
    if own is stated:
        return captured
    made = fx.Graph()
    made.output(made.graph_copy(captured, {}))
    for node in made.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda each: own if each is stated else each)
    return made


@dataclass(frozen=True)
class _Following(Watch):
    """Tells `LiveBytes` which action runs."""

    live: LiveBytes = field(compare=False)

    def begin(self, action: Action) -> None:
        self.live.action = str(action)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        self.live.is_elsewhere = True
        yield
        self.live.is_elsewhere = False

    def resized(self, tensor: torch.Tensor) -> None:
        self.live.measure(tensor)


def _batch(model: ModelGraph, num_rows: int) -> BatchView:
    """A fake global batch."""
    specs = {op.name: op.outputs[0] for op in model.ops if op.kind == "input" and op.outputs}
    leaves = {name: torch.empty(spec.shape_at(num_rows), dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    return BatchView(leaves, frozenset(name for name, spec in specs.items() if spec.has_rows), num_rows, ((0, num_rows),))


def _step(runtime: Runtime, state: EngineState, batch: BatchView) -> None:
    """One training step, except that the loss, which has no value, is not read."""
    step = runtime.train(batch, (state.step_number,))
    if runtime.clipping is not None:
        runtime.clipping.clip()
    loss = step.account.loss(runtime.totals(step))
    runtime.settle("train", batch.num_rows)
    runtime.watch.begin(Action(Kind.STEP))
    state.advance(loss)
    runtime.publish()


BLOCK_BYTES = 512
"""Granularity of the CUDA caching allocator."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors made while it is active in this thread, except those on the meta device.

    A storage counts from the op that makes it until nobody refers to it. Temporary memory inside an op is not seen.

    Args:
        block_bytes: every storage takes a multiple of this.

    Attributes:
        live: current bytes.
        peak: the most at once.
        action: what is being done; set from outside.
        is_elsewhere: whether new tensors are in other memory, and not counted; set from outside.
        peak_action, peak_op: the action, and the operator that had just run, or ``gathering weights``, at the peak.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.action = self.peak_action = self.peak_op = ""
        self.is_elsewhere = False
        self._block_bytes = block_bytes
        self._known: dict[int, int] = {}

    def start_anew(self) -> int:
        """Resets the peak; returns the live bytes."""
        self.peak = self.live
        return self.live

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stops counting a tensor that is in other memory."""
        self._count(tensor.untyped_storage()._cdata, 0)

    def measure(self, tensor: torch.Tensor) -> None:
        """Updates the size of a tensor's storage, which was resized without an op."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            self._count(storage._cdata, self._blocks(storage.nbytes()))
            self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, 0 if tensor.is_meta else tensor.untyped_storage().nbytes())
        self._look(str(func))
        return result

    def _look(self, op: str = "gathering weights") -> None:
        if self.live > self.peak:
            self.peak, self.peak_action, self.peak_op = self.live, self.action, op

    def _blocks(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes

    def _count(self, number: int, num_bytes: int) -> None:
        self.live += num_bytes - self._known.get(number, 0)
        self._known[number] = num_bytes

    def _meet(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known:
            return
        self._count(number, 0 if self.is_elsewhere else self._blocks(num_bytes))
        weakref.finalize(storage, self._forget, number)

    def _forget(self, number: int) -> None:
        self.live -= self._known.pop(number, 0)


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        peaks: per rank that was run, all devices that it stands for, its own first, and its peak.
    """

    peaks: tuple[tuple[tuple[str, ...], Peak], ...]

    @cached_property
    def of(self) -> Mapping[str, Peak]:
        """The peak of each device."""
        return {name: peak for devices, peak in self.peaks for name in devices}

    @property
    def num_run(self) -> int:
        """Ranks that were run."""
        return len(self.peaks)


def dry_run(plan: Plan, captured: Captured, config: Config) -> DryRun:
    """Runs two steps of each distinct rank of a plan, and returns the memory of the second.

    Operators run for their shapes only, as on the CPU; a model of any size takes next to no memory. Temporary memory inside
    operators and the batch are not counted.

    Args:
        plan: verified.
        captured: the model in training.
        config: settings.

    Raises:
        ConfigError: this process is a rank among others, no known optimizer keeps as many tensors as the plan says, or gradients are
            sparse.
        OpFault: an op of the model depends on the values of tensors.
    """
    if any(state.gradient is not None and state.gradient.is_sparse for state in plan.parameter_states):
        raise ConfigError(
            "a dry run cannot tell which rows a sparse gradient has (an embedding has sparse=True), because its tensors have no values",
            hint="leave out the dry run; the estimate counts these gradients by the lookups of the example's batch",
        )
    holdings = Holdings.of(plan, captured.graph, discover_if_sharded(plan, captured.graph))
    ranks = DryRank(plan, schedules_of(plan), holdings, captured, config)
    return DryRun(tuple((devices, ranks.peak(plan.rank_of[devices[0]])) for devices in alike_devices(plan)))


def alike_devices(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The devices of a plan, grouped by equal places in identical replicas (equal pipelines, stages and rows), by their first ranks."""
    found: dict[tuple[Hashable, int, int], list[str]] = {}
    for replica, rows in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        groups = (map(plan.rank_of.__getitem__, group) for stage in replica.stages for group in stage.groups)
        form: Hashable = _form(replica, tuple(stop - start for start, stop in rows)), tuple(map(plan.are_unlike, groups))
        if any(state.kept.sharding == "owners" for state in plan.parameter_states):  # each keeps a different part
            form = form, replica.index
        for rank, stage in enumerate(replica.first_stages):
            for position, device in enumerate(stage.virtual_device.devices):
                found.setdefault((form, rank, position), []).append(device)
    return tuple(tuple(devices) for devices in found.values())


def _form(replica: Replica, rows: tuple[int, ...]) -> Hashable:
    """All of a replica that its program depends on, without the names of its devices; `rows`: of its micro-batches."""
    stages = tuple(
        (stage.ops, len(stage.virtual_device.devices), stage.shares, stage.parameters, stage.split, stage.shards, stage.program)
        for stage in replica.stages
    )
    return rows, replica.pipeline, stages, replica.edges
