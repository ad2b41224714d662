"""Exports the model and its loss as an ATen graph without running it, for any number of rows where that is possible.

For the time of a capture training flags, momenta and parameters of the user's model are changed, and put back.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.proxy import TracerBase
from torch.nn.modules.batchnorm import _BatchNorm

from whale.capture.batch import BatchStructure, Leaf
from whale.capture.exporting.functions import CtcLosses, FunctionCall, collected, numbered
from whale.capture.exporting.reads import ReadAnswer, ReadAnswers, ReadNumbers
from whale.capture.exporting.refusals import DataAccess, as_capture_error, quiet_export, refused_parameters, watched
from whale.capture.exporting.side_effects import AttributeAccess, Once
from whale.capture.exporting.wrapper import Findings, Loss, Mode, Wrapper
from whale.capture.scopes import capturing
from whale.capture.source import inner_frames
from whale.errors import WhaleError
from whale.ir.scope import Scope


@dataclass(frozen=True)
class Traced:
    """An export and what was learnt while it ran.

    Attributes:
        exported: torch's program; its parameters are fake.
        rows: the number of rows that it was exported with.
        dynamic: whether that number is symbolic.
        found: the output's structure, or the constant weight of the loss.
        entered: the scopes entered in `forward`, in order.
        calls: of custom autograd functions, in order.
        ways: what each read of a tensor was told, in order.
        counters: per momentum of a batch normalisation that stands for one over a counter, the counter.
    """

    exported: ExportedProgram
    rows: int
    dynamic: bool
    found: Findings
    entered: tuple[Scope, ...]
    calls: tuple[FunctionCall, ...]
    ways: tuple[ReadAnswer, ...] = ()
    counters: Mapping[float, str] = field(default_factory=dict)


def trace(
    model: nn.Module, loss: Loss | None, structure: BatchStructure, mode: Mode, static: bool, access: AttributeAccess, once: Once
) -> tuple[Traced, Traced | None]:
    """Exports with a symbolic number of rows, or with two fixed ones where the model's code needs a number.

    Args:
        static: export at the example's rows alone.
        access: notes what is read of attributes.
        once: puts back what each call leaves behind.

    Returns:
        The export at the example's rows; and, if rows are not symbolic there, one at twice as many (None if that failed): the two
        tell what grows with the rows.

    Raises:
        WhaleError: the model cannot be captured.
    """
    export = _Export(model, loss, structure, mode, access, once)
    first = export.attempt(structure.example_rows, dynamic=not static)
    if isinstance(first, Traced) and first.dynamic:
        return first, None
    fixed = first if static or isinstance(first, WhaleError) else export.attempt(structure.example_rows, dynamic=False)
    if not isinstance(fixed, Traced):
        error = as_capture_error(fixed, export.ways.last_number)
        raise error.with_traceback(None) from (None if error is fixed else fixed)
    double = export.attempt(2 * structure.example_rows, dynamic=False)
    return fixed, double if isinstance(double, Traced) else None


@dataclass(frozen=True)
class _Export:
    model: nn.Module
    loss: Loss | None
    structure: BatchStructure
    mode: Mode
    access: AttributeAccess
    once: Once
    ways: ReadAnswers = field(default_factory=ReadAnswers)

    def attempt(self, rows: int, dynamic: bool) -> Traced | Exception:
        """An export; the exception where there is none."""
        found, ways = self.ways.find(partial(self._once, rows, dynamic))
        return found if isinstance(found, Exception) else replace(found, ways=ways)

    def _once(self, rows: int, dynamic: bool) -> Traced | Exception:
        try:
            return self._run(rows, dynamic)
        except Exception as error:
            return error

    def _run(self, rows: int, dynamic: bool) -> Traced:
        numbers = ReadNumbers(self.ways.read)
        fake_mode = FakeTensorMode(
            shape_env=numbers,
            allow_non_fake_inputs=True,
            export=True,
        )
        fake = Faker(fake_mode)
        device = next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        leaves = [torch.empty(self._shape(leaf, rows), dtype=leaf.dtype, device=device) for leaf in self.structure.inputs]
        size = Dim("rows", min=2)
        shapes = tuple({0: size} if dynamic and leaf.has_rows else None for leaf in self.structure.inputs)
        with capturing() as scopes, collected() as calls, numbered(), marked_averages(self.model) as counters, over_whole_batch(self.model):
            wrapper = Wrapper(self.model, self.loss, self.structure, self.mode, self.ways, numbers.note, self.access, self.once)
            with self.access.noted(), _surroundings(self.model, self.mode, fake, fake_mode):
                exported = torch.export.export(wrapper, tuple(leaves), strict=False, dynamic_shapes=(shapes,))
        return Traced(exported, rows, dynamic, wrapper.found, tuple(scopes.entered), tuple(calls), counters=counters)

    @staticmethod
    def _shape(leaf: Leaf, rows: int) -> tuple[int, ...]:
        return (rows, *leaf.shape[1:]) if leaf.has_rows else leaf.shape


@contextlib.contextmanager
def _surroundings(model: nn.Module, mode: Mode, fake: Faker, fake_mode: FakeTensorMode) -> Iterator[None]:
    def frames(tracer: object, summary: traceback.StackSummary) -> traceback.StackSummary:
        return inner_frames(summary, str(inspect.getsourcefile(Wrapper)))

    with (
        mock.patch.object(TracerBase, "_filter_traceback_frames", frames),  # torch keeps none of a loss function
        mock.patch.object(decompositions, "one_layer_lstm", _one_layer_lstm),
        training_flags(model, mode),
        fake_tensors(model, fake),
        tracing(TracingContext(fake_mode)),
        torch.fx.traceback.preserve_node_meta(),
        torch.enable_grad(),
        watched(),
        DataAccess(),
        CtcLosses(),
        refused_parameters(fake_mode) if mode == "train" else contextlib.nullcontext(),
        quiet_export(),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),  # a plan may be made elsewhere
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
    ):
        yield


_torchs_lstm: Any = decompositions.one_layer_lstm


def _one_layer_lstm(inp: Tensor, hidden: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What tells the shapes of an LSTM. Up to torch 2.12 its last states have a dimension more than those that it is given."""
    made, states = _torchs_lstm(inp, hidden, *args, **kwargs)
    return made, tuple(state.reshape(given.shape) for state, given in zip(states, hidden, strict=True))


