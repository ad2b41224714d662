"""The executor: runs this rank's actions of any schedule, in order.

Everything that starts a message or a collective is in the schedule, in one order on all ranks: receives start at their POST, before
the computation that precedes their use, and are waited for at their RECV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from whale.comm import Launched
from whale.ir.graph import ModelGraph
from whale.ir.schedule import COMMUNICATION, POSTS, RECEIVES, Action, Kind
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.exchange import Exchange, place_of
from whale.runtime.execute.loss import LossAccount, Totals
from whale.runtime.execute.op_faults import named_ops
from whale.runtime.execute.stage import Flight, StageRunner
from whale.runtime.execute.status import StatusBoard
from whale.runtime.program.randomness import seed_of
from whale.runtime.program.watch import Place, Watch
from whale.runtime.state.gathered import GatheredWeights
from whale.runtime.state.gradient_sync import GradientSync
from whale.sharding.buckets import Visits

_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
_KEEPS = _BACKWARD | {Kind.SEND_FORWARD, Kind.SEND_BACKWARD}


@dataclass(frozen=True)
class ActionOrder:
    """What a rank does in a step."""

    actions: tuple[Action, ...]

    @cached_property
    def named(self) -> tuple[tuple[Action, str], ...]:
        """The actions with their texts."""
        return tuple((action, str(action)) for action in self.actions)

    @cached_property
    def after_forward(self) -> Mapping[int, frozenset[Kind]]:
        """Per stage, the kinds of actions that use a micro-batch after its forward, except receives."""
        found: dict[int, frozenset[Kind]] = {}
        for action in self.actions:
            if action.stage is not None:
                found[action.stage] = found.get(action.stage, frozenset()) | ({action.kind} & _KEEPS)
        return found

    @cached_property
    def recomputed(self) -> frozenset[tuple[int | None, int | None]]:
        """(stage, micro-batch) pairs whose forward is recomputed."""
        return frozenset((action.stage, action.micro_batch) for action in self.actions if action.kind is Kind.RECOMPUTE)

    @cached_property
    def last_backward(self) -> Mapping[int | None, Action]:
        """Per stage, the action after which its gradients are final."""
        return {action.stage: action for action in self.actions if action.kind in _BACKWARD}


@dataclass
class StepState:
    """The state of one step."""

    seed: tuple[int, ...]  # place that random numbers depend on besides micro-batch and stage
    batch: BatchView  # this rank's rows
    micro_batches: Sequence[tuple[int, int]]  # their global row intervals
    account: LossAccount  # sums of the loss
    with_gradients: bool  # whether backward will come
    awaits_weights: bool = False  # whether the weights of the loss come with the agreement, which backward then waits for
    # the totals of the loss over all ranks, in flight after the last forward
    reduction: tuple[Totals, Launched | None] | None = None
    # of the graph itself (``predict``): name, first and last global row, value
    outputs: list[tuple[str, int, int, torch.Tensor]] = field(default_factory=list)


class Executor:
    """Runs the actions of one rank.

    Attributes:
        peak_in_flight: the most micro-batches alive at once in the last run, over the rank's stages.
    """

    def __init__(
        self,
        order: ActionOrder,
        stages: Mapping[int, StageRunner],
        exchange: Exchange,
        model: ModelGraph,
        counted: frozenset[int],  # stages whose loss terms this rank counts: one device of a split group does, though all compute them
        sync: GradientSync | None,  # None without training
        status: StatusBoard,  # shows the current action to other processes
        watch: Watch,  # called when each action begins and ends
        device: torch.device,
        weights: GatheredWeights | None,
        visits: Visits,  # when they are gathered
    ) -> None:
        self._weights, self._visits = weights, visits
        self._gathers = weights is not None and weights.communicates  # then sums start at the SYNC, in one order with gathers
        self._order, self._stages, self._exchange, self._model = order, stages, exchange, model
        self._counted = counted
        self._gates = [stage.gate for stage in stages.values() if stage.gate is not None]
        self._sync, self._status, self._watch, self._device = sync, status, watch, device
        self._flights: dict[tuple[int, int], Flight] = {}
        self._num_in_flight = 0
        self._handlers: dict[Kind, Callable[[StepState, int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
        }
        self.peak_in_flight = 0

    def prepare(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """Makes the programs of all stages for this rank's rows of these micro-batches."""
        self._exchange.begin(micro_batches)
        for stage, runner in self._stages.items():
            for micro_batch in range(len(micro_batches)):
                low, high = self._exchange.local_rows(stage, micro_batch)
                runner.prepare(high - low)

    def run(self, state: StepState, agree: Callable[[], None], reduce: Callable[[], None]) -> None:
        """Runs the actions up to the optimizer's step, which is the caller's.

        Args:
            state: of the step.
            agree: called once: before the first message, before the LOSS, and before the first backward if that needs it. With
                split stages, before their first message while they compute; before everything if stages share a virtual device.
            reduce: called once, at the LOSS.

        Raises:
            RuntimeFault: a peer died or a wait timed out; names the action.
        """
        for runner in self._stages.values():
            runner.buffers.begin()
        self._exchange.begin(state.micro_batches)
        self._flights.clear()
        self.peak_in_flight = self._num_in_flight = 0
        agreed = cache(agree)  # calls it once
        for gate in self._gates:
            gate.close(agreed)
        if self._exchange.passes_locally or self._gathers:
            agreed()
        with nullcontext() if self._weights is None else self._weights.run(self._visits):
            self._walk(state, agreed, reduce)
        if self._sync is not None:
            self._sync.finish()
        self._exchange.finish()

    def _walk(self, state: StepState, agreed: Callable[[], None], reduce: Callable[[], None]) -> None:
        for action, name in self._order.named:
            needs_weights = state.awaits_weights and action.kind is not Kind.FORWARD
            if needs_weights or action.kind in COMMUNICATION:
                agreed()
            self._status.set(name, self._exchange.peers(place_of(action)) if action.kind in RECEIVES else ())
            if action.kind is not Kind.STEP:
                self._watch.begin(action)
            if action.kind is Kind.SYNC and self._sync is not None:
                self._sync.finish_stage(_stage(action))
            elif action.kind is Kind.LOSS:  # after the agreement: a rank that refuses the batch starts no sum
                reduce()
            elif action.kind in POSTS:
                self._exchange.post(place_of(action))
            elif action.kind in RECEIVES:
                self._exchange.wait(place_of(action))
            elif action.kind in self._handlers:
                assert action.stage is not None and action.micro_batch is not None
                self._handlers[action.kind](state, action.stage, action.micro_batch)
            self._watch.end()

    def _visit(self, stage: int, *, backward: bool) -> AbstractContextManager[None]:
        """Around one pass through a stage, for gathered weights."""
        if self._weights is None:
            return nullcontext()
        orders = self._visits.backward if backward else self._visits.forward
        return self._weights.visit(orders.get(stage, ()), backward=backward)

    def _forward(self, state: StepState, stage: int, micro_batch: int) -> None:
        start, _ = state.micro_batches[micro_batch]
        low, high = self._exchange.local_rows(stage, micro_batch)
        received = self._exchange.take(("forward", stage, micro_batch))
        if state.with_gradients:
            for name, value in received.items():
                value.requires_grad_(self._model.by_name[name].requires_grad)
        with named_ops(self._model, start + low, start + high), self._visit(stage, backward=False):
            flight = self._stages[stage].forward(
                high - low,
                lambda name: state.batch.rows_on(self._device, name, start + low, start + high),
                received,
                with_graph=state.with_gradients and (stage, micro_batch) not in self._order.recomputed,
                seed=lambda: seed_of(*state.seed, self._stages[stage].row_group, micro_batch, stage),
            )
        if stage in self._counted:
            self._collect(state, flight, start + low, start + high)
        self._num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._num_in_flight)
        self._exchange.pass_locally(("forward", stage, micro_batch), flight.tensors())
        flight.pending = set(self._order.after_forward[stage])
        if flight.pending:
            self._flights[stage, micro_batch] = flight

    def _collect(self, state: StepState, flight: Flight, start: int, stop: int) -> None:
        for index, term in enumerate(self._model.loss):
            total = flight.outputs.get(term.sum)
            if isinstance(total, torch.Tensor):
                state.account.add(index, total, None if term.weight is None else flight.outputs.get(term.weight))
        for name in self._model.outputs:
            value = flight.outputs.get(name)
            if isinstance(value, torch.Tensor):
                state.outputs.append((name, start, stop, value.detach()))

    def _send_forward(self, state: StepState, stage: int, micro_batch: int) -> None:
        self._exchange.send(("forward", stage, micro_batch), self._flights[stage, micro_batch].tensors())
        self._done(stage, micro_batch, Kind.SEND_FORWARD)

    def _recompute(self, state: StepState, stage: int, micro_batch: int) -> None:
        with self._visit(stage, backward=False):
            self._stages[stage].recompute(self._flights[stage, micro_batch])

    def _backward(self, state: StepState, stage: int, micro_batch: int) -> None:
        weights_wait = Kind.BACKWARD_WEIGHT in self._order.after_forward[stage]
        sums_early = not weights_wait and not self._gathers
        if self._sync is not None and sums_early and self._order.last_backward[stage] == Action(Kind.BACKWARD, stage, micro_batch):
            self._sync.arm(stage)
        self._differentiate(state, stage, micro_batch)
        self._flights[stage, micro_batch].weights.run()
        self._num_in_flight -= 1
        self._done(stage, micro_batch, Kind.BACKWARD)

    def _backward_input(self, state: StepState, stage: int, micro_batch: int) -> None:
        self._differentiate(state, stage, micro_batch)
        self._done(stage, micro_batch, Kind.BACKWARD_INPUT)

    def _backward_weight(self, state: StepState, stage: int, micro_batch: int) -> None:
        queue, is_final = self._flights[stage, micro_batch].weights, None
        if (
            self._sync is not None
            and not self._gathers
            and self._order.last_backward[stage] == Action(Kind.BACKWARD_WEIGHT, stage, micro_batch)
        ):
            self._sync.settle(stage, queue.parameters())
            is_final = self._sync.is_final
        queue.run(is_final)
        self._num_in_flight -= 1
        self._done(stage, micro_batch, Kind.BACKWARD_WEIGHT)

    def _differentiate(self, state: StepState, stage: int, micro_batch: int) -> None:
        flight = self._flights[stage, micro_batch]
        place: Place = ("backward", stage, micro_batch)
        flight.gradients = self._exchange.take(place)
        seeds = {
            term.sum: state.account.seed(index, total)
            for index, term in enumerate(self._model.loss)
            if not term.metric and isinstance(total := flight.outputs.get(term.sum), torch.Tensor)
        }
        with self._visit(stage, backward=True):
            self._stages[stage].backward(flight, seeds)
        self._exchange.pass_locally(place, flight.returned)

    def _send_backward(self, state: StepState, stage: int, micro_batch: int) -> None:
        self._exchange.send(("backward", stage, micro_batch), self._flights[stage, micro_batch].returned)
        self._done(stage, micro_batch, Kind.SEND_BACKWARD)

    def _done(self, stage: int, micro_batch: int, kind: Kind) -> None:
        """Frees a micro-batch after its last action."""
        flight = self._flights[stage, micro_batch]
        flight.pending.discard(kind)
        if flight.pending == {Kind.BACKWARD_WEIGHT}:
            flight.returned = {}
        if not flight.pending:
            del self._flights[stage, micro_batch]


def _stage(action: Action) -> int:
    assert action.stage is not None
    return action.stage
