"""Refuses what a captured graph would lose, and turns whatever goes wrong in a capture into a `CaptureError` with the user's line.

Export traces the forward pass alone, so changes to gradients (hooks) would be lost without a message; `watched` refuses them.
`DataAccess` sees accesses behind a tensor: `.data` is read as a detached tensor; writes to it, values for numpy, gradients that the
code computes itself and `torch.vmap` are refused. A dtype that the code reads under autocast is recorded, because the device type
of the trace may cast differently from that of the run.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import sympy
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from whale.capture.batch import form_of
from whale.capture.exporting.functions import call, recomputed
from whale.capture.exporting.wrapper import in_rows
from whale.capture.source import is_users, line_of_traceback, user_line
from whale.errors import CaptureError, WhaleError, raise_faults
from whale.ir.scope import SourceLine

READ = "it uses a number that is read from a tensor"
CHECK_HINT = "; a check that raises may compare x.item()"
SIZES = "two sizes that depend on them must be equal"
INNER_HINT = "write torch.cond, while_loop and the like with ordinary tensor operations"


def as_capture_error(error: Exception, last_number: SourceLine | None) -> WhaleError:
    """The user's error for an exception that ended a capture; `last_number` is the line that last read a number of a tensor."""
    from torch._dynamo.exc import TorchDynamoException, UserError  # seconds to load, and only a capture needs it

    if isinstance(error, WhaleError):
        return error
    where = line_of_traceback(error.__traceback__)
    asked = _asked(error)
    if asked is not None:
        return CaptureError(
            f"the model's control flow or a size depends on values in tensors ({asked})",
            where=where,
            hint="select with one mask in all places (keep = y > 0; loss(x[keep], y[keep])): nothing tells that two masks select as many"
            if asked == SIZES
            else "use torch.where or masks in place of Python's if, for, int() and bool() on tensors"
            + (CHECK_HINT if asked == READ else ""),
        )
    if isinstance(error, TorchDynamoException) and not isinstance(error, UserError):  # such an export compiles those alone
        return CaptureError(
            f"the model uses a higher-order operator, which is not supported ({_first_line(error)})", where=where, hint=INNER_HINT
        )
    read = "" if last_number is None else f"; an unknown number was read from a tensor at {last_number}"
    return CaptureError(
        f"the model cannot be captured: its code fails ({type(error).__name__}: {in_rows(_first_line(error))}{read})",
        where=where,
        hint="if a plain step on this batch works, look for code that reads values or asks whether it is traced",
    )


