"""The state that a training starts from: weights that all ranks agree on, and the user's optimizer over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from whale.api.arguments import check_returned
from whale.api.modes import Modes
from whale.api.weights import agree_on_weights
from whale.comm import together
from whale.errors import ConfigError
from whale.runtime.execute.roster import Roster
from whale.runtime.state.elementwise import check_elementwise
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def initial_state(
    modes: Modes,
    roster: Roster,
    holdings: Holdings,
    seed: int,
    initialize: Callable[[nn.Module], None] | None,
    optimizer: MakeOptimizer | None,
    scheduler: MakeScheduler | None,
) -> EngineState:
    """Makes the state of this rank; all ranks of the world call it.

    Args:
        modes: the captured model.
        roster: who owns what.
        holdings: who holds which part of it.
        seed: of the weights of a model on the meta device.
        initialize: the user's own filling of one of its modules.
        optimizer: called with what this rank owns, if it owns anything.
        scheduler: called with the optimizer, if there is one.

    Raises:
        ConfigError: a function returned no optimizer or scheduler; or the optimizer would step a part of a parameter otherwise than
            the whole, or needs a closure.
    """
    world = roster.world

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        assert roster.rank is not None, "an idle rank owns nothing"
        return holdings.cut_out(name, roster.rank, whole)

    users = modes.train.program.tensors
    tensors = agree_on_weights(modes.model, users, roster.owned, roster.holders, world, seed, initialize, shard)
    state = EngineState(tensors)
    owned = list(state.parameters.items())
    state.optimizer = together(world, lambda: _made("optimizer", optimizer, owned or None))
    state.keep_to_itself()
    state.scheduler = together(world, lambda: _made("scheduler", scheduler, state.optimizer))
    together(world, lambda: _check_no_closure(state.optimizer))
    together(world, lambda: check_elementwise(state.optimizer, [name for name, _ in owned if holdings.is_sharded(name)]))
    return state


def _made(name: str, make: Callable[[Any], Any] | None, over: object) -> Any:
    """What the user's function makes over something; None where there is no function, or nothing to make it over."""
    if make is None or over is None:
        return None
    found = make(over)
    check_returned(name, found)
    return found


def _check_no_closure(optimizer: torch.optim.Optimizer | None) -> None:
    closure = None if optimizer is None else inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"an optimizer steps once for each batch, by the gradients at hand ({type(optimizer).__name__}.step needs a closure "
            "that computes the loss several times)",
            hint="use an optimizer without a closure, such as torch.optim.AdamW",
        )
