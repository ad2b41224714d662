"""The module that is exported: the batch's leaves in, the loss or the leaves of the model's output out."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.capture.batch import BatchStructure, is_record, plain
from whale.capture.exporting.reads import KnownValues, ReadAnswers
from whale.capture.exporting.side_effects import AttributeAccess, KeptTensor, Registrations, SideEffects, forget_new, fresh, left_in
from whale.capture.program import ObjectStructure, OutputStructure
from whale.capture.source import line_of_function
from whale.errors import BatchError, CaptureError
from whale.ir.scope import SourceLine

Mode = Literal["train", "eval", "predict", "eval_predict"]
Loss = Callable[[Any, Any], Any]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass
class Findings:
    outputs: OutputStructure | None = None  # structure of the model's output, in modes ``predict`` and ``eval_predict``
    num_of_loss: int = 0  # results that are the loss: 2 for a sum and a weight, else 1; 0 if none is returned. They come first.
    metrics: tuple[str, ...] = ()  # names of the results that come next
    own_loss: int | None = None  # the index of the output tensor that is that loss; None if none is
    weight: float | None = None  # constant weight of a (sum, weight) pair; it is no result
    kept: tuple[KeptTensor, ...] = ()  # what `forward` makes for its next call: the last results, to see what they are made of
    handed_on: tuple[str, ...] = ()  # plain attributes that `forward` leaves to its next call


class Wrapper(nn.Module):
    """Calls the model on a batch, then the loss; `found` is of the last call (export would undo a plain attribute)."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        structure: BatchStructure,
        mode: Mode,
        answers: ReadAnswers,
        read: Callable[[object, Tensor], None],
        access: AttributeAccess,
        effects: SideEffects,
    ) -> None:
        super().__init__()
        self.model = model
        self.found = Findings()
        self._loss = (loss,)  # in a tuple, so that a loss that is a module is not registered
        self._structure = structure
        self._mode = mode
        self._answers, self._read, self._access, self._effects = answers, read, access, effects

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        before = [(module, name, held) for module in self.model.modules() for name, held in module._buffers.items() if held is not None]
        modules = fresh(self.model)
        registrations = Registrations(modules)
        with self._effects.undone() as held_before, registrations.noted():
            self._access.begin()
            try:
                with KnownValues(self._answers.op, self._read) as known, self._answers.asked(known.knows):
                    results = self._results(list(tensors))
                    for module, name, held in before:
                        _keep_written(module, name, held)
                    has_new_hooks = any(module.new_hooks for module in modules)  # which a flag may record: they go with the call
                    found, tables = self._access.left(modules)
                    found += tuple(left_in(held_before))
                    left = tuple(each for each in found if not (has_new_hooks and isinstance(each.value, bool)))
                    last = (KeptTensor(each.name, None, tensor, False, True, each.owner, each) for each in left for tensor in each.tensors)
                    self.found.kept = (*registrations.checked(self.model), *self._access.made(), *last)
                    self._effects.note(left, tables)
                self.found.handed_on = self._access.handed_on(known.knows, has_new_hooks=has_new_hooks)
            finally:
                forget_new(modules)  # another run may follow where this one failed
        return (*results, *(each.tensor for each in self.found.kept))

    def _results(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        batch = self._structure.unflatten(tensors)
        args, kwargs = call_arguments(self.model, batch)
        output = self.model(*args, **kwargs)
        loss = self._loss[0]
        outputs: list[Tensor] = []
        if self._mode in ("predict", "eval_predict"):
            self.found.outputs = _structure(output, outputs, line_of_function(self.model.forward))
            if self._mode == "predict" and (loss is not None or not _has_loss(output)):
                return tuple(outputs)
        value = _own_loss(output) if loss is None else loss(output, batch)
        value, metrics = _without_metrics(value, line_of_function(loss))
        self.found.metrics = tuple(metrics)
        self.found.own_loss = next((place for place, tensor in enumerate(outputs) if tensor is value), None)
        total, weight = _checked_loss(value, line_of_function(loss))
        self.found.weight = weight if isinstance(weight, float) else None
        results = (total,) if weight is None or isinstance(weight, float) else (total, weight)
        self.found.num_of_loss = 1 if weight is None else 2
        return (*results, *metrics.values(), *(tensor for tensor in outputs if tensor is not value))


def _keep_written(module: nn.Module, name: str, held: Tensor) -> None:
    """Copies a tensor that `forward` assigned to a buffer's name into the buffer: a captured model keeps its tensors."""
    now = module._buffers.get(name)
    if now is held or (now is not None and now.shape != held.shape and name in module._non_persistent_buffers_set):
        return  # a table that grows is registered anew in each capture
    if now is None or now.shape != held.shape or now.dtype != held.dtype:
        shown = "nothing" if now is None else _describe(now)
        raise CaptureError(
            f"forward changes the shape or type of buffer {name} of {type(module).__name__} from {_describe(held)} to {shown}",
            hint="write into the buffer, or keep what is made in forward in a plain attribute",
        )
    with torch.no_grad():
        held.copy_(now)
    module._buffers[name] = held


def call_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called: a mapping by keyword, a tuple or list by position, a tensor alone.

    A dataclass goes by its fields, or whole to a `forward` that takes none of them. What `forward` does not take is left to the loss.
    """
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values()  # of torch.compile: it hides them
    kinds = {parameter.kind for parameter in parameters}
    names = {parameter.name for parameter in parameters if parameter.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    if is_record(batch) and (takes_all or names & plain(batch).keys()):
        batch = plain(batch)
    if isinstance(batch, Mapping):
        kwargs = {key: value for key, value in batch.items() if takes_all or key in names}
        missing = [p.name for p in parameters if p.name not in kwargs and p.name in names and p.default is inspect.Parameter.empty]
        _check_missing(model, missing, f"the batch has {', '.join(map(str, batch))}")
        return (), kwargs
    values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    args = values if inspect.Parameter.VAR_POSITIONAL in kinds else values[: len(positional)]
    missing = [p.name for p in positional[len(args) :] if p.default is inspect.Parameter.empty]
    _check_missing(model, missing, f"the batch has {len(values)} parts")
    return args, {}


def _check_missing(model: nn.Module, missing: list[str], given: str) -> None:
    if missing:
        raise BatchError(f"the batch lacks {', '.join(missing)}, which {type(model).__name__}.forward requires ({given})")


def check_loss(loss: Loss | None) -> None:
    """Refuses a loss that cannot be called as ``loss(output, batch)``."""
    if loss is None:
        return
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # of a builtin that does not say what it takes
        return
    try:
        signature.bind(None, None)
    except TypeError:
        message = f"loss= is called as loss(output, batch), but takes {signature}"
        raise CaptureError(message, where=line_of_function(loss), hint="loss=lambda output, batch: ...") from None


def _found_loss(output: Any) -> Any:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if found is None and isinstance(output, Tensor) and output.dim() == 0 else found


def _has_loss(output: Any) -> bool:
    found = _found_loss(output)
    return isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()


def _own_loss(output: Any) -> Any:
    """The loss that a model computes itself: `output.loss`, ``output["loss"]``, or an output that is a scalar."""
    found = _found_loss(output)
    if found is None:
        raise CaptureError(
            f"there is no loss: loss= was not given, and the model's output ({_describe(output)}) has none",
            hint="pass loss=function(output, batch), or put the labels into the batch",
        )
    return found


def _without_metrics(value: Any, where: SourceLine | None) -> tuple[Any, dict[str, Tensor]]:
    """The loss, and what a mapping has beside its ``"loss"``: scalars by name, without a gradient."""
    if not isinstance(value, Mapping):
        return value, {}
    if "loss" not in value:
        raise CaptureError(
            f'the loss is a mapping without "loss": it has {", ".join(map(str, value)) or "nothing"}',
            where=where,
            hint='return {"loss": loss, "accuracy": accuracy}: "loss" is trained on, the others are engine.metrics',
        )
    metrics = {name: metric for name, metric in value.items() if name != "loss"}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name or not isinstance(metric, Tensor) or metric.dim():
            raise CaptureError(
                f"metric {name!r} that is returned with the loss is {_describe(metric)}, not a scalar tensor",
                where=where,
                hint="reduce a tensor over the batch with .mean() or .sum(); engine.predict returns values per row",
            )
    return value["loss"], {name: (m if m.is_floating_point() else m.float()).detach() for name, m in metrics.items()}


def _checked_loss(value: Any, where: SourceLine | None) -> tuple[Tensor, Tensor | torch.SymInt | float | None]:
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    numbers = (int, float, torch.SymInt)
    fits = len(parts) in (1, 2) and isinstance(parts[0], Tensor) and parts[0].dim() == 0 and parts[0].is_floating_point()
    if fits and len(parts) == 2:
        fits = (isinstance(parts[1], Tensor) and parts[1].dim() == 0) or isinstance(parts[1], numbers)
    if not fits:
        raise CaptureError(
            f"the loss is {_describe(value)}, not a floating-point scalar or a pair (sum, weight) of scalars",
            where=where,
            hint="reduce it with .mean() or .sum()",
        )
    weight = parts[1] if len(parts) == 2 else None
    return parts[0], float(weight) if isinstance(weight, (int, float)) else weight


def in_rows(text: str) -> str:
    """A message with torch's symbol for the number of rows replaced by "rows"."""
    return re.sub(r"\bs\d+\b", "rows", text)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape [{in_rows(', '.join(map(str, value.shape)))}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_describe(item) for item in value) + ")"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "a number made of the batch's sizes"
    return type(value).__name__


def _structure(output: Any, tensors: list[Tensor], where: SourceLine | None) -> OutputStructure:
    """The structure of an output of the function at a line; its tensors are appended to `tensors`."""
    leaves, spec = pytree.tree_flatten(output)
    parts: list[tuple[int | None, object]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts.append((len(tensors), None))
            tensors.append(leaf)
            continue
        if any(isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool)) for each in (leaf if isinstance(leaf, tuple) else (leaf,))):
            raise CaptureError("the model's output has a number that depends on the batch; it may hold tensors and constants", where=where)
        attributes = _attributes(leaf)
        holds_tensors = any(isinstance(each, Tensor) for each in pytree.tree_leaves(attributes))
        parts.append((None, ObjectStructure(leaf, _structure(attributes, tensors, where)) if holds_tensors else leaf))
    return OutputStructure(spec, tuple(parts))


def _attributes(value: object) -> dict[str, Any]:
    """The attributes of an object by name: an output may be a dataclass, or a namespace."""
    if isinstance(value, (nn.Module, type)):
        return {}
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))
