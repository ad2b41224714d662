"""What an engine returns to the script: the loss of a step, its parameters, its weights under the keys of the user's state dict."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from whale.errors import CheckpointError, ConfigError
from whale.ir.graph import ModelGraph


class OwnedParameters(dict[str, nn.Parameter]):
    """Parameters by name; ``engine.parameters()`` iterates over them. ``asked`` is called where the script goes through their values."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], asked: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __call__(self) -> Iterator[nn.Parameter]:
        return iter(self.values())

    def values(self) -> ValuesView[nn.Parameter]:  # type: ignore[override]
        self._asked()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter]:  # type: ignore[override]
        self._asked()
        return super().items()


class Gradients(dict[str, torch.Tensor]):
    """Gradients by name. Their tensors may be written; the mapping is a copy, so what is put into it would be lost, and is refused."""

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        if value is not self.get(name):  # after gradients[name] *= mask it is
            raise _read_only(name)

    def __delitem__(self, name: str) -> None:
        raise _read_only(name)

    def __ior__(self, other: Any) -> NoReturn:  # type: ignore[misc]
        raise _read_only(next(iter(self), "name"))

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise _read_only(next(iter(self), "name"))

    update = pop = popitem = clear = setdefault = _refused

    def __reduce__(self) -> tuple[type[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor]]]:
        """A copy, pickled or not, is a plain dict."""
        return dict, (dict(self),)


def _read_only(name: str) -> ConfigError:
    return ConfigError(
        f"engine.gradients() is a copy of the mapping: what is put in for {name!r} would not be applied",
        hint=f"write into the tensor: engine.gradients()[{name!r}].mul_(mask), or .copy_(other)",
    )


_EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def state_keys(model: nn.Module, graph: ModelGraph) -> dict[str, str | None]:
    """Per key of ``model.state_dict()``, in its order, the canonical name of the tensor; None of what the engine has no tensor for.

    Raises:
        CheckpointError: a hook has added a tensor that is not the model's own: it would be that of the untrained model.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own = {id(tensor): name for name, tensor in named}
    found: dict[str, str | None] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = own.get(id(value))
        if name is None and isinstance(value, torch.Tensor) and not key.endswith(_EXTRA):
            raise CheckpointError(
                f"{key} of the state dict is a tensor made by a hook, not a parameter or buffer of the model",
                hint="a hook of state_dict may rename keys; compute other tensors from engine.state_dict()",
            )
        found[key] = None if name is None else graph.parameter_by_name[name].name
    return found


def whole_state(model: nn.Module, names: Mapping[str, str | None], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict of trained tensors, by canonical name; other entries are the model's of now."""
    others = model.state_dict(keep_vars=True) if None in names.values() else {}
    return {key: others[key] if name is None else tensors[name] for key, name in names.items()}


def give_extra_state(model: nn.Module, names: Mapping[str, str | None], state: Mapping[str, Any]) -> None:
    for key, name in names.items():
        if name is None and key in state and key.endswith(_EXTRA):
            model.get_submodule(key.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(state[key])


_DIFFERENTIATING = frozenset({torch.Tensor.backward, torch.autograd.grad})
_SCALING = frozenset({torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.div, torch.Tensor.__truediv__})


class StepLoss(torch.Tensor):
    """A 0-dim tensor without a graph behind it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DIFFERENTIATING:
            raise ConfigError(
                "backward() was called on the loss of engine.step or engine.evaluate; engine.step has run backward and the optimizer",
                hint="leave out loss.backward(), optimizer.step() and a GradScaler; engine.gradients() has the gradients of the step",
            )
        plain_args, plain_kwargs = pytree.tree_map_only(StepLoss, _as_plain, (args, dict(kwargs or {})))
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            raise ConfigError(
                "the loss of a step was combined with a tensor that requires a gradient, but it has no autograd graph",
                hint="add the term to the loss= of parallelize, or use loss.detach() for the number",
            )
        return step_loss(result) if func in _SCALING else result


def _as_plain(loss: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(torch.Tensor)


def step_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss as the user gets it; a tensor that is of a class of its own already stays of it."""
    return loss.as_subclass(StepLoss) if type(loss) is torch.Tensor else loss
