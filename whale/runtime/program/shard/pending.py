"""A collective on its way: what it gives, once it is there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from whale.runtime.program.shard.group import Arrival


class Pending:
    """A value that other devices send parts of.

    Args:
        finish: makes the value from what arrived; holds what is on its way meanwhile.
        arrival: waits for it; None where nothing travels.
    """

    def __init__(self, finish: Callable[[], Tensor], arrival: Arrival | None = None) -> None:
        self._finish, self._arrival = finish, arrival

    def wait(self) -> Tensor:
        """The value.

        Raises:
            RuntimeFault: a peer died or the limit passed.
        """
        if self._arrival is not None:
            self._arrival()
        return self._finish()


def at_hand(value: Tensor) -> Pending:
    """A value for which nothing travels."""
    return Pending(lambda: value)