def _asked(error: Exception) -> str | None:
    """What was read of values, for a message (torch calls a condition ``Eq(u0, 1)``); None for other errors."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the size of the result of {error.func} depends on values"
    if isinstance(error, DataDependentOutputException):
        return f"{error.func} reads them"
    if isinstance(error, GuardOnDataDependentSymNode) and re.search(r"expression Eq\(u\d+, 1\) ", str(error)) is not None:
        return "a condition decides what is computed"
    if isinstance(error, GuardOnDataDependentSymNode):
        is_equality = isinstance(error.cond, (sympy.Eq, sympy.Ne))
        return SIZES if is_equality and all(free_unbacked_symbols(side) for side in error.cond.args) else READ
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def check_model(model: nn.Module) -> None:
    """Refuses what the model itself shows: lazy or hooked parameters, tensors that are not dense, models that torch divides already."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(
            f"the model is a {type(model).__name__}, which already divides the work",
            hint="pass model.module, the model inside",
        )
    faults: list[WhaleError] = [
        CaptureError(f"{name} is {form}; parameters and buffers must be dense tensors", hint="store the dense tensors that it is made from")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if (form := form_of(tensor)) != "dense"
    ]
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            faults.append(CaptureError(f"parameter {name} is lazy and has no shape yet", hint="run the model on one batch first"))
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            faults.append(CaptureError(f"parameter {name} has a gradient hook, which would be lost", hint="remove the hook"))
    raise_faults(faults)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises `CaptureError` if the code inside does what no captured graph keeps."""
    apply = vars(torch.autograd.Function)["apply"]  # the descriptor: which kind of method it is depends on torch
    with contextlib.ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))

        patch(torch.autograd.Function, "apply", classmethod(_guarded(apply)))
        checkpointing = [name for name in _CHECKPOINTING if hasattr(torch.utils.checkpoint, name)]
        assert checkpointing, "torch's checkpoints would not be seen"
        patch(torch.utils.checkpoint, checkpointing[0], _checkpointing)
        patch(nn.Module, "_apply", _converted)
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patch(torch.Tensor, name, _refuse_hook)
        yield


# torch's generator around a checkpointed function: from 2.14 on, and before
_CHECKPOINTING = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Keeps torch from printing the graph and its own advice when an export fails: the error says it all."""
    import torch.export._trace  # seconds to load, and only a capture needs it
    from torch.fx.experimental import symbolic_shapes

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    with (
        mock.patch.object(torch.export._trace, "print", nothing, create=True),
        mock.patch.object(torch.export._trace.log, "error", nothing),
        mock.patch.object(symbolic_shapes.log, "warning", nothing),
        mock.patch.object(fake_tensor.log, "error", nothing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def refused_parameters(mode: FakeTensorMode) -> Iterator[None]:
    """Raises `CaptureError` if a tensor that requires a gradient is read and is none of the model's (those are fake by then)."""
    converter = mode.fake_tensor_converter
    convert = converter.from_real_tensor

    def guarded(fake_mode: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.requires_grad and not isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a tensor of shape [{', '.join(map(str, tensor.shape))}] requires a gradient, but is not a parameter of the model",
                where=user_line(),
                hint="make it part of the model, or detach it",
            )
        return convert(fake_mode, tensor, *args, **kwargs)

    with mock.patch.object(converter, "from_real_tensor", guarded):
        yield


def _guarded(apply: Any) -> Callable[..., Any]:
    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or cls.__module__.startswith("torch._library"):
            return apply.__get__(None, cls)(*args, **kwargs)  # of a registered operator: the graph keeps the operator, with its backward
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _checkpointed(*args)
        if cls.__module__ == "torch.nn.modules._functions" and cls.__name__ == "BackwardHookFunction":
            _refuse_hook()
        assert not kwargs, "torch's apply takes none"
        return call(cls, args)

    return guarded


def _checkpointed(function: Callable[..., Any], preserves_random_state: bool, *args: Any) -> Any:
    """The reentrant form of `torch.utils.checkpoint`: the function's ops become a recomputed region."""
    with recomputed():
        return function(*args)


def _checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """The non-reentrant form: the function runs at the yield."""
    with recomputed():
        yield


def _converted(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)` and similar calls in `forward`: no-ops, refused if they would change a parameter or a buffer."""
    for owner in module.modules() if recurse else [module]:
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None:
                continue
            with _disable_current_modes():  # on an empty tensor: a trace would return its own parameter
                made = change(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise CaptureError(
                    f"forward converts {name} of {type(owner).__name__} by .to(), from {tensor.dtype} to {made.dtype} on {made.device}",
                    where=user_line(),
                    hint="convert the model before parallelize, or the input in forward",
                )
    return module


def _refuse_hook(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        "the model registers a gradient hook in forward, which would be lost",
        where=user_line(),
        hint="remove the hook, or change the forward pass",
    )


_LEAVING = (torch.Tensor.numpy, torch.Tensor.__array__)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_TYPES = (torch.Tensor.dtype.__get__, torch.Tensor.type)  # type: ignore[attr-defined]


class DataAccess(TorchFunctionMode):
    """Reads `tensor.data` as ``tensor.detach()`` and refuses what export loses: setting it, values that leave torch, own gradients."""

    _has_cast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._has_cast = self._has_cast or _casts()
        if self._has_cast and _is_asked_by_user():
            _note_type(func, args)
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError(
                "the model assigns .data of a tensor, which is not supported",
                where=user_line(),
                hint="use the new tensor instead; write a buffer by buffer.copy_(value)",
            )
        if func in _GRADIENTS:
            raise CaptureError(
                "the model computes gradients itself (torch.autograd.grad, backward), which is not supported",
                where=user_line(),
                hint="write the gradient out as tensor operations, or as an autograd.Function",
            )
        if func is torch._C._set_grad_enabled and not args[0] and torch.is_grad_enabled() and _casts() and _is_in_region():
            raise CaptureError(  # torch.export forgets it
                "the model uses no_grad() inside torch.autocast, which is not supported",
                where=user_line(),
                hint="put the autocast inside the no_grad(), or detach() what is read there",
            )
        if any(map(_is_transformed, args)):
            raise CaptureError(
                "the model calls a transform of torch.func (vmap, grad, jvp), which is not supported",
                where=user_line(),
                hint="write the operations for all samples at once: matmul, bmm and einsum take dimensions of the batch",
            )
        if func in _LEAVING and isinstance(args[0], FakeTensor):
            raise CaptureError(
                "the model passes a tensor's values to numpy, which is not supported",
                where=user_line(),
                hint="compute it with torch, or before the step, in the data set",
            )
        if func == torch._pack_padded_sequence:
            raise CaptureError(
                "the model uses packed sequences, whose sizes depend on values in tensors",
                where=user_line(),
                hint="run the layer on the padded batch and read the last of each row: output[torch.arange(len(lengths)), lengths - 1]",
            )
        return func(*args, **(kwargs or {}))


def _is_asked_by_user() -> bool:
    """Whether the caller of the intercepted function is outside torch."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _note_type(func: Any, args: Any) -> None:
    """Records the dtype of a tensor that the code asks for as a node, which `read_type` finds."""
    asked = args[0] if func in _TYPES and len(args) == 1 else args[1] if func == torch.Tensor.to and len(args) > 1 else None
    if isinstance(asked, torch.Tensor) and asked.is_floating_point():
        torch.ops.aten._assert_tensor_metadata.default(asked, None, None, asked.dtype)


def read_type(node: fx.Node) -> torch.dtype | None:
    """The dtype that a tensor had in the trace, if this node records a read of it."""
    is_read = node.target is torch.ops.aten._assert_tensor_metadata.default and "device" not in node.kwargs  # torch's own have it
    return node.args[3] if is_read else None  # type: ignore[return-value]


def _is_in_region() -> bool:
    """Whether the code has entered an autocast of its own, besides one around the whole capture."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _is_transformed(value: object) -> bool:
    """Whether a tensor is a wrapper inside a transform of `torch.func`."""
    return isinstance(value, torch.Tensor) and (is_batchedtensor(value) or is_gradtrackingtensor(value))
