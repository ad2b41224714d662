"""`whale.parallelize`: from an ordinary model to an engine on the devices of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.api.attach import attach
from whale.api.engine import Engine
from whale.api.mode import CapturedMode
from whale.api.session import resolve_config
from whale.api.weights import agree_on_weights
from whale.comm import World, connect, on_first_rank, together
from whale.config import Config
from whale.errors import CaptureError, ConfigError, PlanError
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import from_json
from whale.planning import make_plan
from whale.planning.verify import verify
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.runtime.state.partial import partial_parameters
from whale.schedules import schedules_of


def parallelize(
    model: nn.Module,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    batch: Any,
    config: Config | dict[str, object] | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
) -> Engine:
    """Plans a model for a cluster and makes the engine that trains it there.

    The user's model is not modified: the engine holds copies of the parameters that this rank owns.

    Args:
        model: any model that `torch.export` captures; it may be on the meta device.
        loss: ``loss(output, batch)`` returns a scalar, or ``(sum, weight)``; None takes ``output.loss``.
        optimizer: called once with the list of (name, owned parameter); None trains nothing by itself
            (`Engine.gradients` has the gradients).
        scheduler: called with the optimizer, stepped after each applied step.
        batch: an example of the global batch, of at least 2 rows. A mapping goes to the model as the keyword arguments
            that its forward takes, a tuple positionally.
        config: settings; wins over `whale.init`. Environment variables and ``whale run --recipe`` win over it.
        cluster: a cluster file or value; None takes the devices at hand.
        plan: a plan made before, as a value or a JSON file; None plans.
        initialize: fills the tensors of one module of a model on the meta device.

    Returns:
        The engine, on every rank.

    Raises:
        WhaleError: see the subclasses; everything is checked before the first step, on all ranks.
    """
    _check_arguments(model, loss=loss, optimizer=optimizer, scheduler=scheduler, initialize=initialize)
    settings = resolve_config(config)
    world = connect(settings.communication.timeout_seconds)
    attachment = attach(cluster if cluster is not None else settings.cluster.file, world)
    train = together(world, lambda: CapturedMode(model, batch, loss, "train"))
    _compare_captures(train.graph, world)
    decided = on_first_rank(world, lambda: _plan(plan, train.graph, attachment.cluster, settings))
    schedules = schedules_of(decided)
    rank = {name: position for position, name in enumerate(decided.devices)}
    mine = [name for name, world_rank in attachment.rank_of.items() if world_rank == world.rank and name in rank]
    owned = [name for name, owners in decided.owners.items() if mine and rank[mine[0]] in owners]
    holders = {name: tuple(sorted(attachment.rank_of[decided.devices[r]] for r in owners)) for name, owners in decided.owners.items()}
    axes = discover_if_sharded(decided, train.graph)
    holdings = Holdings(decided, axes, partial_parameters(decided, train.graph, train.program.graph, axes))
    tensors = agree_on_weights(
        model,
        train.program.tensors,
        owned,
        holders,
        world,
        settings.runtime.seed,
        initialize,
        lambda name, whole: holdings.cut_out(name, rank[mine[0]], whole),
    )
    return Engine(
        model=model,
        loss=loss,
        train=train,
        plan=decided,
        schedules=schedules,
        config=settings,
        world=world,
        attachment=attachment,
        holdings=holdings,
        tensors=tensors,
        optimizer=optimizer,
        scheduler=scheduler,
    )


def _compare_captures(graph: ModelGraph, world: World) -> None:
    """Fails before any group is made where ranks captured different models."""
    prints = world.gather_objects(graph.fingerprint)
    odd = [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]
    if odd:
        raise CaptureError(
            f"every rank must capture the same model (ranks {odd} differ from rank 0)",
            hint="build the model, its scopes and the example batch's shapes the same on every rank; no random structure",
        )


def _plan(plan: Plan | str | Path | None, graph: ModelGraph, cluster: Cluster, config: Config) -> Plan:
    if plan is None:
        return make_plan(graph, cluster, config)
    given = plan if isinstance(plan, Plan) else _read_plan(Path(plan))
    if given.model != graph.fingerprint:
        raise PlanError(
            f"a plan serves the model it was made for (plan: {given.model}, this model: {graph.fingerprint})",
            hint="plan again: the model, its scopes or the example batch have changed",
        )
    verify(given, graph, cluster)
    return given


def _read_plan(path: Path) -> Plan:
    try:
        return from_json(Plan, path.read_text())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}", hint="whale plan ... --output FILE writes one") from error
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise PlanError(f"{path} is not a plan: {error}", hint="whale plan ... --output FILE writes one") from error


def _check_arguments(model: object, **functions: object) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model is a torch.nn.Module (got {type(model).__name__})")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(
                f"{name}= is a function that whale calls, or None (got {type(function).__name__})", hint=_FUNCTION_HINTS.get(name)
            )


_FUNCTION_HINTS = {
    "optimizer": "pass functools.partial(torch.optim.AdamW, lr=3e-4): whale hands it the (name, parameter) pairs that a rank owns",
    "scheduler": "pass a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "loss": "loss(output, batch) returns a scalar or (sum, weight)",
}
