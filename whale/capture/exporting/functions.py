"""What a captured graph keeps whole as one op or region: custom autograd functions, the CTC loss, recomputed blocks.

traced as      whale_capture::call([%x, %w], 0)      0: the first call of this capture
written as     GeLUFunction(%x, %w)                  a `FunctionCall`, which calls `GeLUFunction.apply`, with the user's own backward

F.ctc_loss(log_probs, targets, frames, lengths)   ->   whale_capture::ctc_loss(...) [n], then the mean over the rows     traced
                                                       aten.ctc_loss.Tensor(..., reduction=none)                       captured

A function whose forward and backward are pointwise throughout is tagged so: then parts of its operands give parts of its result.
Without values torch has no shapes for the CTC loss; per row its result has a known one. Blocks that the model recomputes by
`torch.utils.checkpoint` are marked on their ops.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.capture.source import user_line
from whale.errors import CaptureError

_library = torch.library.Library("whale_capture", "DEF")  # type: ignore[no-untyped-call]
for _signature in (
    "call(Tensor[] operands, int number) -> Tensor[]",
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity) -> Tensor",
):
    _library.define(_signature)  # type: ignore[no-untyped-call]
CALL = torch.ops.whale_capture.call.default  # stands for a call during the trace

_MOVES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_VIEWS = tuple(getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "reshape", "expand", "view_as", "expand_as"))
_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_calls: ContextVar[list[FunctionCall] | None] = ContextVar("whale_function_calls", default=None)


class FunctionCall:
    """Calls a user's `autograd.Function` on tensors, with the other arguments (a pytree) of the capture; `tags` are as torch's ops have."""

    def __init__(self, function: type[torch.autograd.Function], arguments: Sequence[Any]) -> None:
        self.function = function
        leaves, self._spec = pytree.tree_flatten(list(arguments))
        self._constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        self._outputs: tuple[pytree.TreeSpec, tuple[Any, ...]] | None = None
        self._autocasts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
        self.tags: tuple[torch.Tag, ...] = ()
        self.__name__, self.__module__ = function.__name__, function.__module__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and self._form() == other._form()

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensor or tensors that the function returns, with its own backward."""
        with ExitStack() as stack:  # its forward may ask for it, or compute under it
            for kind, dtype in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            found = self._tensors(self.function.apply(*self._arguments(operands)), operands)  # type: ignore[no-untyped-call]
        return found[0] if len(found) == 1 else found

    @property
    def shown(self) -> str:
        pairs = zip(self._constants, self._is_tensor, strict=True)
        shown = ["..." if is_tensor or not isinstance(value, _PLAIN) else repr(value) for value, is_tensor in pairs]
        return f"{self.function.__qualname__}({', '.join(shown)})"

    def traced(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """What the function returns for fake tensors; finds out whether it is pointwise."""
        context = _Context(len(self._constants))
        arguments = self._arguments([operand.detach() for operand in operands])
        with _PointwiseRecorder() as forward:  # type: ignore[no-untyped-call]
            output = _forward(self.function, context, arguments)
        leaves, spec = pytree.tree_flatten(output)
        self._outputs = spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        found = list(self._tensors(output, arguments))
        if len(found) == 1 and forward.is_pointwise and self._is_backward_pointwise(context, found[0]):
            self.tags = (torch.Tag.pointwise,)
        return found

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returns, with these tensors in it."""
        assert self._outputs is not None
        spec, constants = self._outputs
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant for constant in constants]
        return pytree.tree_unflatten(leaves, spec)

    def _is_backward_pointwise(self, context: _Context, output: Tensor) -> bool:
        gradient = torch.empty_like(output)
        with _PointwiseRecorder() as seen:  # type: ignore[no-untyped-call]
            try:
                self.function.backward(context, gradient)
            except Exception:  # the user's code sees a context that is not torch's: it may ask for more than that has
                return False
        return bool(seen.is_pointwise)

    def _arguments(self, operands: Sequence[Tensor]) -> list[Any]:
        remaining = iter(operands)
        pairs = zip(self._is_tensor, self._constants, strict=True)
        leaves = [next(remaining) if is_tensor else constant for is_tensor, constant in pairs]
        arguments: list[Any] = pytree.tree_unflatten(leaves, self._spec)
        return arguments

    def _tensors(self, output: Any, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors of an output, in memory of their own."""
        lent = {operand.untyped_storage()._cdata for operand in operands if isinstance(operand, Tensor)}
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return tuple(tensor.clone() if tensor.untyped_storage()._cdata in lent else tensor for tensor in found)

    def _form(self) -> tuple[Any, ...]:
        return self.function, self._spec, self._is_tensor, self._constants, self._autocasts


@contextmanager
def collected() -> Iterator[list[FunctionCall]]:
    """The calls that are made inside, in order."""
    calls: list[FunctionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def call(function: type[torch.autograd.Function], arguments: Sequence[Any]) -> Any:
    """Calls a function as one op of the current capture; refuses one that cannot be repeated on other rows."""
    calls = _calls.get()
    assert calls is not None, "a capture collects the calls"
    leaves = pytree.tree_leaves(list(arguments))
    if any(isinstance(leaf, _NUMBERS) for leaf in leaves):
        raise CaptureError(
            f"the autograd.Function {function.__name__} is given a number that depends on the number of rows",
            where=user_line(),
            hint="read sizes from the tensors inside the function",
        )
    made = FunctionCall(function, arguments)
    calls.append(made)
    return made.rebuild(CALL([leaf for leaf in leaves if isinstance(leaf, Tensor)], len(calls) - 1))


@torch.library.register_fake("whale_capture::call", lib=_library)  # type: ignore[untyped-decorator]
def _traced(operands: Sequence[Tensor], number: int) -> list[Tensor]:
    calls = _calls.get()
    assert calls is not None, "a capture collects the calls"
    return calls[number].traced(operands)


def _forward(function: type[torch.autograd.Function], context: _Context, arguments: Sequence[Any]) -> Any:
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(context, *arguments)
    output = function.forward(*arguments)
    function.setup_context(context, tuple(arguments), output)
    return output


class _Context:
    """The autograd context while a function is traced."""

    def __init__(self, num_arguments: int) -> None:
        self.needs_input_grad = (True,) * num_arguments
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """For forward differentiation, which is not done."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Torch's own context sees it at run time."""

    def set_materialize_grads(self, value: bool) -> None:
        """Torch's own context sees it at run time."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise CaptureError(
            "an autograd.Function calls mark_dirty: writing to its arguments is not supported",
            where=user_line(),
            hint="return a new tensor",
        )


class _PointwiseRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out whether all operators called inside are pointwise, or moves."""

    supports_higher_order_operators = True  # inner programs (torch.cond and others) pass, for a later error that names them

    is_pointwise = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags if isinstance(func, torch._ops.OpOverload) else ()
        found = func(*args, **(kwargs or {}))
        self.is_pointwise = self.is_pointwise and (torch.Tag.pointwise in tags or func in _MOVES or _is_same_view(func, args, found))
        return found


def _is_same_view(func: Any, args: Any, found: Any) -> bool:
    """Whether a view has the shape of its base, as ``x.view_as(x)``."""
    return func in _VIEWS and len(found.shape) == len(args[0].shape) and statically_known_true(sym_eq(found.shape, args[0].shape))


LOSS_PER_ROW = torch.ops.whale_capture.ctc_loss.default  # stands for the loss of each row during the trace

_NO_REDUCTION = 0
_SIGNATURE = inspect.signature(F.ctc_loss)
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@torch.library.register_fake("whale_capture::ctc_loss", lib=_library)  # type: ignore[untyped-decorator]
def _traced_ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


class CtcLosses(TorchFunctionMode):
    """Replaces the CTC loss of a batch by that of each row, then torch's reduction."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.ctc_loss, torch.ctc_loss):
            return func(*args, **(kwargs or {}))
        given = _SIGNATURE.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        log_probs, targets, frames, lengths, blank, reduction, zero_infinity = given.args
        if log_probs.dim() != 3:
            log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        frames, lengths = (each if isinstance(each, Tensor) else torch.tensor(each) for each in (frames, lengths))
        each = LOSS_PER_ROW(log_probs, targets, frames.reshape(-1), lengths.reshape(-1), blank, zero_infinity)
        reduction = _REDUCTIONS.get(reduction, reduction)
        if reduction == "none":
            return each if given.args[0].dim() == 3 else each.squeeze(0)
        return each.sum() if reduction == "sum" else (each / lengths.reshape(-1).clamp_min(1).to(each.dtype)).mean()


def write_loss(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Replaces the traced stand-in by torch's operator."""
    *tensors, blank, zero_infinity = args
    return graph.create_node(
        "call_function", torch.ops.aten.ctc_loss.Tensor, (*tensors, blank, _NO_REDUCTION, zero_infinity), {}, node.name
    )


_REGION = "whale.region"
_numbers: ContextVar[Iterator[int] | None] = ContextVar("whale_region_numbers", default=None)


@contextmanager
def numbered() -> Iterator[None]:
    """Numbers the regions of one capture from 0, so that equal captures give equal numbers."""
    token = _numbers.set(itertools.count())
    try:
        yield
    finally:
        _numbers.reset(token)


@contextmanager
def recomputed() -> Iterator[None]:
    """Marks the ops traced inside as one region; nested regions belong to the outermost."""
    numbers = _numbers.get()
    assert numbers is not None, "a capture numbers the regions"
    current = torch.fx.traceback.current_meta.get("custom") or {}
    with torch.fx.traceback.annotate({} if _REGION in current else {_REGION: next(numbers)}):
        yield


def region_of(node: fx.Node) -> int | None:
    number = (node.meta.get("custom") or {}).get(_REGION)
    assert number is None or isinstance(number, int)
    return number
