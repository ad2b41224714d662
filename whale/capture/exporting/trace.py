"""Exports the model and its loss as an ATen graph without running it, for any number of rows where that is possible."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch
import torch.fx.traceback
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.proxy import TracerBase

from whale.capture.batch import BatchStructure, Leaf
from whale.capture.exporting.attribute_access import AttributeAccess
from whale.capture.exporting.ctc import CtcLosses
from whale.capture.exporting.data_access import DataAccess
from whale.capture.exporting.errors import as_capture_error, quiet_export, refused_parameters, watched
from whale.capture.exporting.functions import FunctionCall, collected
from whale.capture.exporting.modes import Faker, fake_tensors, marked_averages, training_flags
from whale.capture.exporting.numbers import ReadNumbers
from whale.capture.exporting.once import Once
from whale.capture.exporting.regions import numbered
from whale.capture.exporting.ways import Way, Ways
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
    ways: tuple[Way, ...] = ()
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
    ways: Ways = field(default_factory=Ways)

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
        with capturing() as scopes, collected() as calls, numbered(), marked_averages(self.model) as counters:
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
