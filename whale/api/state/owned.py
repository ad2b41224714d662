"""The parameters of a rank as a mapping that may also be called, as a module's `parameters` is."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView

from torch import nn


class OwnedParameters(dict[str, nn.Parameter]):
    """Parameters by name; ``engine.parameters()`` iterates over them, as for a norm or a count.

    Args:
        parameters: by name.
        asked: called where somebody goes through their values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], asked: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __call__(self) -> Iterator[nn.Parameter]:
        return iter(self.values())

    def values(self) -> ValuesView[nn.Parameter]:  # type: ignore[override]
        self._asked()
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter]:  # type: ignore[override]
        self._asked()
        return super().items()
