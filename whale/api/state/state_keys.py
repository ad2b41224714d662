"""The keys of the user's state dict: which tensor of the engine each of them names, and what else the model puts into it.

Modules may rename their keys in a hook, and keep values of their own beside tensors (`get_extra_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from whale.errors import CheckpointError
from whale.ir.graph import ModelGraph

_EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def state_keys(model: nn.Module, graph: ModelGraph) -> dict[str, str | None]:
    """Per key of ``model.state_dict()``, in its order, the canonical name of the tensor; None of what is no tensor of the engine's.

    Raises:
        CheckpointError: a hook has put a tensor there that is none of the model's own: it would be that of the untrained model.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own = {id(tensor): name for name, tensor in named}
    found: dict[str, str | None] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = own.get(id(value))
        if name is None and isinstance(value, torch.Tensor) and not key.endswith(_EXTRA):
            raise CheckpointError(
                f"a state dict holds parameters and buffers of the model ({key} is a tensor that a hook has made)",
                hint="a hook of state_dict may rename keys; what it works out is best worked out from engine.state_dict()",
            )
        found[key] = None if name is None else graph.parameter_by_name[name].name
    return found


def whole_state(model: nn.Module, names: Mapping[str, str | None], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict of trained tensors, by canonical name; what else belongs to it is as the model has it now."""
    others = model.state_dict(keep_vars=True) if None in names.values() else {}
    return {key: others[key] if name is None else tensors[name] for key, name in names.items()}


def give_extra_state(model: nn.Module, names: Mapping[str, str | None], state: Mapping[str, Any]) -> None:
    """Gives modules the values of their own that a state dict has."""
    for key, name in names.items():
        if name is None and key in state and key.endswith(_EXTRA):
            model.get_submodule(key.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(state[key])
