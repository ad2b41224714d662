"""The parameters of a rank as a mapping that may also be called, as a module's `parameters` is."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class OwnedParameters(dict[str, nn.Parameter]):
    """Parameters by name; ``engine.parameters()`` iterates over them, as for clipping or counting."""

    def __call__(self) -> Iterator[nn.Parameter]:
        return iter(self.values())
