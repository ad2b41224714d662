"""The user's optimizer, made over what a rank owns, and what is said of one that asks for more than that.

A plan that cuts a model into stages or layers gives each rank some of its parameters. An optimizer that steps each of them by itself does
there what it does over a whole model; one that reads them all (a clipped norm, a trust ratio of the model) cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from whale.api.arguments import check_returned
from whale.comm import World, together
from whale.errors import ConfigError, WhaleError, first_few, warn
from whale.runtime.state.elementwise import check_elementwise

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def make_optimizer(
    make: MakeOptimizer | None, owned: Mapping[str, nn.Parameter], sharded: Collection[str], trained: Collection[str], world: World
) -> torch.optim.Optimizer | None:
    """Makes the optimizer of this rank; all ranks of the world call it.

    Args:
        make: the user's function.
        owned: the parameters of this rank, by name.
        sharded: those of which it has a part.
        trained: the names of all parameters that are trained, on whatever rank.
        world: this process among its peers.

    Returns:
        None where there is no function, or this rank owns nothing.

    Warns:
        UserWarning: the optimizer may look at all of its parameters at once, and some rank has not all of them.

    Raises:
        ConfigError: the function returned no optimizer, one of other parameters, one that needs a closure, or one that would step a part
            of a parameter otherwise than the whole; or it fails on the parameters of one rank.
    """
    lacks_some = bool(sharded) or not set(trained) <= owned.keys()
    optimizer = together(world, lambda: _made(make, owned, lacks_some))
    together(world, lambda: _check_no_closure(optimizer))
    together(world, lambda: check_elementwise(optimizer, list(sharded)))
    reason = _reason_to_look_at_all(optimizer) if lacks_some else ""
    told = {rank: said for rank, said in enumerate(world.gather_objects(reason)) if said}
    if told and world.rank == 0:
        ranks = first_few(list(map(str, told)))
        warn(
            f"the optimizer of a rank has the parameters of that rank alone ({next(iter(told.values()))}; not all of them are on "
            f"rank {ranks}): what it works out over several parameters, such as a norm that it clips by, is that of its own; "
            "gradient.clip_norm clips by the norm of all gradients"
        )
    return optimizer


def make_scheduler(make: MakeScheduler | None, optimizer: torch.optim.Optimizer | None, world: World) -> Any:
    """Makes the scheduler of this rank's optimizer, if there are both; all ranks of the world call it.

    Raises:
        ConfigError: the function returned no scheduler.
    """

    def made() -> Any:
        if make is None or optimizer is None:
            return None
        found = make(optimizer)
        check_returned("scheduler", found)
        return found

    return together(world, made)


def _made(make: MakeOptimizer | None, owned: Mapping[str, nn.Parameter], lacks_some: bool) -> torch.optim.Optimizer | None:
    if make is None or not owned:
        return None
    try:
        found = make(list(owned.items()))
    except WhaleError:
        raise
    except Exception as error:
        if not lacks_some:
            raise
        raise ConfigError(
            f"optimizer= makes an optimizer of the parameters that a rank has, which are not all ({first_few(list(owned))}: "
            f"{type(error).__name__}: {error})",
            hint="leave out parameter groups that are empty there: [group for group in groups if group['params']]",
        ) from error
    check_returned("optimizer", found)
    _check_own(found, owned)
    return found


def _check_own(optimizer: torch.optim.Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
    """An optimizer made beside the engine, or over the parameters of the user's model, would train nothing."""
    own = {id(parameter) for parameter in owned.values()}
    others = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in own]
    if others:
        shapes = first_few([str(list(parameter.shape)) for parameter in others])
        raise ConfigError(
            f"optimizer= makes an optimizer of the parameters that it is given ({len(others)} of {type(optimizer).__name__}'s are others, "
            f"of shapes {shapes})",
            hint="the engine trains parameters of its own: functools.partial(torch.optim.AdamW, lr=3e-4) gets them with their names",
        )


def _check_no_closure(optimizer: torch.optim.Optimizer | None) -> None:
    closure = None if optimizer is None else inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"an optimizer steps once for each batch, by the gradients at hand ({type(optimizer).__name__}.step needs a closure "
            "that computes the loss several times)",
            hint="use an optimizer without a closure, such as torch.optim.AdamW",
        )


def _reason_to_look_at_all(optimizer: torch.optim.Optimizer | None) -> str:
    """Why an optimizer may do more than step each parameter by itself, as torch's own do; "" where nothing says so."""
    if optimizer is None:
        return ""
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return f"{name} is none of torch's"
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return f"{name} has hooks on its step" if any(hooks) else ""
