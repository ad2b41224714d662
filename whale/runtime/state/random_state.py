"""The state of this process's own random generators: what the script draws from, kept in checkpoints.

Whale itself draws from seeds that depend on the place and the step alone, so nothing else need be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The state of the generators, by the kind of device."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what `random_state` gave; that of a device which is not here is left out."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
