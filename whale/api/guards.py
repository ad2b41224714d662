"""What a script may do to its model that an engine would not follow: a warning, or an error.

An engine trains copies of the tensors of a captured model.

- The capture fixes layers, trained parameters and the types of ops. A frozen parameter has no gradient in it, and `torch.autocast`
  would change types that the plan does not know of.
- Writes to the model (a target network, weights loaded late, clamping) do not reach the engine: torch's version counters show them.
  Writes after `Engine.state_dict` pass: the script may put the trained weights into its model.
- ``model.state_dict()`` and ``model(x)`` give untrained values: torch's hooks of modules warn, once, and are removed when the script has
  weights from the engine. Code that reads parameters one by one (an average of weights) would mix in untrained values: an error, raised by
  `__torch_function__` of a subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from operator import attrgetter, is_not, ne
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from whale.capture.exporting.held_values import HeldValues, in_columns
from whale.capture.source import line_of_function, user_line
from whale.errors import CaptureError, RuntimeFault, WhaleError, first_few, raise_faults, warn
from whale.ir.graph import ModelGraph

_LAYERS = ("_modules", "_parameters")
_BUILD_BEFORE = (
    "build the model before parallelize; to change it during training call parallelize again, with the weights of engine.state_dict()"
)
_IS_TRAINED, _NUM_WRITES = attrgetter("requires_grad"), attrgetter("_version")


def check_types(device: torch.device) -> None:
    """Raises a CaptureError where `torch.autocast` is active."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise CaptureError(
            f"torch.autocast to {dtype} is active on {device.type} around a captured model, which ignores it",
            hint="move the autocast inside the model's forward, where it is captured",
        )


class Guards:
    """Checks around each step of an engine.

    Args:
        model: the user's.
        graph: the captured model.
        users: the user's own tensors, by canonical name.
        device: where this rank computes.
        trains: whether the engine trains.
        warns: whether this rank warns.
    """

    def __init__(
        self, model: nn.Module, graph: ModelGraph, users: Mapping[str, Tensor], device: torch.device, *, trains: bool, warns: bool
    ) -> None:
        self._device, self._users = device, users
        self._parts = HeldValues(_parts(model, *_LAYERS))
        self._paths, self._tables = in_columns(_tables(model, *_LAYERS), 2)
        self._sizes = [*map(len, self._tables)]
        self._was_trained = {parameter.name: parameter.trainable for parameter in graph.parameters if parameter.kind == "parameter"}
        self._flags = in_columns((), 3)
        self._writes = _OutsideWrites(model, warns=warns)
        self._stale = _StaleModel(model, trains=trains, warns=warns)

    def take_up(self, owned: Mapping[str, Tensor]) -> None:
        """Goes on with these tensors of the engine's, by canonical name."""
        trained = self._was_trained.items()
        self._flags = in_columns(((name, held[name], was) for held in (self._users, owned) for name, was in trained if name in held), 3)

    def check(self) -> None:
        """Checks what the script has done since the last step.

        Raises:
            CaptureError: a layer or parameter was replaced, added, frozen or unfrozen since the capture; or `torch.autocast` is active.

        Warns:
            UserWarning: tensors of the user's model were written.
        """
        with torch._C.DisableTorchFunctionSubclass():  # of the user's parameters, which see reads
            check_types(self._device)
            if replaced := self._parts.differing():
                raise CaptureError(f"{first_few(replaced)} of the model was replaced after capture", hint=_BUILD_BEFORE)
            if [*map(len, self._tables)] != self._sizes:
                known = zip(self._paths, self._tables, self._sizes, strict=True)
                added = [_join(path, [*table][size]) for path, table, size in known if len(table) > size]
                raise CaptureError(f"{first_few(added)} of the model was added after capture", hint=_BUILD_BEFORE)
            names, tensors, trained = self._flags
            if changed := dict.fromkeys(compress(names, map(is_not, map(_IS_TRAINED, tensors), trained))):
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
        """Notes that the script has weights from the engine, or gave it some: it may write them to the model too."""
        self._writes.let_pass()
        self._stale.forget()


