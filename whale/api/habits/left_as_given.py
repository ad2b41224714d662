"""The model that the user gave, asked for its weights or its output after training: it has those that it was given, which is told.

An engine trains copies. Who saves ``model.state_dict()`` or the model at the end, or validates by ``model(x)``, would have an untrained
model and no word of it. torch's own hooks of modules hear of these; they are silent once they have spoken, and taken away when the
script has weights from the engine, which it may put into the model. What reads parameters one by one, as averages of weights do
(`for average, p in zip(averages, model.parameters()): average.lerp_(p, 0.1)`), would mix untrained values in at every step: that is an
error. The parameters hear of it themselves, by torch's protocol for subclasses of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from whale.capture.source import user_line
from whale.errors import RuntimeFault, warn

_RULE = "the model that parallelize was given has the weights that it had then: the engine trains tensors of its own"
_READERS = (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__  # what the script has computed itself


class _Untrained(nn.Parameter):
    """A parameter that an engine trains a copy of: its shape, type and place are as good as ever, its values are not read."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        is_read = func in _READERS or (func != _GRADIENT and _makes_tensors(found, args))
        if is_read and not _is_trained_by_script(args) and not _is_our_own():
            raise RuntimeFault(
                f"{_RULE} (its parameters are read one by one)",
                where=user_line(),
                hint="engine.state_dict() gives the trained ones, under the keys of model.state_dict(): average, compare or copy those",
            )
        return found


def _makes_tensors(found: object, args: tuple[Any, ...]) -> bool:
    """Whether an operation has read a parameter to make or change a tensor; what is written to the parameter itself is not read."""
    if not isinstance(found, (Tensor, tuple, list)):
        return False
    written = args[0] if args and found is args[0] else None
    is_read = any(isinstance(leaf, _Untrained) and leaf is not written for leaf in pytree.tree_leaves(args))
    return is_read and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found))


def _is_trained_by_script(args: tuple[Any, ...]) -> bool:
    """Whether a parameter among them has a gradient: the script trains the model beside the engine, by an optimizer of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, _Untrained) and leaf.grad is not None for leaf in pytree.tree_leaves(args))


def _is_our_own() -> bool:
    """Whether it is Whale that asks: another engine is made of the same model, or it is captured for other sizes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("whale.")


class LeftAsGiven:
    """Warns, once, where the model is asked for what training has not changed; refuses that its parameters are read one by one.

    Args:
        model: the user's.
        trains: whether the engine does.
        warns: whether this rank says what it finds.
    """

    def __init__(self, model: nn.Module, *, trains: bool, warns: bool) -> None:
        self._model, self._listens, self._warns = model, trains, warns
        self._handles: list[RemovableHandle] = []

    def trained(self) -> None:
        """Notes that the engine has trained: from now on the model lags behind."""
        if self._listens and not self._handles:
            heard = _Heard(self)
            self._handles = [self._model.register_forward_pre_hook(heard), self._model.register_state_dict_pre_hook(heard)]  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = _Untrained

    def forget(self) -> None:
        """Listens no more."""
        self._hear_no_more()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def tell(self) -> None:
        """Warns at the line that asked."""
        if self._listens:
            self._hear_no_more()  # torch is going through the hooks: none is taken away now
            if self._warns:
                warn(f"{_RULE}; engine.state_dict() gives the trained ones, engine.predict(batch) their output")

    def _hear_no_more(self) -> None:
        self._listens = False
        for parameter in self._model.parameters():
            if type(parameter) is _Untrained:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # what it was


class _Heard:
    """The hook: it goes with a copy of the model, which lags behind as well, and has nothing more to say once the model is pickled."""

    def __init__(self, told: LeftAsGiven | None) -> None:
        self._told = told

    def __call__(self, _: nn.Module, given: object, keep_vars: bool = False) -> None:
        """Is called with the arguments of `forward`, or with those of ``state_dict``.

        An engine that captures the model for other sizes calls it too, and takes the names of its tensors with ``keep_vars``.
        """
        if not torch.compiler.is_exporting() and not keep_vars:
            self.tell()

    def tell(self) -> None:
        """Warns, unless the model was pickled since."""
        if self._told is not None:
            self._told.tell()

    def __deepcopy__(self, _: object) -> _Heard:
        return self

    def __reduce__(self) -> tuple[type[_Heard], tuple[None]]:
        self.tell()
        return _Heard, (None,)