@contextlib.contextmanager
def training_flags(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Sets the modules' training flags as a mode wants them.

    In ``train`` the flags of a model that is in training stay as the user set them: a frozen BatchNorm stays in eval.
    """
    before = {module: module.training for module in model.modules()}
    if mode != "train":
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def marked_averages(model: nn.Module) -> Iterator[Mapping[float, str]]:
    """Sets a mark as the momentum of batch normalisations that average over all batches, whose own is one over their counter.

    They read the counter as a number, which is not known in a capture; `whale.capture.flat.flatten` writes it in the place of the mark.

    Yields:
        Per mark, the name of the counter.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm) and _averages_all(module)}
    marks = {-1.0 - number: name for number, name in enumerate(norms)}
    for mark, name in marks.items():
        norms[name].momentum = mark
    try:
        yield {mark: f"{name}.num_batches_tracked".removeprefix(".") for mark, name in marks.items()}
    finally:
        for norm in norms.values():
            norm.momentum = None


class _OverWholeBatch(nn.SyncBatchNorm):
    """One whose statistics are over the rows that it is called with."""

    forward = _BatchNorm.forward


@contextlib.contextmanager
def over_whole_batch(model: nn.Module) -> Iterator[None]:
    """Has `torch.nn.SyncBatchNorm` take what it is called with, which is the whole batch in a capture, and send nothing."""
    norms = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
    for norm in norms:
        norm.__class__ = _OverWholeBatch
    try:
        yield
    finally:
        for norm in norms:
            norm.__class__ = nn.SyncBatchNorm


def _averages_all(norm: _BatchNorm) -> bool:
    return norm.momentum is None and norm.num_batches_tracked is not None


@contextlib.contextmanager
def fake_tensors(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Puts fake tensors in the place of a model's parameters, buffers and its other tensors on the meta device."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items(), *_meta_attributes(module)]:
                if tensor is not None:
                    replaced.append((module, name, tensor))
                    setattr(module, name, fake(tensor))
        yield
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)


def _meta_attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor) and value.device.type == "meta"]


class Faker:
    """Makes fake tensors of one mode; equal tensors stay equal, and what is on meta becomes fake CPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (self._make(tensor), tensor)  # the original is kept so that its id stays its own
        return self._made[id(tensor)][0]

    def _make(self, tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
