"""`whale.parallelize`: from an ordinary model to an engine on the devices of a plan, one pass after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.api.arguments import check_arguments, check_kind
from whale.api.attach import attach
from whale.api.engine import Engine
from whale.api.habits.elsewhere import warn_of_evaluation_mode
from whale.api.habits.hooks import warn_of_hooks
from whale.api.habits.since_capture import check_types
from whale.api.inference import out_of_inference_mode
from whale.api.joining import join
from whale.api.losses import as_loss
from whale.api.modes import Modes
from whale.api.opening import Opening
from whale.api.profiled import warn_of_profile
from whale.api.session import resolve_config
from whale.api.state.initial_state import initial_state
from whale.api.tracebacks import in_short
from whale.capture import BatchDims
from whale.comm import on_first_rank, together
from whale.config import Config
from whale.errors import warn
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.telling import told_if_long


@in_short
@out_of_inference_mode
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
    batch_dims: BatchDims | None = None,
) -> Engine:
    """Plans a model for a cluster and makes the engine that trains it there.

    The user's model is not modified: the engine holds copies of the parameters that this rank owns.

    Args:
        model: any model that `torch.export` captures; it may be on the meta device.
        loss: ``loss(output, batch)`` returns a scalar, or ``(sum, weight)``; None takes ``output.loss``. One whose second
            argument is called ``target``, as those of torch, gets the one part of the batch that forward does not take.
        optimizer: called once with the list of (name, owned parameter); None trains nothing by itself
            (`Engine.gradients` has the gradients).
        scheduler: called with the optimizer, stepped after each applied step.
        batch: an example of the global batch, of at least 2 rows. A mapping goes to the model as the keyword arguments
            that its forward takes, a tuple positionally.
        config: settings; wins over `whale.init`. Environment variables and ``whale run --recipe`` win over it.
        cluster: a cluster file or value; None takes the devices at hand.
        plan: a plan made before, as a value or a JSON file; None plans.
        initialize: fills the tensors of one module of a model on the meta device.
        batch_dims: per tensor of the batch, by its key, 0 where it has rows and None where it is whole on every rank; of the others,
            those have rows whose dimension 0 is as large as that of most.

    Returns:
        The engine, on every rank.

    Warns:
        UserWarning: the model or its loss mixes samples that the plan computes apart; names the lines.

    Raises:
        WhaleError: see the subclasses; everything is checked before the first step, on all ranks.
    """

    def resolve() -> Config:
        check_arguments(model, loss=loss, optimizer=optimizer, scheduler=scheduler, initialize=initialize)
        check_kind("cluster", cluster, (Cluster, str, Path))
        check_kind("plan", plan, (Plan, str, Path))
        return resolve_config(config)

    world, settings = join(resolve)
    with world.in_company():
        together(world, lambda: check_types(world.device))
        if world.rank == 0:
            warn_of_hooks(model)
            warn_of_evaluation_mode(model)
        on_first_rank(world, lambda: warn_of_profile(settings.cluster.profile))
        attachment = attach(cluster if cluster is not None else settings.cluster.file, world, settings.cluster.devices)
        with told_if_long("capturing the model", on_first=world.rank == 0):
            loss_of = together(world, lambda: as_loss(loss, model, batch))
            modes = Modes(model, loss_of, batch, world, settings.runtime.num_sizes, batch_dims, settings.runtime.retrace)
        opening = Opening(world, modes, attachment, settings, optimizer, scheduler)
        roster, holdings = opening.prepare(opening.decide(plan))
        for text in modes.train.program.warnings if world.rank == 0 else ():
            warn(text)
        with told_if_long("making weights and process groups", on_first=world.rank == 0):
            state = initial_state(modes, roster, holdings, settings.runtime.seed, initialize, optimizer, scheduler)
            runtime, tracing = opening.open(roster, holdings, state)
        return Engine(modes, state, runtime, opening, tracing=tracing)
