"""The initial state of a training: weights that all ranks agree on, and the user's optimizer over them.

A model with real tensors keeps them, a meta model is filled from the seed. Under a plan that cuts a model a rank has some of the
parameters: an optimizer that steps each by itself works as over a whole model, one that reads them all (a norm, a trust ratio) cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.api.modes import Modes
from whale.comm import Groups, World, flat_bytes, together
from whale.errors import ConfigError, WhaleError, first_few, warn
from whale.ir.graph import ModelGraph
from whale.runtime.execute.equal_copies import checksum
from whale.runtime.execute.roster import Roster
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.joint import JointOptimizer, JointScheduler, Pattern, check_elementwise, divided, members_of
from whale.runtime.state.publishing import home, in_forms
from whale.runtime.weights.initialize import initial_tensors
from whale.units import counted

MakeOne = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeOptimizer = MakeOne | Mapping[Pattern, MakeOne]
MakeScheduler = Callable[[torch.optim.Optimizer], Any] | Mapping[Pattern, Callable[[torch.optim.Optimizer], Any]]


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
        roster, holdings: who owns what, and which part of it.
        seed: of the weights of a model on the meta device.
        initialize: the user's own filling of one of its modules.
        optimizer, scheduler: the user's functions.

    Raises:
        ConfigError: as `make_optimizer` and `make_scheduler`.
    """
    world, model, users = roster.world, modes.model, modes.train.program.tensors

    def shard(name: str, whole: torch.Tensor) -> torch.Tensor:
        assert roster.rank is not None, "an idle rank owns nothing"
        return holdings.cut_out(name, roster.rank, whole)

    def device(name: str) -> torch.device:
        return home(holdings.plan.state_of(name).compute, world.device)

    owned = roster.owned
    tensors = together(world, lambda: initial_tensors(model, owned, seed=seed, initialize=initialize, device=device, shard=shard))
    if not world.is_alone:
        real = {name: users[name].detach() for name, tensor in users.items() if not tensor.is_meta and name in roster.holders}
        _take_from_rank_0(tensors, real, roster, shard)
    state = EngineState(*in_forms(holdings, roster.rank, tensors, world.device))
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
    """Gives a state the user's optimizer and scheduler; all ranks of the world call it. Raises as `make_optimizer` and `make_scheduler`."""
    shapes = {name: graph.parameter_by_name[name].spec.shape for name in state.kept}
    stepped = {name: own for name, own in state.kept.items() if own.requires_grad}
    in_parts = {name: holdings.shardings.is_cut_by_keepers(name) for name, own in stepped.items() if own.shape != shapes[name]}
    state.optimizer = make_optimizer(optimizer, state.kept, in_parts, graph.trained, world)
    state.forbid_outside_steps()
    state.scheduler = make_scheduler(scheduler, state.optimizer, world)
    state.note_settings()


