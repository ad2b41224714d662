"""The tensors of the model that the user gave: an engine trains copies, so what a script writes to them afterwards is told to be lost.

A target network that is synchronised by hand (``model.target.load_state_dict(...)``), weights that are loaded late or clamped after
each step: torch counts the writes to each tensor. A script that has asked the engine for its weights may put them into the model, to
look at it; so writes that follow `Engine.state_dict` are not told.
"""

from __future__ import annotations

from torch import Tensor, nn

from whale.errors import first_few, warn

_Place = tuple[dict[str, Tensor | None], str]
_State = dict[str, tuple[_Place, Tensor, int]]


class UsersTensors:
    """Parameters and buffers of the user's model: where each is kept, and the writes to it that have been seen.

    Args:
        model: the user's.
        tells: whether this rank says what it finds.
    """

    def __init__(self, model: nn.Module, *, tells: bool) -> None:
        self._model, self._tells = model, tells
        self._known = _state(model) if tells else {}
        self._has_weights = False

    def exchange(self) -> None:
        """Notes that the script has had weights from the engine, or has given it some: it may write them here too."""
        self._has_weights = True

    def look(self) -> None:
        """Warns, once, of what was written since the last look."""
        if not self._tells:
            return
        if self._has_weights:
            self._known, self._has_weights = _state(self._model), False
            return
        written = [
            name for name, ((held, key), tensor, count) in self._known.items() if held.get(key) is not tensor or _writes(tensor) != count
        ]
        if written:
            self._tells = False
            warn(
                "what is written to the model after parallelize does not reach the engine, which trains tensors of its own "
                f"(written since: {first_few(written)}); engine.load_state_dict takes weights, engine.state_dict gives them"
            )


def _state(model: nn.Module) -> _State:
    return {
        f"{path}.{key}".removeprefix("."): ((held, key), tensor, _writes(tensor))
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
