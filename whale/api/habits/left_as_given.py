"""The model that the user gave, asked for its weights or its output after training: it has those that it was given, which is told.

An engine trains copies. Who saves ``model.state_dict()`` or the model at the end, or validates by ``model(x)``, would have an untrained
model and no word of it. torch's own hooks of modules hear of these; they are silent once they have spoken, and taken away when the
script has weights from the engine, which it may put into the model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from whale.errors import warn


class LeftAsGiven:
    """Warns, once, where the model is asked for what training has not changed.

    Args:
        model: the user's.
        tells: whether this rank says what it finds.
    """

    def __init__(self, model: nn.Module, *, tells: bool) -> None:
        self._model, self._tells = model, tells
        self._handles: list[RemovableHandle] = []

    def trained(self) -> None:
        """Notes that the engine has trained: from now on the model lags behind."""
        if self._tells and not self._handles:
            heard = _Heard(self)
            self._handles = [self._model.register_forward_pre_hook(heard), self._model.register_state_dict_pre_hook(heard)]  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Listens no more."""
        self._tells = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def tell(self) -> None:
        """Warns at the line that asked."""
        if self._tells:
            self._tells = False  # torch is going through the hooks: none is taken away now
            warn(
                "the model that parallelize was given has the weights that it had then: the engine trains tensors of its own; "
                "engine.state_dict() gives the trained ones, engine.predict(batch) their output"
            )


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
