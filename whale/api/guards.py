"""What a script may do to the model that it gave, after which an engine would not be what the script takes it for: a warning, or an error.

An engine trains copies of the tensors of a captured model.

- A capture decides which layers there are, which parameters are trained and in which types ops compute. What was
  frozen has no gradient in it, and `torch.autocast` would change the types of some of its ops behind the plan's back.
- A target network that is synchronised by hand (``model.target.load_state_dict(...)``), weights that are loaded late or
  clamped after each step do not reach the engine. torch counts the writes to each tensor. A script that has asked the engine for its
  weights may put them into the model, to look at it; writes that follow `Engine.state_dict` are let pass.
- Who saves ``model.state_dict()`` or the model at the end, or validates by ``model(x)``, would have an untrained model.
  torch's own hooks of modules hear of these; they are silent once they have spoken, and taken away when the script has weights from the
  engine. What reads parameters one by one, as averages of weights do
  (`for average, p in zip(averages, model.parameters()): average.lerp_(p, 0.1)`), would mix untrained values in at every step: that is an
  error. The parameters hear of it themselves, by torch's protocol for subclasses of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from whale.capture.source import line_of_function, user_line
from whale.errors import CaptureError, RuntimeFault, WhaleError, first_few, raise_faults, warn
from whale.ir.graph import ModelGraph


def check_types(device: torch.device) -> None:
    """Checks that no `torch.autocast` is in force.

    Raises:
        CaptureError: it is.
    """
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise CaptureError(
            f"torch.autocast to {dtype} is active on {device.type} around a captured model, which ignores it",
            hint="move the autocast inside the model's forward, where it is captured",
        )


class Guards:
    """What is looked at around each step of an engine.

    Args:
        model: the user's.
        graph: the captured model.
        users: the user's own tensors, by canonical name.
        device: where this rank computes.
        trains: whether the engine does.
        warns: whether this rank says what it finds.
    """

    def __init__(
        self, model: nn.Module, graph: ModelGraph, users: Mapping[str, Tensor], device: torch.device, *, trains: bool, warns: bool
    ) -> None:
        self._device, self._users = device, users
        self._parts = list(_parts(model, "_modules", "_parameters"))
        self._was_trained = {parameter.name: parameter.trainable for parameter in graph.parameters if parameter.kind == "parameter"}
        self._flags: list[tuple[str, Tensor]] = []
        self._writes = _OutsideWrites(model, warns=warns)
        self._stale = _StaleModel(model, trains=trains, warns=warns)

    def take_up(self, owned: Mapping[str, Tensor]) -> None:
        """Goes on with these tensors of the engine's, by canonical name."""
        self._flags = [(name, held[name]) for held in (self._users, owned) for name in self._was_trained if name in held]

    def check(self) -> None:
        """Looks at what the script has done since the last step.

        Raises:
            CaptureError: a layer or parameter was replaced since the capture, or frozen or unfrozen; or `torch.autocast` is in force.

        Warns:
            UserWarning: tensors of the user's model were written to.
        """
        with torch._C.DisableTorchFunctionSubclass():  # of the user's parameters, which hear of who reads them
            check_types(self._device)
            replaced = [path for path, held, key, part in self._parts if held.get(key) is not part]
            if replaced:
                raise CaptureError(
                    f"{first_few(replaced)} of the model was replaced after capture",
                    hint="build the model before parallelize; to change it during training call parallelize again, with the weights of "
                    "engine.state_dict()",
                )
            changed = dict.fromkeys(name for name, tensor in self._flags if tensor.requires_grad is not self._was_trained[name])
            if changed:
                raise_faults([*self._frozen(changed, "unfrozen", was_trained=False), *self._frozen(changed, "frozen", was_trained=True)])
            self._writes.look()

    def _frozen(self, names: Iterable[str], word: str, *, was_trained: bool) -> list[WhaleError]:
        these = first_few([name for name in names if self._was_trained[name] is was_trained])
        message = f"{these} of the model was {word} after capture, which decides what is trained"
        hint = "set requires_grad before parallelize; to change it during training save, call parallelize again, and load"
        return [CaptureError(message, hint=hint)] if these else []

    def trained(self) -> None:
        """Notes that the engine has trained: from now on the user's model lags behind."""
        self._stale.listen()

    def exchange(self) -> None:
        """Notes that the script has weights from the engine, or has given it some: it may write them to the model too."""
        self._writes.let_pass()
        self._stale.forget()


