"""What `parallelize` is given, checked before anything is done with it."""

from __future__ import annotations

from torch import nn

from whale.errors import CaptureError, ConfigError

_HINTS = {
    "optimizer": "pass functools.partial(torch.optim.AdamW, lr=3e-4): whale hands it the (name, parameter) pairs that a rank owns",
    "scheduler": "pass a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "loss": "loss(output, batch) returns a scalar or (sum, weight)",
}


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
