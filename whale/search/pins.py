"""Which of the user's settings, or their division of the model, leaves no plan: each is taken out in turn, and what is left is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from whale.config import Config
from whale.config.replicas import REPLICAS
from whale.errors import ConfigError, WhaleError
from whale.ir.graph import ModelGraph

PINS = (
    ("pipeline.num_stages",),
    ("pipeline.num_micro_batch",),
    ("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"),
    ("recompute.policy",),
    ("memory.fraction",),
    ("planning.search",),
)
"""Settings that may leave no plan where there would be one; those of a line are taken out together."""

EFFORT = 2
"""Plans that are made at most to see whether there is one, and six more while nothing fits."""


def with_blame(fault: WhaleError, graph: ModelGraph, config: Config, planned: Callable[[ModelGraph, Config], object]) -> WhaleError:
    """A fault whose hint names the settings, or the division of the model, without which there is a plan; as it was where there are none.

    Args:
        fault: why there is no plan.
        graph: the captured model.
        config: all settings.
        planned: makes a plan of a model with other settings, or raises a `WhaleError`.
    """
    found = [
        f"without {words} there is a plan" for words, other, left in _without(fault, graph, config) if _is_planned(planned, other, left)
    ]
    if found:
        fault.hint = "; ".join([*filter(None, [fault.hint]), *found])
    return fault


def _is_planned(planned: Callable[[ModelGraph, Config], object], graph: ModelGraph, config: Config) -> bool:
    try:
        planned(graph, config.with_values({"planning.effort": EFFORT}))
    except WhaleError:
        return False
    return True


def _without(fault: WhaleError, graph: ModelGraph, config: Config) -> Iterator[tuple[str, ModelGraph, Config]]:
    """What may be to blame, in words, with the model and the settings that are left without it."""
    for pins in PINS:
        own = {name: value for name, value in config.explicit_items() if name in pins}
        if own:
            yield " and ".join(f"{name} ({value})" for name, value in own.items()), graph, _left(config, tuple(own))
    is_scoped = any(op.scope for op in graph.ops)
    division = [*(["the scopes"] if is_scoped else []), *(["the replicas that are written down"] if config.replicas else [])]
    if division and not isinstance(fault, ConfigError):  # that says what is wrong in the division itself
        plain = replace(graph, ops=tuple(replace(op, scope=()) for op in graph.ops))
        yield " and ".join(division), plain, _left(config, (REPLICAS,))


def _left(config: Config, names: Sequence[str]) -> Config:
    return Config({name: value for name, value in config.explicit_items() if name not in names})
