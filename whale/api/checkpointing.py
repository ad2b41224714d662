"""What an engine puts in a checkpoint, and how it takes it back.

Each rank writes the regions of parameters (and of what the optimizer keeps for them) that it is the lowest owner of, and
reads the regions that it holds. In between the tensors are whole, so any plan reads any other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whale.ir.serialization import to_json
from whale.runtime.checkpoint.boxes import find_shares
from whale.runtime.checkpoint.checkpoint import Extras, load, save
from whale.runtime.state.optimizer_state import read_optimizer, write_optimizer

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
    save(
        path,
        tensors=engine.tensors,
        optimizer=read_optimizer(engine.optimizer, engine.parameters),
        extras=Extras(shared, {"random": _random_state()}),
        writers=engine.writers,
        world=engine.world,
        plan=to_json(engine.plan, indent=2),
        shares=find_shares(engine.holdings, engine.rank, engine.model_graph),
    )


def load_engine(engine: Engine, path: Path) -> None:
    """Fills the engine's tensors in place and puts everything else back.

    A loader made before takes up its position at once, one made later when it is made.
    """
    specs = {parameter.name: parameter.spec for parameter in engine.model_graph.parameters if parameter.name in engine.plan.owners}
    shares = find_shares(engine.holdings, engine.rank, engine.model_graph)
    state, extras = load(path, tensors=engine.tensors, specs=specs, world=engine.world, shares=shares)
    write_optimizer(engine.optimizer, engine.parameters, state)
    if engine.scheduler is not None and "scheduler" in extras.shared:
        engine.scheduler.load_state_dict(extras.shared["scheduler"])
    engine.step_number = int(extras.shared["step"])
    engine.take_position(extras.shared.get("position"))
    if "random" in extras.own:
        _set_random_state(extras.own["random"])


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
