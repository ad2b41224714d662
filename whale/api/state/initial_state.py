"""The state that a training starts from: weights that all ranks agree on, and the user's optimizer over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from whale.api.modes import Modes
from whale.api.state.optimizers import MakeOptimizer, MakeScheduler, make_optimizer, make_scheduler
from whale.api.state.weights import agree_on_weights
from whale.comm import World
from whale.ir.graph import ModelGraph
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings


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
        ConfigError: as `make_optimizer` and `make_scheduler`.
    """
    world = roster.world

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        assert roster.rank is not None, "an idle rank owns nothing"
        return holdings.cut_out(name, roster.rank, whole)

    users = modes.train.program.tensors
    tensors = agree_on_weights(modes.model, users, roster.owned, roster.holders, world, seed, initialize, shard)
    state = EngineState(tensors)
    with_optimizer(state, modes.train.graph, holdings, optimizer, scheduler, world)
    return state


def with_optimizer(
    state: EngineState,
    graph: ModelGraph,
    holdings: Holdings,
    optimizer: MakeOptimizer | None,
    scheduler: MakeScheduler | None,
    world: World,
) -> None:
    """Gives a state the user's optimizer over its parameters, and the scheduler; all ranks of the world call it.

    Raises:
        ConfigError: as `make_optimizer` and `make_scheduler`.
    """
    sharded = [name for name in state.parameters if holdings.is_sharded(name)]
    state.optimizer = make_optimizer(optimizer, state.parameters, sharded, graph.trained, world)
    state.keep_to_itself()
    state.scheduler = make_scheduler(scheduler, state.optimizer, world)
    state.noted_settings = state.settings
