"""What an engine puts in a checkpoint, and how it takes it back.

A checkpoint holds whole tensors, so any plan reads any other's: parts of a cut parameter (and of what the optimizer
keeps for it) are brought together on the rank that writes it, one at a time, and cut out again when read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whale.ir.serialization import to_json
from whale.runtime.checkpoint import Extras, load, save
from whale.runtime.cutting.pieces import part
from whale.runtime.gathering import gather_whole
from whale.runtime.optimizer_state import OptimizerState, read_optimizer, write_optimizer

if TYPE_CHECKING:
    from whale.api.engine import Engine


def save_engine(engine: Engine, path: Path) -> None:
    """Writes parameters, buffers, optimizer, scheduler, step, random state and data position."""
    loader = engine.current_loader
    shared: dict[str, Any] = {"step": engine.step_number}
    if loader is not None:
        shared["position"] = loader.position
    if engine.scheduler is not None:
        shared["scheduler"] = engine.scheduler.state_dict()
    tensors, optimizer = _joined(engine, read_optimizer(engine.optimizer, engine.parameters))
    save(
        path,
        tensors=tensors,
        optimizer=optimizer,
        extras=Extras(shared, {"random": _random_state()}),
        writers=engine.writers,
        world=engine.world,
        plan=to_json(engine.plan, indent=2),
    )


def load_engine(engine: Engine, path: Path) -> None:
    """Fills the engine's tensors in place and puts everything else back.

    A loader made before takes up its position at once, one made later when it is made.
    """
    specs = {parameter.name: parameter.spec for parameter in engine.model_graph.parameters if parameter.name in engine.plan.owners}
    wholes = {
        name: torch.empty(specs[name].shape, dtype=tensor.dtype) for name, tensor in engine.tensors.items() if engine.holdings.is_cut(name)
    }
    state, extras = load(path, tensors={**engine.tensors, **wholes}, specs=specs, world=engine.world)
    for name, whole in wholes.items():
        engine.tensors[name].detach().copy_(_own_part(engine, name, whole))
    write_optimizer(engine.optimizer, engine.parameters, _cut(engine, state, specs))
    if engine.scheduler is not None and "scheduler" in extras.shared:
        engine.scheduler.load_state_dict(extras.shared["scheduler"])
    engine.step_number = int(extras.shared["step"])
    engine.take_position(extras.shared.get("position"))
    if "random" in extras.own:
        _set_random_state(extras.own["random"])


def _joined(engine: Engine, optimizer: OptimizerState) -> tuple[dict[str, torch.Tensor], OptimizerState]:
    """This rank's tensors and optimizer state; where parameters are cut, whole ones on the rank that writes them."""
    tensors = dict(engine.tensors)
    state: dict[str, Mapping[str, Any]] = dict(optimizer.state)

    def gathered(name: str, held: torch.Tensor | None) -> torch.Tensor | None:
        return gather_whole(engine.model_graph, engine.holdings, name, held, engine.rank, engine.world_ranks, engine.world)

    for name in (name for name in engine.holdings.regions if engine.holdings.is_cut(name)):
        local = engine.tensors.get(name)
        whole = gathered(name, local)
        if whole is not None:
            tensors[name] = whole
        entries = dict(state.get(name, {}))
        for key in engine.agreed_keys(name, [key for key, value in entries.items() if _is_like(value, local)]):
            joined = gather_whole(
                engine.model_graph, engine.holdings, name, entries.get(key), engine.rank, engine.world_ranks, engine.world
            )
            if joined is not None:
                entries[key] = joined
        if entries:
            state[name] = entries
    return tensors, OptimizerState(state, optimizer.options)


def _is_like(value: object, parameter: torch.Tensor | None) -> bool:
    return isinstance(value, torch.Tensor) and parameter is not None and value.shape == parameter.shape and value.dim() > 0


def _own_part(engine: Engine, name: str, whole: torch.Tensor) -> torch.Tensor:
    assert engine.rank is not None
    index = engine.holdings.index(name, engine.holdings.regions[name][engine.rank])
    return whole if index is None else part(whole, index)


def _cut(engine: Engine, saved: OptimizerState, specs: Mapping[str, Any]) -> OptimizerState:
    """The optimizer state with this rank's parts of what was kept for cut parameters."""
    state = {
        name: {
            key: _own_part(engine, name, value).clone()
            if engine.holdings.is_cut(name) and isinstance(value, torch.Tensor) and tuple(value.shape) == specs[name].shape
            else value
            for key, value in entries.items()
        }
        for name, entries in saved.state.items()
    }
    return OptimizerState(state, saved.options)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
