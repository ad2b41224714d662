"""The loss of the global batch from its pieces: weights first, seeds for backward, one sum at the end.

    loss = sum over terms k of  c_k x (sum of S_k over all pieces) / W_k,    W_k = sum of weights over all pieces

If W_k depends on the batch alone it is known before the forward pass, so backward is seeded with c_k / W_k and every
gradient is exact. A weight that depends on the parameters is known only at the end: backward is seeded with
c_k / W0, W0 the number of rows, and the gradients are multiplied by W0 / W once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from whale.errors import CaptureError
from whale.ir.graph import NUM_ROWS, LossTerm, ModelGraph
from whale.ir.writes import Reads
from whale.runtime.execute.batch import BatchView
from whale.runtime.program.lowering import StageProgram, lower

Scale = float | torch.Tensor
"""A factor on gradients, known on the host or on the device alone."""


@dataclass(frozen=True)
class WeightProgram:
    """Computes the weights that depend on the batch alone."""

    by_rows: Mapping[int, StageProgram]  # per term whose weight is a function of the number of rows, its program
    measured: tuple[int, ...]  # terms whose weight must be computed from the batch
    programs: tuple[StageProgram, ...]  # of the measured terms

    def at(self, num_rows: int) -> dict[int, float]:
        """The weights that follow from the number of rows."""
        return {index: float(program.module(*([num_rows] * len(program.inputs)))[0]) for index, program in self.by_rows.items()}

    def measure(
        self, position: int, batch: BatchView, rows: Sequence[tuple[int, int]], tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """The sum of one measured weight over some row intervals: 0-dim float64."""
        program, total = self.programs[position], None
        for start, stop in rows:
            arguments: list[object] = []
            for kind, key in zip(program.kinds, program.keys, strict=True):
                if kind == "input":
                    arguments.append(stop - start if key == NUM_ROWS else batch.rows_on(device, key, start, stop))
                else:
                    arguments.append(tensors[key])
            own = program.module(*arguments)[0]
            total = own.double() if total is None else total + own
        return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def weight_program(model: ModelGraph, graph: torch.fx.Graph, device: torch.device) -> WeightProgram:
    """Sorts the loss terms' weights by how they are known.
    Raises CaptureError if one of several terms has a weight that depends on the parameters.
    """
    by_rows: list[int] = []
    measured: list[int] = []
    for index, term in enumerate(model.loss):
        if term.weight is None:
            continue
        if not term.weight_from_inputs:
            if not term.metric and sum(not each.metric for each in model.loss) > 1:
                raise CaptureError(
                    "the weight of a loss term depends on the parameters, which a loss of several terms does not support",
                    where=term.where,
                    hint="return one (sum, weight) pair, or compute the weight from the batch",
                )
        elif not model.by_name[term.weight].outputs:
            by_rows.append(index)
        elif not term.metric:  # no gradient waits for the weight of a metric
            measured.append(index)

    def computing(index: int, device: torch.device) -> StageProgram:
        name = model.loss[index].weight
        assert name is not None
        return lower(graph, model, Reads(model).ancestors([name]), (), [name], device)

    numbers = {index: computing(index, torch.device("cpu")) for index in by_rows}
    assert all(set(program.inputs) <= {NUM_ROWS} for program in numbers.values())
    return WeightProgram(numbers, tuple(measured), tuple(_in_float64(computing(index, device)) for index in measured))


def _in_float64(program: StageProgram) -> StageProgram:
    """Makes a program that ends in a count (a sum of integers) return float64, so that no cast follows it."""
    ((made,),) = (node.args[0] for node in program.module.graph.find_nodes(op="output"))
    value = made.meta.get("val")
    is_count = made.target is torch.ops.aten.sum.default and isinstance(value, torch.Tensor) and value.dtype is torch.int64
    if is_count and not made.kwargs:
        made.kwargs = {"dtype": torch.float64}
        program.module.recompile()
    return program


@dataclass(frozen=True)
class Totals:
    """Per term its sum and its weight, of one rank or of all."""

    sums: Sequence[torch.Tensor | None]  # 0-dim; None for a term that is not counted here
    weights: Sequence[torch.Tensor | float]

    @staticmethod
    def of(vector: torch.Tensor) -> Totals:
        """Of the sum of all ranks' vectors, which may be in flight."""
        sums, weights = vector.view(2, -1).unbind()
        return Totals(sums.unbind(), weights.unbind())