def _take_from_rank_0(
    tensors: Mapping[str, torch.Tensor],
    real: Mapping[str, torch.Tensor],
    roster: Roster,
    shard: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Where ranks built the model with different weights, sends those of rank 0, whole and one at a time, with one warning."""
    world = roster.world
    mine = real if world.rank == 0 else {name: real[name] for name in tensors if name in real}
    started = {name: checksum(value.detach()) for name, value in mine.items()}
    sums = world.gather_objects({name: int(digest) for name, digest in started.items()})
    by_rank = [each for each in sums if isinstance(each, Mapping)]
    differing: dict[str, tuple[int, ...]] = {}
    for name in sorted(real):
        if odd := [rank for rank in roster.holders[name] if rank != 0 and by_rank[rank][name] != by_rank[0][name]]:
            differing[name] = tuple(sorted({0, *odd}))
    if not differing:
        return
    if world.rank == 0:
        warn(f"ranks built the model with different weights ({first_few(list(differing))}); rank 0's are used")
    groups = Groups(world, differing.values())
    for name, ranks in differing.items():
        if world.rank in ranks:
            own = real[name]
            value = own.to(world.device).contiguous() if world.rank == 0 else torch.empty(own.shape, dtype=own.dtype, device=world.device)
            with world.speaking(f"taking {name} from rank 0"):
                dist.broadcast(flat_bytes(value), src=0, group=groups[ranks])
            if world.rank != 0:
                tensors[name].detach().copy_(shard(name, value))
    groups.close()


def make_optimizer(
    make: MakeOptimizer | None, owned: Mapping[str, nn.Parameter], sharded: Mapping[str, bool], trained: Collection[str], world: World
) -> torch.optim.Optimizer | None:
    """Makes the optimizer of this rank; None without a function or parameters. All ranks of the world call it.

    Args:
        make: the user's function.
        owned: the parameters of this rank, by name.
        sharded: those of which it has a part, with whether keepers of shared-out state have the rest.
        trained: the names of all trained parameters, of all ranks.
        world: this process among its peers.

    Warns:
        UserWarning: the optimizer may combine parameters, and some rank lacks some of them.

    Raises:
        ConfigError: the function returned no optimizer, one of other parameters, one that needs a closure, or one that would step a part
            of a parameter differently from the whole; or it fails on the parameters of one rank.
    """
    lacks_some = bool(sharded) or not set(trained) <= owned.keys()

    def made() -> torch.optim.Optimizer | None:
        found = _made_by_pattern(make, owned, trained, lacks_some) if isinstance(make, Mapping) else _made(make, owned, lacks_some)
        for member in members_of(found).values():
            _check_no_closure(member)
        check_elementwise(found, list(sharded), [name for name, by_keepers in sharded.items() if by_keepers])
        return found

    optimizer = together(world, made)
    reasons_here = filter(None, map(_reason_to_look_at_all, members_of(optimizer).values() if lacks_some else ()))
    reason = next(reasons_here, "")
    reasons = {str(rank): each for rank, each in enumerate(world.gather_objects(reason)) if each}
    if reasons and world.rank == 0:
        ranks = first_few(list(reasons))
        warn(
            f"the optimizer may combine several parameters ({next(iter(reasons.values()))}), but each of ranks {ranks} has only some of "
            "them: a norm that it computes is of that rank's parameters alone; clip by gradient.clip_norm, which uses all gradients"
        )
    return optimizer


def make_scheduler(make: MakeScheduler | None, optimizer: torch.optim.Optimizer | None, world: World) -> Any:
    """Makes the scheduler of this rank's optimizer, if both exist; all ranks of the world call it.

    Raises:
        ConfigError: the function returned no scheduler.
    """

    def made() -> Any:
        if make is None or optimizer is None:
            return None
        if not isinstance(make, Mapping):
            return _scheduled(make, optimizer, world)
        members = members_of(optimizer)
        return JointScheduler({pattern: _scheduled(own, members[pattern], world) for pattern, own in make.items() if pattern in members})

    return together(world, made)


def _scheduled(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer, world: World) -> Any:
    try:
        found = make(optimizer)
    except Exception as error:
        if world.is_alone or isinstance(error, WhaleError):
            raise
        raise ConfigError(
            f"scheduler= failed on the optimizer of this rank, which has {counted(len(optimizer.param_groups), 'parameter group')}: "
            f"{type(error).__name__}: {error}",
            hint="each rank has some of the parameters: for a scheduler with a value for each group, make all groups on each rank; torch's "
            "optimizers take groups that are empty",
        ) from error
    _check_returned("scheduler", found)
    return found


def _made_by_pattern(
    make: Mapping[Pattern, MakeOne], owned: Mapping[str, nn.Parameter], trained: Collection[str], lacks_some: bool
) -> torch.optim.Optimizer | None:
    """An optimizer per pattern with parameters here; a ConfigError where a parameter of the model or a pattern matches nothing."""
    of_model = divided(trained, make)
    idle = [pattern for pattern, names in of_model.items() if not names]
    if idle:
        raise ConfigError(
            f"no parameters are left for pattern {' and '.join(map(repr, idle))} of optimizer=",
            hint=f"the trained parameters are {first_few(sorted(trained))}; each goes to the first pattern that matches it",
        )
    members = {
        pattern: _made(make[pattern], {name: owned[name] for name in names}, lacks_some) for pattern, names in divided(owned, make).items()
    }
    found = {pattern: member for pattern, member in members.items() if member is not None}
    return JointOptimizer(found) if found else None


def _made(make: MakeOne | None, owned: Mapping[str, nn.Parameter], lacks_some: bool) -> torch.optim.Optimizer | None:
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
            f"optimizer= failed on the parameters of this rank ({first_few(list(owned))}): {type(error).__name__}: {error}",
            hint="each rank has some of the parameters, and groups may be empty: torch's optimizers take these, and a scheduler with a "
            "value for each group needs them; others, [group for group in groups if group['params']]",
        ) from error
    _check_returned("optimizer", found)
    _check_own(found, owned)
    return found


def _check_own(optimizer: torch.optim.Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
    """Refuses an optimizer over other parameters (of the user's model, say): it would train nothing."""
    own = {id(parameter) for parameter in owned.values()}
    others = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in own]
    if others:
        shapes = first_few([str(list(parameter.shape)) for parameter in others])
        raise ConfigError(
            f"optimizer= returned {type(optimizer).__name__} with {len(others)} parameters that it was not given (of shapes {shapes})",
            hint="build it from the parameters of the call, which are the engine's own: functools.partial(torch.optim.AdamW, lr=3e-4)",
        )


def _check_no_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss several times, which engine.step does not support",
            hint="use an optimizer without a closure, such as torch.optim.AdamW",
        )


def _reason_to_look_at_all(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer may combine parameters; "" for torch's own without hooks."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return f"{name} is not one of torch's"
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return f"{name} has hooks on its step" if any(hooks) else ""


_RETURNED = {"optimizer": ("an optimizer", ("step", "param_groups", "state_dict")), "scheduler": ("a scheduler", ("step",))}


def _check_returned(name: str, value: object) -> None:
    """Raises a ConfigError where the function passed as ``optimizer=`` or ``scheduler=`` returned nothing that can be stepped."""
    kind, wanted = _RETURNED[name]
    if not all(hasattr(value, each) for each in wanted):
        returned = "None" if value is None else type(value).__name__
        raise ConfigError(f"{name}= returned {returned}, not {kind}", hint="does the function lack a return statement?")
