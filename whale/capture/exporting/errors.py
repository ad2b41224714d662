"""Turns whatever goes wrong in a capture into a `CaptureError` with the user's line, and watches for what would be lost.

Export follows the forward pass alone. What the user does to gradients beside it (custom backward functions, hooks) would
vanish from the graph without a word, and so would the model's own recompute. `watched` makes each of them an error.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from whale.capture.batch import form_of
from whale.capture.exporting.functions import call
from whale.capture.exporting.regions import recomputed
from whale.capture.exporting.wrapper import in_rows
from whale.capture.source import line_of_traceback, user_line
from whale.errors import CaptureError, WhaleError, raise_faults
from whale.ir.source import SourceLine

READ = "here a number that is read from one does"
CHECK_HINT = "; a check that raises may compare x.item()"
INNER_HINT = "write torch.cond, while_loop and the like with ordinary tensor operations"


def as_capture_error(error: Exception, last_number: SourceLine | None = None) -> WhaleError:
    """The error that the user sees for an exception that ended a capture.

    Args:
        error: the exception.
        last_number: where the model's code last read a number of a tensor.
    """
    from torch._dynamo.exc import TorchDynamoException, UserError  # seconds to load, and only a capture needs it

    if isinstance(error, WhaleError):
        return error
    where = line_of_traceback(error.__traceback__)
    asked = _asked(error)
    if asked is not None:
        return CaptureError(
            f"a captured model's control flow and sizes do not depend on values in tensors ({asked})",
            where=where,
            hint="use torch.where or masks in place of Python's if, for, int() and bool() on tensors"
            + (CHECK_HINT if asked == READ else ""),
        )
    if isinstance(error, TorchDynamoException) and not isinstance(error, UserError):  # such an export compiles those alone
        return CaptureError(f"a captured model is one graph without inner programs ({_first_line(error)})", where=where, hint=INNER_HINT)
    read = "" if last_number is None else f"; a number that is not known was read of one at {last_number}"
    return CaptureError(
        f"the model cannot be captured: its code fails ({type(error).__name__}: {in_rows(_first_line(error))}{read})",
        where=where,
        hint="where a plain step on this batch does not fail, code that reads values or asks whether it is traced goes another way here",
    )


def _asked(error: Exception) -> str | None:
    """What was asked of values, in words: torch calls a condition ``Eq(u0, 1)``; None where an error is another."""
    if isinstance(error, DynamicOutputShapeException):
        return f"the result of {error.func} has sizes that only values tell"
    if isinstance(error, DataDependentOutputException):
        return f"{error.func} reads them"
    if isinstance(error, GuardOnDataDependentSymNode) and re.search(r"expression Eq\(u\d+, 1\) ", str(error)) is not None:
        return "here a condition decides what is computed"
    if isinstance(error, GuardOnDataDependentSymNode):
        return READ
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def check_model(model: nn.Module) -> None:
    """Finds what a capture would lose, or could not follow, and that can be seen on the model itself.

    Raises:
        CaptureError: lazy parameters, or hooks on them; tensors that are not dense; or a model that torch divides already.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(
            f"a model is divided by Whale or by torch, not by both (it is a {type(model).__name__})",
            hint="pass model.module, the model inside",
        )
    faults: list[WhaleError] = [
        CaptureError(f"parameters and buffers are dense tensors ({name}: {form})", hint="keep what makes it, as dense tensors")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if (form := form_of(tensor)) != "dense"
    ]
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            faults.append(CaptureError(f"parameters have shapes before capture ({name} is lazy)", hint="run the model on one batch first"))
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            faults.append(CaptureError(f"a captured parameter has no gradient hooks ({name} has)", hint="remove the hook"))
    raise_faults(faults)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises `CaptureError` where the code that runs inside does what no captured graph keeps."""
    apply = vars(torch.autograd.Function)["apply"]  # the descriptor: which kind of method it is depends on torch
    with contextlib.ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))

        patch(torch.autograd.Function, "apply", classmethod(_guarded(apply)))
        patch(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpointing)
        patch(nn.Module, "_apply", _converted)
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patch(torch.Tensor, name, _refuse_hook)
        yield


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Keeps torch from printing the graph so far, and its own advice, when an export fails: the error says it all."""
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
    """Raises `CaptureError` where a tensor that requires a gradient is read and is none of the model's (they are fake by then)."""
    converter = mode.fake_tensor_converter
    convert = converter.from_real_tensor

    def guarded(fake_mode: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.requires_grad and not isinstance(tensor, FakeTensor):
            raise CaptureError(
                "what requires a gradient is a parameter of the model "
                f"(a tensor of shape [{', '.join(map(str, tensor.shape))}] from elsewhere requires one)",
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
    """What the reentrant form of `torch.utils.checkpoint` does: the function's ops become a region that is computed again."""
    with recomputed():
        return function(*args)


def _checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What stands around the function in the other form: it runs where this yields."""
    with recomputed():
        yield


def _converted(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """What `module.to(...)` and the like do in `forward`: nothing, where the module is like that already.

    Raises:
        CaptureError: it changes a parameter or a buffer.
    """
    for owner in module.modules() if recurse else [module]:
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None:
                continue
            with _disable_current_modes():  # asked of a stand-in: the trace would take its own parameter for what comes out
                made = change(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise CaptureError(
                    "a captured model keeps its parameters and buffers in forward "
                    f"(.to() puts {made.dtype} on {made.device} in the place of {name} of {type(owner).__name__}, {tensor.dtype})",
                    where=user_line(),
                    hint="convert the model before parallelize, or the input in forward",
                )
    return module


def _refuse_hook(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        "a captured model has no gradient hooks: they would be lost", where=user_line(), hint="remove the hook, or change the forward pass"
    )