def whole_divisor(term: LossTerm, weight: torch.Tensor) -> torch.Tensor:
    """The divisor of a term over the global batch, from the sum of its weights."""
    divisor = weight + term.offset if term.offset else weight
    return divisor if term.minimum is None else divisor.clamp(min=term.minimum)


class LossAccount:
    """Sums and weights of one step on this rank.

    Args:
        terms: of the loss.
        num_rows: rows of the global batch.
        by_rows: global weights that follow from the rows, by term: known on every rank.
        device: of the sums.
        scale: factor on all gradients; a 0-dim tensor of the device is not read on the host.
        share: of the batch's rows, of the ranks whose gradients are summed: these are divided by it.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        num_rows: int,
        by_rows: Mapping[int, float],
        device: torch.device,
        scale: Scale = 1.0,
        share: float = 1.0,
    ) -> None:
        self.terms, self._scale, self._share = terms, scale, share
        self._by_rows = by_rows
        self._known: dict[int, float | torch.Tensor] = dict(by_rows)
        self._num_rows = num_rows
        self._sums: list[torch.Tensor | None] = [None] * len(terms)
        self._weights: list[torch.Tensor | float] = [0.0] * len(terms)
        self._seeds: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        self._device = device
        self.dtype: torch.dtype = torch.float32

    def know(self, index: int, weight: torch.Tensor, *, reports: bool) -> None:
        """Sets a term's global weight before the backward.

        Args:
            weight: of the whole batch.
            reports: whether this rank reports it to the others.
        """
        self._known[index] = whole_divisor(self.terms[index], weight)
        if reports:
            self._weights[index] = weight

    def divisor(self, index: int) -> float | torch.Tensor:
        """The divisor of a term's sum for backward: its global weight, or the expected one."""
        if self.terms[index].weight is None:
            return 1.0
        return self._known.get(index, float(self._num_rows))

    def seed(self, index: int, total: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss with respect to a piece's sum: one tensor for all micro-batches."""
        key = index, total.dtype, total.device
        if key not in self._seeds:
            self._seeds[key] = self._seed(index, total)
        return self._seeds[key]

    def _seed(self, index: int, total: torch.Tensor) -> torch.Tensor:
        divisor, coefficient = self.divisor(index), self.terms[index].coefficient / self._share
        if isinstance(self._scale, torch.Tensor):
            factor = coefficient / divisor if not isinstance(divisor, torch.Tensor) else divisor.to(total.device).reciprocal() * coefficient
            return torch.mul(self._scale.to(total.device), factor, out=torch.empty((), dtype=total.dtype, device=total.device))
        coefficient *= self._scale
        if not isinstance(divisor, torch.Tensor):
            return torch.full((), coefficient / divisor, dtype=total.dtype, device=total.device)
        seed = torch.empty((), dtype=total.dtype, device=total.device)  # into which the kernel rounds what it works out in float64
        divisor = divisor.to(total.device)
        return torch.reciprocal(divisor, out=seed) if coefficient == 1 else torch.mul(divisor.reciprocal(), coefficient, out=seed)

    def add(self, index: int, total: torch.Tensor, weight: object) -> None:
        """Adds a piece's sum, and its weight if that was not known in advance."""
        value = total.detach()
        before = self._sums[index]
        self.dtype = torch.promote_types(self.dtype, value.dtype)
        self._sums[index] = value if before is None else before.double() + value
        if weight is not None and index not in self._known:
            assert isinstance(weight, (torch.Tensor, int, float))
            more, so_far = weight.detach().double() if isinstance(weight, torch.Tensor) else weight, self._weights[index]
            self._weights[index] = more if isinstance(so_far, float) and so_far == 0 else so_far + more

    def vector(self) -> torch.Tensor:
        """This rank's sums, then its weights, float64, to be summed over all ranks."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = [zero if value is None else value.to(self._device).reshape(()) for value in self._sums]
        weights = [self._scalar(value) for value in self._weights]
        return torch.stack(sums + weights)

    def _scalar(self, value: torch.Tensor | float) -> torch.Tensor:
        """0-dim float64, created on the device: a copy from the host would wait for a GPU."""
        if isinstance(value, torch.Tensor):
            return value.to(self._device, torch.float64).reshape(())
        return torch.full((), value, dtype=torch.float64, device=self._device)

    @property
    def own(self) -> Totals:
        """This rank's sums and weights."""
        return Totals(self._sums, self._weights)

    def loss(self, totals: Totals) -> torch.Tensor:
        """The global loss from the totals of all ranks: 0-dim float64."""
        if not self.terms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return self._total(totals, "")

    def metrics(self, totals: Totals) -> dict[str, torch.Tensor]:
        """The metrics of the global batch, likewise."""
        return {name: self._total(totals, name) for name in dict.fromkeys(term.metric for term in self.terms) if name}

    def _total(self, totals: Totals, metric: str) -> torch.Tensor:
        own = (index for index, term in enumerate(self.terms) if term.metric == metric)
        return reduce(add, (self._quotient(index, totals) for index in own))

    def _quotient(self, index: int, totals: Totals) -> torch.Tensor:
        """A term of the loss: 0-dim float64. Each step is a kernel, so that of a plain sum or mean none is for nothing."""
        value, coefficient, weight = totals.sums[index], self.terms[index].coefficient, self._weight(index, totals)
        if value is None:
            value = torch.zeros((), dtype=torch.float64, device=self._device)
        value = value.to(self._device).reshape(())
        if coefficient != 1:
            value = value.double() * coefficient
        if isinstance(weight, torch.Tensor):
            return value / weight  # float64, as the weight is
        return value.double() / weight if weight != 1 else value.double()

    @property
    def is_finite(self) -> bool:
        """Whether all that this rank adds to the loss is finite; waits for the device."""
        own = [index for index, term in enumerate(self.terms) if not term.metric]
        columns = self.vector().view(2, -1).unbind(1)
        return all(bool(columns[index].isfinite().all()) for index in own)

    @property
    def needs_correction(self) -> bool:
        """Whether gradients are scaled, or some weight is known only after the forward pass."""
        return self._is_scaled or self._late is not None

    @property
    def is_scaled_alone(self) -> bool:
        """Whether gradients need the scale taken back, a power of two, and nothing else."""
        return self._is_scaled and self._late is None

    @property
    def _is_scaled(self) -> bool:
        return isinstance(self._scale, torch.Tensor) or self._scale != 1.0

    def correction(self, totals: Totals) -> torch.Tensor:
        """The factor on the gradients: 0-dim."""
        if self._late is None:
            if isinstance(self._scale, torch.Tensor):
                return self._scale.reciprocal()
            return torch.full((), 1 / self._scale, dtype=torch.float64, device=self._device)
        return self._num_rows / self._scale / whole_divisor(self.terms[self._late], self._scalar(totals.weights[self._late]))

    @property
    def _late(self) -> int | None:
        """The term of the loss whose weight is known only after the forward pass."""
        late = (i for i, term in enumerate(self.terms) if term.weight is not None and not term.weight_from_inputs and not term.metric)
        return next(late, None)

    def _weight(self, index: int, totals: Totals) -> float | torch.Tensor:
        if self.terms[index].weight is None:
            return 1.0
        known = self._by_rows.get(index)
        return whole_divisor(self.terms[index], self._scalar(totals.weights[index])) if known is None else known
