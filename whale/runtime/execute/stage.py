"""One stage on one rank: its program, its tensors, and the forward, recompute and backward of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from whale.deferred import WeightQueue
from whale.ir.graph import NUM_ROWS
from whale.ir.schedule import Kind
from whale.runtime.program.lowering import AWAITED, QUEUE, TRANSIENT, StageProgram
from whale.runtime.program.randomness import seeded
from whale.runtime.program.shard import GROUP, Gate, Group
from whale.runtime.state.gathered import GatheredWeights
from whale.runtime.state.publishing import Publishing
from whale.runtime.state.updates import StepBuffers

ProgramSource = Callable[[int], StageProgram]
"""The stage's program for a number of rows."""

Keeping = Callable[[Sequence[object]], AbstractContextManager[None]]
"""A context around a forward pass with these arguments that stores what it saves for backward."""


@dataclass
class Flight:
    """A micro-batch between its forward and its backward on one stage."""

    num_rows: int  # on this device
    arguments: list[object]  # of the program
    received: dict[str, torch.Tensor]  # leaf tensors from earlier stages, by op name
    outputs: dict[str, object]  # of the program, by op name
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the outputs, from later stages
    returned: dict[str, torch.Tensor] = field(default_factory=dict)  # gradients of the received tensors, once backward has made them
    seed: int | None = None  # of its random numbers; None for a stage without any
    weights: WeightQueue = field(default_factory=WeightQueue)  # weight gradients that wait for W
    pending: set[Kind] = field(default_factory=set)  # kinds of actions after which it can be freed

    def tensors(self) -> dict[str, torch.Tensor]:
        """The outputs that are tensors."""
        return {name: value for name, value in self.outputs.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a program."""

    fixed: tuple[object, ...]  # what each has in all micro-batches; None for the others
    others: tuple[tuple[int, str, str], ...]  # place, kind and key of those
    written: tuple[tuple[int, str], ...]  # place and key of the buffers that it writes for the step


class StageRunner:
    """Runs micro-batches through one stage."""

    def __init__(
        self,
        source: ProgramSource,  # the stage's program per number of rows
        tensors: Mapping[str, torch.Tensor],  # parameters, buffers (by canonical name) and constants (by op name) that it holds
        device: torch.device,
        buffers: StepBuffers,  # those that its program writes, without running statistics
        row_group: int = 0,  # its group of equal rows in the stage
        split_group: Group | None = None,  # its split group, if the stage is split
        weights: GatheredWeights | None = None,
        publishing: Publishing | None = None,  # waits for weights that others keep, if deferred
        keeping: Keeping | None = None,  # stores what forward saves; None for the device
    ) -> None:
        self.buffers, self.row_group, self._keeping = buffers, row_group, keeping
        self._split_group, self._weights, self._publishing = split_group, weights, publishing
        self._source = source
        self._tensors = tensors
        self._device = device
        self._known: dict[torch.nn.Module, _Arguments] = {}

    @property
    def gate(self) -> Gate | None:
        """The gate before the first message inside its computation, if it has any."""
        return self._split_group.gate if self._split_group is not None else None

    def prepare(self, num_rows: int) -> None:
        """Makes the program for a number of rows."""
        self._source(num_rows)

    def forward(
        self,
        num_rows: int,  # rows that this device takes
        inputs: Callable[[str], torch.Tensor],  # gives this device's rows of a batch input, by op name
        received: dict[str, torch.Tensor],  # tensors from earlier stages, by op name
        *,
        with_graph: bool,  # keep what backward needs
        seed: Callable[[], int],  # gives the seed of this place; called only if random numbers are drawn
    ) -> Flight:
        """Computes a micro-batch."""
        program = self._source(num_rows)
        flight = Flight(num_rows, [], received, {}, seed=seed() if program.is_random else None)
        known = self._arguments(program)
        flight.arguments = arguments = list(known.fixed)
        for place, kind, key in known.others:
            arguments[place] = self._argument(kind, key, flight, inputs)
        with nullcontext() if self._keeping is None or not with_graph else self._keeping(arguments):
            self._run(flight, program, arguments, with_graph)
        for place, key in known.written:
            written = arguments[place]
            assert isinstance(written, torch.Tensor)
            self.buffers.add(key, written, num_rows)
        return flight

    def recompute(self, flight: Flight) -> None:
        """Reruns the forward of a micro-batch with a graph, on the same inputs, without writing buffers."""
        program = self._source(flight.num_rows)
        mutated = set(program.mutated)
        arguments = list(flight.arguments)
        for position, (kind, key) in enumerate(zip(program.kinds, program.keys, strict=True)):
            if kind == "buffer" and key in self.buffers:
                arguments[position] = self.buffers.fresh(key)
            elif kind == "buffer" and key in mutated:
                arguments[position] = arguments[position].clone()  # type: ignore[attr-defined]
        self._run(flight, program, arguments, True)

    def backward(self, flight: Flight, loss_gradients: Mapping[str, torch.Tensor]) -> None:
        """Accumulates the gradients of the received tensors, and of the parameters that do not wait for W.

        Args:
            flight: the micro-batch; its `gradients` hold what later stages sent back.
            loss_gradients: seeds of the loss terms computed here.
        """
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for name, value in flight.outputs.items():
            gradient = loss_gradients.get(name, flight.gradients.get(name))
            if gradient is not None and isinstance(value, torch.Tensor) and value.requires_grad:
                roots.append(value)
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        needed = {name: value for name, value in flight.received.items() if value.requires_grad}
        # zeros where the loss does not depend on one
        flight.returned = {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in needed.items()}
        for done in (flight.outputs, flight.arguments, flight.received, flight.gradients):  # W may come much later
            done.clear()

    def _run(self, flight: Flight, program: StageProgram, arguments: Sequence[object], with_graph: bool) -> None:
        with torch.set_grad_enabled(with_graph), nullcontext() if flight.seed is None else seeded(flight.seed, self._device):
            values = program.module.forward(*arguments)
        flight.outputs = dict(zip(program.outputs, values, strict=True))

    def _arguments(self, program: StageProgram) -> _Arguments:
        if program.module not in self._known:
            fixed = {TRANSIENT: self._weights, AWAITED: self._publishing, GROUP: self._split_group}
            named = list(enumerate(zip(program.kinds, program.keys, strict=True)))
            written = tuple((place, key) for place, (kind, key) in named if kind == "buffer" and key in self.buffers)
            changing = {place for place, (kind, _) in named if kind in ("received", QUEUE, "input")} | {place for place, _ in written}
            self._known[program.module] = _Arguments(
                tuple(None if place in changing else fixed[kind] if kind in fixed else self._tensors[key] for place, (kind, key) in named),
                tuple((place, kind, key) for place, (kind, key) in named if place in changing),
                written,
            )
        return self._known[program.module]

    def _argument(self, kind: str, key: str, flight: Flight, inputs: Callable[[str], torch.Tensor]) -> object:
        if kind == "received":
            return flight.received[key]
        if kind == QUEUE:
            return flight.weights
        if kind == "input":
            return flight.num_rows if key == NUM_ROWS else inputs(key)
        return self.buffers.fresh(key)