def _parts(model: nn.Module, *kinds: str) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Per parameter, buffer or submodule: its path, the dict that holds it, its key there, and itself."""
    for path, held in _tables(model, *kinds):
        for key, part in held.items():
            yield _join(path, key), held, key, part


def _tables(model: nn.Module, *kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dicts that hold the parameters, buffers or submodules of each module, with the module's path."""
    for path, module in model.named_modules():
        for kind in kinds:
            yield path, getattr(module, kind)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}".removeprefix(".")


class _OutsideWrites:
    """The writes to parameters and buffers of the user's model that have been seen."""

    def __init__(self, model: nn.Module, *, warns: bool) -> None:
        self._model, self._warns = model, warns
        self._has_weights = True
        self._held = HeldValues[str]([])
        self._written = in_columns((), 3)
        self.look()

    def let_pass(self) -> None:
        """Takes the tensors as they are at the next look."""
        self._has_weights = True

    def look(self) -> None:
        if not self._warns:
            return
        if self._has_weights:
            parts = [part for part in _parts(self._model, "_parameters", "_buffers") if part[3] is not None]
            counted = [(path, tensor, tensor._version) for path, _, _, tensor in parts if not tensor.is_inference()]
            self._held, self._written, self._has_weights = HeldValues(parts), in_columns(counted, 3), False
            return
        names, tensors, counts = self._written
        written = dict.fromkeys([*self._held.differing(), *compress(names, map(ne, map(_NUM_WRITES, tensors), counts))])
        if written:
            self._warns = False
            warn(
                f"{first_few(list(written))} of the model was written after parallelize; the engine trains its own copies and does not see "
                "this: write weights by engine.load_state_dict, read them by engine.state_dict"
            )


_RULE = "the model given to parallelize keeps its initial weights: the engine trains its own copies"
_READERS = (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__  # what the script has computed itself


class _Untrained(nn.Parameter):
    """A parameter that an engine trains a copy of: its shape, type and device may be read, its values may not."""

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
    """Whether an operation read a parameter to make or change another tensor."""
    if not isinstance(found, (Tensor, tuple, list)):
        return False
    written = args[0] if args and found is args[0] else None
    is_read = any(isinstance(leaf, _Untrained) and leaf is not written for leaf in pytree.tree_leaves(args))
    return is_read and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found))


def _is_trained_by_script(args: tuple[Any, ...]) -> bool:
    """Whether a parameter has a gradient: the script trains the model itself, outside the engine."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, _Untrained) and leaf.grad is not None for leaf in pytree.tree_leaves(args))


def _is_our_own() -> bool:
    """Whether Whale reads: for another engine of the same model, or another capture."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("whale.")


class _StaleModel:
    """Warns, once, where untrained values of the model are used; refuses to have its parameters read one by one."""

    def __init__(self, model: nn.Module, *, trains: bool, warns: bool) -> None:
        self._model, self._listens, self._warns = model, trains, warns
        self._handles: list[RemovableHandle] = []

    def listen(self) -> None:
        if self._listens and not self._handles:
            hook = _StaleHook(self)
            self._handles = [self._model.register_forward_pre_hook(hook), self._model.register_state_dict_pre_hook(hook)]  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = _Untrained

    def forget(self) -> None:
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
    """The hook: a copy of the model, which is stale too, keeps it; a pickled model does not."""

    def __init__(self, stale: _StaleModel | None) -> None:
        self._stale = stale

    def __call__(self, _: nn.Module, given: object, keep_vars: bool = False) -> None:
        """Called with the arguments of ``forward`` or of ``state_dict``; captures call it too, with ``keep_vars`` where they read names."""
        if not torch.compiler.is_exporting() and not keep_vars:
            self.tell()

    def tell(self) -> None:
        if self._stale is not None:
            self._stale.tell()

    def __deepcopy__(self, _: object) -> _StaleHook:
        return self

    def __reduce__(self) -> tuple[type[_StaleHook], tuple[None]]:
        self.tell()
        return _StaleHook, (None,)


def warn_of_hooks(model: nn.Module) -> None:
    """Warns of forward hooks of the user; torch's own (weight norm) are tensor operations only."""
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
