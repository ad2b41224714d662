"""What a script may change around an engine that a captured model cannot follow: found at the next step, and refused.

A capture decides which layers there are, which parameters are trained and in which types ops compute. What was frozen has no gradient
in it, and `torch.autocast` would change the types of some of its ops behind the plan's back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from whale.errors import CaptureError, WhaleError, first_few, raise_faults
from whale.ir.graph import ModelGraph


def check_types(device: torch.device) -> None:
    """Checks that no `torch.autocast` is in force.

    Raises:
        CaptureError: it is.
    """
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise CaptureError(
            f"a captured model computes in the types that it was built with (torch.autocast to {dtype} is in force on {device.type})",
            hint="write the autocast inside the model's forward, where it is captured, and none around parallelize and step",
        )


class SinceCapture:
    """Compares what is trained with what was to be trained when the model was captured.

    Args:
        model: the user's.
        graph: the captured model.
        users: the user's own tensors, by canonical name.
        owned: the engine's, likewise.
        device: where this rank computes.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ModelGraph,
        users: Mapping[str, torch.Tensor],
        owned: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._device = device
        self._parts = [
            (f"{path}.{name}".removeprefix("."), held, name, part)
            for path, module in model.named_modules()
            for held in (module._modules, module._parameters)
            for name, part in held.items()
        ]
        named = [(parameter.name, parameter.trainable) for parameter in graph.parameters if parameter.kind == "parameter"]
        self._flags = [(name, held[name], trains) for held in (users, owned) for name, trains in named if name in held]

    def check(self) -> None:
        """Checks that nothing has changed.

        Raises:
            CaptureError: a layer or parameter was replaced since, or frozen or unfrozen; or `torch.autocast` is in force.
        """
        check_types(self._device)
        replaced = [path for path, held, name, part in self._parts if held.get(name) is not part]
        if replaced:
            raise CaptureError(
                f"a model has the layers and parameters that it was captured with (replaced since: {first_few(replaced)})",
                hint="build the model before parallelize; to change it in mid-training call parallelize again, with the weights of "
                "engine.state_dict()",
            )
        changed = dict.fromkeys(name for name, tensor, trains in self._flags if tensor.requires_grad is not trains)
        if changed:
            raise_faults(list(_faults(list(changed), {name: trains for name, _, trains in self._flags})))


def _faults(names: list[str], was_trained: Mapping[str, bool]) -> list[WhaleError]:
    found: list[WhaleError] = []
    for then, word in ((False, "unfrozen"), (True, "frozen")):
        these = [name for name in names if was_trained[name] is then]
        if these:
            found.append(
                CaptureError(
                    f"which parameters are trained is decided when the model is captured ({word} since: {first_few(these)})",
                    hint="set requires_grad before parallelize; to change it in mid-training save, call parallelize again, and load",
                )
            )
    return found
