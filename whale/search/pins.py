"""Which of the user's settings leaves no plan: each is taken out in turn, and what is left is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from whale.config import Config
from whale.errors import WhaleError

PINS = (
    ("pipeline.num_stages",),
    ("pipeline.num_micro_batch",),
    ("pipeline.schedule", "pipeline.num_chunks", "pipeline.group_size"),
    ("recompute.policy",),
    ("memory.fraction",),
    ("planning.search",),
)
"""Settings that may leave no plan where there would be one; those of a line are taken out together."""

EFFORT = 8
"""Plans that are made at most to see whether there is one."""


def with_blame(fault: WhaleError, config: Config, planned: Callable[[Config], object]) -> WhaleError:
    """A fault whose hint names the settings without each of which there is a plan; as it was where there are none.

    Args:
        fault: why there is no plan.
        config: all settings.
        planned: makes a plan with other settings, or raises a `WhaleError`.
    """
    found = [f"without {' and '.join(pin)} there is a plan" for pin in _blamed(config, planned)]
    if found:
        fault.hint = "; ".join([*filter(None, [fault.hint]), *found])
    return fault


def _blamed(config: Config, planned: Callable[[Config], object]) -> Iterator[tuple[str, ...]]:
    for pins in PINS:
        own = tuple(pin for pin in pins if pin in config.explicit)
        if not own:
            continue
        others = {name: value for name, value in config.explicit_items() if name not in own}
        try:
            planned(Config(others | {"planning.effort": EFFORT}))
        except WhaleError:
            continue
        yield tuple(f"{name} ({value})" for name, value in config.explicit_items() if name in own)
