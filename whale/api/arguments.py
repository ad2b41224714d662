"""What `parallelize` is given, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from whale.errors import CaptureError, ConfigError

_HINTS = {
    "optimizer": "pass functools.partial(torch.optim.AdamW, lr=3e-4): whale hands it the (name, parameter) pairs that a rank owns",
    "scheduler": "pass a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "loss": "loss(output, batch) returns a scalar or (sum, weight)",
}

_RETURNED = {"optimizer": ("an optimizer", ("step", "param_groups", "state_dict")), "scheduler": ("a scheduler", ("step",))}


def check_arguments(model: object, **functions: object) -> None:
    """Checks the kinds of the model and of the functions that are called for it.

    Raises:
        CaptureError: the model is no module.
        ConfigError: something that is called is no function.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model is a torch.nn.Module (got {type(model).__name__})")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}= is a function that whale calls, or None (got {type(function).__name__})", hint=_HINTS.get(name))


def check_kind(name: str, value: object, kinds: Sequence[type]) -> None:
    """Checks the kind of an argument that may be left out.

    Raises:
        ConfigError: it is none of the kinds, nor None.
    """
    if value is not None and not isinstance(value, tuple(kinds)):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name}= is one of {wanted}, or None (got {type(value).__name__})")


def check_returned(name: str, value: object) -> None:
    """Checks what the function that was given as ``optimizer=`` or ``scheduler=`` has returned.

    Raises:
        ConfigError: nothing that can be stepped.
    """
    kind, wanted = _RETURNED[name]
    if not all(hasattr(value, each) for each in wanted):
        returned = "None" if value is None else type(value).__name__
        raise ConfigError(f"{name}= must return {kind} (it returned {returned})", hint="a function that makes one has to return it")