def _parts(model: nn.Module, *kinds: str) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """What the modules of a model hold: its path, where it is held, under which key, and itself."""
    for path, module in model.named_modules():
        for kind in kinds:
            held = getattr(module, kind)
            for key, part in held.items():
                yield f"{path}.{key}".removeprefix("."), held, key, part


class _OutsideWrites:
    """The writes to parameters and buffers of the user's model that have been seen.

    Args:
        model: the user's.
        warns: whether this rank says what it finds.
    """

    def __init__(self, model: nn.Module, *, warns: bool) -> None:
        self._model, self._warns = model, warns
        self._has_weights = True
        self._known: list[tuple[tuple[str, dict[str, Any], str, Tensor], int]] = []
        self.look()

    def let_pass(self) -> None:
        """Takes the tensors as they are at the next look."""
        self._has_weights = True

    def look(self) -> None:
        """Warns, once, of what was written since the last look."""
        if not self._warns:
            return
        if self._has_weights:
            parts = [part for part in _parts(self._model, "_parameters", "_buffers") if part[3] is not None]
            self._known, self._has_weights = [(part, _num_writes(part[3])) for part in parts], False
            return
        written = [path for (path, held, key, tensor), count in self._known if held.get(key) is not tensor or _num_writes(tensor) != count]
        if written:
            self._warns = False
            warn(
                f"{first_few(written)} of the model was written after parallelize; the engine trains its own copies and does not see "
                "this: write weights by engine.load_state_dict, read them by engine.state_dict"
            )


def _num_writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_RULE = "the model given to parallelize keeps its initial weights: the engine trains its own copies"
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
                f"a parameter of the model was read after parallelize, but {_RULE}",
                where=user_line(),
                hint="engine.state_dict() returns the trained weights, under the keys of model.state_dict(); "
                "engine.average(decay=0.999) keeps moving averages",
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
    """Whether a parameter among them has a gradient: the script trains the model outside the engine, by an optimizer of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, _Untrained) and leaf.grad is not None for leaf in pytree.tree_leaves(args))


def _is_our_own() -> bool:
    """Whether it is Whale that asks: another engine is made of the same model, or it is captured for other sizes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("whale.")


class _StaleModel:
    """Warns, once, where the model is asked for what training has not changed; refuses that its parameters are read one by one.

    Args:
        model: the user's.
        trains: whether the engine does.
        warns: whether this rank says what it finds.
    """

    def __init__(self, model: nn.Module, *, trains: bool, warns: bool) -> None:
        self._model, self._listens, self._warns = model, trains, warns
        self._handles: list[RemovableHandle] = []

    def listen(self) -> None:
        """Notes that the engine has trained."""
        if self._listens and not self._handles:
            hook = _StaleHook(self)
            self._handles = [self._model.register_forward_pre_hook(hook), self._model.register_state_dict_pre_hook(hook)]  # type: ignore[no-untyped-call]
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
                warn(f"{_RULE}; engine.state_dict() returns the trained weights, engine.predict(batch) their output")

    def _hear_no_more(self) -> None:
        self._listens = False
        for parameter in self._model.parameters():
            if type(parameter) is _Untrained:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # what it was


class _StaleHook:
    """The hook: it goes with a copy of the model, which lags behind as well, and has nothing more to say once the model is pickled."""

    def __init__(self, told: _StaleModel | None) -> None:
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

    def __deepcopy__(self, _: object) -> _StaleHook:
        return self

    def __reduce__(self) -> tuple[type[_StaleHook], tuple[None]]:
        self.tell()
        return _StaleHook, (None,)


def warn_of_hooks(model: nn.Module) -> None:
    """Warns of forward hooks of the user's own: torch's own (weight norm) are tensor operations alone."""
    forward = list(_hooks(model, "_forward_hooks", "_forward_pre_hooks"))
    if forward:
        warn(
            f"forward hooks run only during capture ({first_few(forward)}): their tensor operations become part of the model, nothing "
            "else they do is repeated"
        )


def _hooks(model: nn.Module, *kinds: str) -> Iterator[str]:
    for name, module in model.named_modules():
        for kind in kinds:
            for hook in getattr(module, kind).values():
                where = line_of_function(hook)
                if where is not None:
                    yield f"{name or type(module).__name__}: {getattr(hook, '__name__', type(hook).__name__)} at {where}"
