"""Exports the model and its loss as an ATen graph without running it, if possible for any number of rows.

During the capture training flags, momenta and parameters of the user's model are replaced, and restored after it.
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
from whale.capture.exporting.side_effects import AttributeAccess, SideEffects
from whale.capture.exporting.wrapper import Findings, Loss, Mode, Wrapper
from whale.capture.scopes import capturing
from whale.capture.source import inner_frames, line_of_traceback
from whale.errors import CaptureError, WhaleError
from whale.ir.scope import Scope


@dataclass(frozen=True)
class Traced:
    """An export and what was found out while it ran."""

    exported: ExportedProgram  # torch's program; its parameters are fake
    rows: int  # the number of rows that it was exported with; symbolic if `dynamic`
    dynamic: bool
    found: Findings  # the output's structure, or the constant weight of the loss
    entered: tuple[Scope, ...]  # the scopes entered in `forward`, in order
    calls: tuple[FunctionCall, ...]  # of custom autograd functions, in order
    answers: tuple[ReadAnswer, ...] = ()  # the answers to the reads of tensors, in order
    # per mark in place of a batch normalisation's momentum, the counter (`marked_averages`)
    counters: Mapping[float, str] = field(default_factory=dict)


def trace(
    model: nn.Module, loss: Loss | None, structure: BatchStructure, mode: Mode, static: bool, access: AttributeAccess, effects: SideEffects
) -> tuple[Traced, Traced | None]:
    """Exports with a symbolic number of rows, or with two fixed ones if the model's code needs a number.

    Returns:
        The export at the example's rows (always fixed if `static`); and, if rows are not symbolic there, one at twice as many (None if that
        failed): together they show what grows with the rows.
    """
    export = _Export(model, loss, structure, mode, access, effects)
    first = export.attempt(structure.example_rows, dynamic=not static)
    if isinstance(first, Traced) and first.dynamic:
        return first, None
    fixed = first if static or isinstance(first, WhaleError) else export.attempt(structure.example_rows, dynamic=False)
    if not isinstance(fixed, Traced):
        error = as_capture_error(fixed, export.answers.last_number)
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
    effects: SideEffects
    answers: ReadAnswers = field(default_factory=ReadAnswers)

    def attempt(self, rows: int, dynamic: bool) -> Traced | Exception:
        found, answers = self.answers.find(partial(self._try, rows, dynamic))
        return found if isinstance(found, Exception) else replace(found, answers=answers)

    def _try(self, rows: int, dynamic: bool) -> Traced | Exception:
        try:
            return self._run(rows, dynamic)
        except MemoryError as error:  # says nothing of the model: another attempt must not be taken for what it computes
            raise CaptureError(
                f"the model cannot be traced: this process has too little memory ({error or 'MemoryError'})",
                where=line_of_traceback(error.__traceback__),
                hint="nothing is known of whether the model can be captured; free memory, or raise the limit of the process (ulimit -v)",
            ) from None
        except Exception as error:
            return error

    def _run(self, rows: int, dynamic: bool) -> Traced:
        numbers = ReadNumbers(self.answers.read)
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
            wrapper = Wrapper(self.model, self.loss, self.structure, self.mode, self.answers, numbers.note, self.access, self.effects)
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
    """Torch's shape function of an LSTM. Up to torch 2.12 its last states have one dimension more than the given ones."""
    made, states = _torchs_lstm(inp, hidden, *args, **kwargs)
    return made, tuple(state.reshape(given.shape) for state, given in zip(states, hidden, strict=True))


@contextlib.contextmanager
def training_flags(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Sets the modules' training flags for a mode.

    In ``train`` the flags of a model in training mode stay as they are: a frozen BatchNorm stays in eval.
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
    """Marks the momentum of batch normalisations that average over all batches; yields each mark with the name of its counter.

    Their momentum is 1 / counter, unknown in a capture; `whale.capture.flat.flatten` writes it in place of the mark.
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
    """A `SyncBatchNorm` with the statistics of its own input."""

    forward = _BatchNorm.forward


@contextlib.contextmanager
def over_whole_batch(model: nn.Module) -> Iterator[None]:
    """Makes `torch.nn.SyncBatchNorm` use its own input, which is the whole batch in a capture, and communicate nothing."""
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
    """Replaces a model's parameters, buffers and other meta tensors by fake ones."""
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
    """Makes fake tensors of one mode; equal tensors stay equal, and meta tensors become fake CPU ones."""

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
