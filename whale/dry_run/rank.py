"""One rank's steps on tensors without contents: the runtime's own program, its messages to peers that are not there, its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from whale.comm import World
from whale.comm.imagined import imagined_world
from whale.config import Config
from whale.dry_run.storages import BLOCK_BYTES, LiveBytes
from whale.errors import ConfigError, OpFault
from whale.ir.graph import ModelGraph
from whale.ir.plan import TRAINED, Plan
from whale.ir.schedule import Action, Kind, Schedule
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.roster import Roster
from whale.runtime.program.captured import Captured
from whale.runtime.program.watch import Watch
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings

NUM_STEPS = 2
"""The first makes the optimizer's state and the programs; the last is looked at."""

_LOOKS = (DataDependentOutputException, DynamicOutputShapeException)
"""What tensors without contents raise where their values are asked for."""

_OPTIMIZERS: Mapping[int, Callable[..., torch.optim.Optimizer]] = {
    0: torch.optim.SGD,
    1: partial(torch.optim.SGD, momentum=0.9),
    2: partial(torch.optim.AdamW, fused=True),
    3: partial(torch.optim.AdamW, fused=True, amsgrad=True),
}
"""By the number of tensors that an optimizer keeps for each parameter, one that does."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a rank had in a step.

    Attributes:
        num_bytes: of all tensors that were there.
        held_bytes: of those that were there when it began: parameters, optimizer state, buckets of gradients that several ranks sum.
        action: that it was in.
        op: the operator that had just run.
    """

    num_bytes: int
    held_bytes: int
    action: str
    op: str


@dataclass(frozen=True)
class DryRank:
    """Runs the ranks of a plan without memory for their tensors, one at a time.

    Attributes:
        plan: verified.
        schedules: per replica, with communication.
        holdings: who holds which part of what.
        captured: the model in training.
        config: settings.
    """

    plan: Plan
    schedules: tuple[Schedule, ...]
    holdings: Holdings
    captured: Captured
    config: Config
    _fakes: FakeTensorMode = field(default_factory=FakeTensorMode)

    def peak(self, rank: int) -> Peak:
        """The memory of a rank of the plan in a step after the first.

        Raises:
            ConfigError: no optimizer is known that keeps as many tensors as the plan says.
            OpFault: an op of the model depends on the values of tensors.
        """
        live = LiveBytes(BLOCK_BYTES)
        with _without_values(), imagined_world(rank, len(self.plan.devices)) as world, self._fakes:
            batch = _batch(self.captured.graph, self.plan.planned_rows)  # lies where the data comes from, and is not counted
            with live:
                runtime, state = self._start(world, _Following(live))
                try:
                    for _ in range(NUM_STEPS):
                        state.forget_gradients()
                        held = live.start_anew()
                        _step(runtime, state, batch)
                finally:
                    runtime.close()
        return Peak(live.peak, held, live.peak_action, live.peak_op)

    def _start(self, world: World, watch: Watch) -> tuple[Runtime, EngineState]:
        roster = Roster(self.plan, world, tuple(range(world.size)))
        state = EngineState({name: self._tensor(name, world.rank) for name in roster.owned})
        if state.parameters:
            state.optimizer = self._optimizer(list(state.parameters.values()))
        constants = {name: torch.empty_like(value, device=world.device) for name, value in self.captured.constants.items()}
        captured = _Empty(self.captured.graph, constants, self.captured.graph_for)
        runtime = Runtime(
            roster=roster,
            schedules=self.schedules,
            holdings=self.holdings,
            captured=captured,
            state=state,
            config=self.config,
            watch=watch,
        )
        return runtime, state

    def _tensor(self, name: str, rank: int) -> torch.Tensor:
        """What a rank holds of a parameter or buffer."""
        parameter = self.captured.graph.parameter_by_name[name]
        shape = parameter.spec.shape
        if self.holdings.is_sharded(name):
            shape = self.holdings.shardings.space(name).shape(self.holdings.held(name, rank))
        value = torch.empty(shape, dtype=getattr(torch, parameter.spec.dtype))
        return nn.Parameter(value, requires_grad=parameter.trainable) if parameter.kind == "parameter" else value

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept = next(state.num_optimizer_tensors for state in self.plan.parameter_states if state.parameters == TRAINED)
        if kept not in _OPTIMIZERS:
            raise ConfigError(
                f"a dry run knows optimizers that keep {min(_OPTIMIZERS)} to {max(_OPTIMIZERS)} tensors for each parameter "
                f"(memory.optimizer_states: {kept})",
                hint=f"set memory.optimizer_states to {min(_OPTIMIZERS)}..{max(_OPTIMIZERS)}, or leave out the dry run",
            )
        return _OPTIMIZERS[kept](parameters, lr=1e-3)


@contextmanager
def _without_values() -> Iterator[None]:
    """Says of an op that looks at values that there are none."""
    try:
        yield
    except (OpFault, *_LOOKS) as fault:
        if isinstance(fault, OpFault) and not isinstance(fault.__cause__, _LOOKS):
            raise
        raise OpFault(
            "a dry run has shapes and no values, and the model looks at some",
            where=fault.where if isinstance(fault, OpFault) else None,
            hint="leave out the dry run: what the estimate says of the memory does not depend on them",
        ) from fault


@dataclass(frozen=True)
class _Empty:
    """A captured model whose constants have no contents."""

    graph: ModelGraph
    constants: Mapping[str, torch.Tensor]
    graph_for: Callable[[int], fx.Graph]


@dataclass(frozen=True)
class _Following(Watch):
    """Tells the count of memory which action goes on."""

    live: LiveBytes = field(compare=False)

    def begin(self, action: Action) -> None:
        self.live.action = str(action)


def _batch(model: ModelGraph, num_rows: int) -> BatchView:
    """A global batch without contents."""
    specs = {op.name: op.outputs[0] for op in model.ops if op.kind == "input" and op.outputs}
    leaves = {name: torch.empty(spec.shape_at(num_rows), dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    return BatchView(leaves, frozenset(name for name, spec in specs.items() if spec.has_rows), num_rows, ((0, num_rows),))


def _step(runtime: Runtime, state: EngineState, batch: BatchView) -> None:
    """One step as in training, but for looks at the loss, which has no value here."""
    step = runtime.train(batch, state.step_number)
    if runtime.clipping is not None:
        runtime.clipping.clip()
    loss = step.account.loss(runtime.totals(step))
    runtime.settle("train", batch.num_rows)
    runtime.watch.begin(Action(Kind.STEP))
    state.advance(loss)
