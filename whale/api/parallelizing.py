"""`whale.parallelize`: from an ordinary model to an engine on the devices of a plan."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from whale.api.calls import user_call
from whale.api.engine import Engine
from whale.api.guards import check_types, warn_of_hooks
from whale.api.hints import warn_of_evaluation_mode
from whale.api.initial_state import MakeOptimizer, MakeScheduler, initial_state
from whale.api.modes import Modes
from whale.api.opening import Opening, attach, compare_settings
from whale.capture import BatchDims, plain
from whale.capture.exporting.wrapper import call_arguments
from whale.comm import World, connect, on_first_rank, together
from whale.config import Config, Source, load_config
from whale.errors import CaptureError, ConfigError, WhaleError, warn
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.profile import read_profile
from whale.planning.explain.choices import other_stages
from whale.progress import progress


@user_call
def parallelize(
    model: nn.Module,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    batch: Any,
    config: Source = None,
    cluster: Cluster | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
    batch_dims: BatchDims | None = None,
) -> Engine:
    """Plans a model for a cluster and makes the engine that trains it there.

    The user's model is not modified: the engine holds copies of the parameters that this rank owns.

    Args:
        model: any model that `torch.export` captures; it may be on the meta device.
        loss: ``loss(output, batch)`` returns a scalar, or ``(sum, weight)``, or a mapping that has one of these as ``"loss"`` and
            scalars as `Engine.metrics`; None takes ``output.loss``. One whose second
            argument is called ``target``, as those of torch, gets the one part of the batch that forward does not take.
        optimizer: called once with the list of (name, owned parameter); None trains nothing by itself
            (`Engine.gradients` has the gradients). Several, by patterns of names: ``{"blocks.*.weight": one, "*": other}``; the first
            that matches has a parameter.
        scheduler: called with the optimizer, stepped after each applied step; by the same patterns, one for each optimizer.
        batch: an example of the global batch, of at least 2 rows. A mapping goes to the model as the keyword arguments
            that its forward takes, a tuple positionally.
        config: settings; wins over `whale.init`. Environment variables and ``whale run --recipe`` win over it.
        cluster: a cluster file or value; None takes this machine's devices.
        plan: a plan made before, as a value or a JSON file; None plans.
        initialize: fills the tensors of one module of a model on the meta device.
        batch_dims: per tensor of the batch, by its key, 0 where it has rows and None where it is whole on every rank; of the others,
            those have rows whose dimension 0 is as large as that of most.

    Returns:
        The engine, on every rank.

    Warns:
        UserWarning: the model or its loss mixes samples that the plan computes separately; names the lines.

    Raises:
        WhaleError: see the subclasses; everything is checked before the first step, on all ranks.
    """

    def resolve() -> Config:
        kinds = {"cluster": (cluster, (Cluster, str, Path)), "plan": (plan, (Plan, str, Path))}
        _check_arguments(model, kinds, loss=loss, initialize=initialize, **_functions(optimizer=optimizer, scheduler=scheduler))
        _check_patterns(optimizer, scheduler)
        return resolve_config(config)

    world, settings = _join(resolve)
    with world.all_ranks():
        model, settings = _uncompiled(model, settings, tells=world.rank == 0)
        together(world, lambda: check_types(world.device))
        if world.rank == 0:
            warn_of_hooks(model)
            warn_of_evaluation_mode(model)
        on_first_rank(world, lambda: _warn_of_profile(settings.cluster.profile))
        attachment = attach(settings.cluster, world, cluster)
        with progress("capturing the model", on_first=world.rank == 0):
            loss_of = together(world, lambda: _as_loss(loss, model, batch))
            if settings.precision.dtype == "tf32":
                torch.set_float32_matmul_precision("high")
            precision = together(world, lambda: attachment.precision(settings, world.rank))
            modes = Modes(model, loss_of, batch, world, settings.runtime, batch_dims, precision)
        opening = Opening(world, modes, attachment, settings, optimizer, scheduler, plan)
        decided, begun = opening.decide(), time.perf_counter()
        roster, holdings = opening.prepare(decided.plan)
        texts = (*modes.train.program.warnings, other_stages(settings.pipeline.num_stages, decided.plan))
        for text in filter(None, texts if world.rank == 0 else ()):
            warn(text)
        with progress("creating weights and process groups", on_first=world.rank == 0):
            state = initial_state(modes, roster, holdings, settings.runtime.seed, initialize, optimizer, scheduler)
            state.scaling = opening.scaling(decided.plan)
            runtime, tracing = opening.open(roster, holdings, state)
        return Engine(modes, state, runtime, opening, decided, tracing=tracing, overhead=decided.seconds + time.perf_counter() - begun)


def _uncompiled(model: nn.Module, settings: Config, *, tells: bool) -> tuple[nn.Module, Config]:
    """The module inside one made by torch.compile, and the settings by which its programs are compiled instead."""
    inner = getattr(model, "_orig_mod", model)
    is_compiled = any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())
    if is_compiled and settings.runtime.compile is None:
        settings = settings.with_values({"runtime.compile": True})
        if tells:
            print("whale: the model was given through torch.compile, so its stages are compiled (runtime.compile)", file=sys.stderr)
    elif is_compiled and not settings.runtime.compile and tells:
        warn("the model is a torch.compile module, but runtime.compile is false: nothing is compiled")
    return inner, settings


_SESSION: ContextVar[Config | None] = ContextVar("whale_session", default=None)


def init(config: Source = None) -> Config:
    """Sets the configuration for the engines made from here on; optional.

    Args:
        config: a `Config`, a mapping of ``section.key`` to values, or the path of a recipe. ``config=`` of
            `parallelize` wins over it key by key.

    Raises:
        ConfigError: unknown keys or wrong values.
    """
    settings = load_config(config, environment={})
    _SESSION.set(settings)
    return settings


def resolve_config(config: Source) -> Config:
    """The configuration of one engine, from all its sources."""
    return load_config(config, environment=os.environ, base=_SESSION.get())


def _join(resolve: Callable[[], Config]) -> tuple[World, Config]:
    """Joins the world with the settings that `resolve` gives; where it fails on one rank, it fails on all."""
    fault: WhaleError | None = None
    try:
        settings = resolve()
    except WhaleError as error:
        settings, fault = Config(), error
    world = connect(settings.communication.timeout_seconds)

    def found() -> Config:
        if fault is not None:
            raise fault
        return settings

    together(world, found)
    compare_settings(settings, world)
    return world, settings


def _functions(**arguments: object) -> dict[str, object]:
    """Functions, or functions by pattern, by their names in messages."""
    found: dict[str, object] = {}
    for name, value in arguments.items():
        found |= {f"{name}[{key!r}]": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def _check_patterns(optimizer: object, scheduler: object) -> None:
    """Raises `ConfigError` where schedulers are given by patterns of which no optimizer is."""
    if not isinstance(scheduler, Mapping):
        return
    known = optimizer if isinstance(optimizer, Mapping) else {}
    if unknown := [pattern for pattern in scheduler if pattern not in known]:
        raise ConfigError(
            f"scheduler= has patterns that optimizer= lacks ({', '.join(map(repr, unknown))})",
            hint="pass one function for all, or some of the patterns of optimizer=",
        )


_HINTS = {
    "optimizer": "pass functools.partial(torch.optim.AdamW, lr=3e-4): whale hands it the (name, parameter) pairs that a rank owns",
    "scheduler": "pass a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "loss": "loss(output, batch) returns a scalar or (sum, weight)",
}


def _check_arguments(model: object, kinds: Mapping[str, tuple[object, tuple[type, ...]]], **functions: object) -> None:
    """Checks the model, optional arguments by their types, and functions.

    Raises:
        CaptureError: the model is no module.
        ConfigError: a function is not callable, or another argument has a wrong type.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model= is {type(model).__name__}, not a torch.nn.Module")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}= is {type(function).__name__}, not a function or None", hint=_HINTS.get(name.partition("[")[0]))
    for name, (value, wanted) in kinds.items():
        if value is not None and not isinstance(value, wanted):
            listing = ", ".join(kind.__name__ for kind in wanted)
            raise ConfigError(f"{name}= is {type(value).__name__}, not one of {listing}, or None")


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _as_loss(loss: Callable[..., Any] | None, model: nn.Module, batch: Any) -> Callable[..., Any] | None:
    """The loss, called as ``loss(output, batch)``; one with a second argument ``target``, as torch's, gets the part that forward leaves.

    Raises:
        ConfigError: there is no such part, or there are several; or torch's loss takes something else.
        BatchError: the batch lacks what forward requires.
    """
    takes: list[str] = []
    if loss is not None:
        with suppress(TypeError, ValueError):  # of what is no Python function
            parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
            takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    name, takes_target = getattr(loss, "__name__", type(loss).__name__), takes[1:2] == ["target"]
    if loss is None or not (takes_target or isinstance(loss, _Loss)):
        return loss
    left = _left_over(model, batch) if takes_target else []
    if len(left) != 1:
        found = f"({', '.join(takes)})"
        if takes_target:
            listing = ", ".join(map(repr, left)) or "none"
            found = f"the output and one target, the part of the batch that forward does not take ({listing})"
        wanted = ", ".join(f"batch[{each!r}]" for each in (takes[1:2] if takes_target else takes[1:]))
        raise ConfigError(
            f"loss= is called as loss(output, batch), but {name} takes {found}",
            hint=f"loss=lambda output, batch: {name}(output, {wanted})",
        )
    key = left[0]

    def of_target(output: Any, batch: Any) -> Any:
        return loss(output, plain(batch)[key])

    return of_target


def _left_over(model: nn.Module, batch: Any) -> list[Any]:
    """Keys, or positions, of the tensors of a batch that the model does not take."""
    args, kwargs = call_arguments(model, batch)
    if isinstance(named := plain(batch), Mapping) and not args:
        return [key for key, value in named.items() if key not in kwargs and isinstance(value, Tensor)]
    return list(range(len(args), len(batch))) if isinstance(batch, (tuple, list)) else []


def _warn_of_profile(file: str | None) -> None:
    """Warns of devices or a torch version that a profile does not cover; a ConfigError where the file is no profile."""
    if file is None:
        return
    profile = read_profile(file)
    for warning in profile.warnings:
        warn(warning)
    for version in sorted({kind.torch for kind in profile.kinds} - {torch.__version__}):
        warn(f"the profile {file} was measured with torch {version}, this is torch {torch.__version__}; whale profile measures it again")
