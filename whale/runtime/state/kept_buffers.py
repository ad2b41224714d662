"""What the buffers that a training writes were before a step: put back where the step does not count.

Running statistics move with each micro-batch, others once per batch (`whale.runtime.state.updates`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class KeptBuffers:
    """A copy of some buffers, made anew before each step: they move while its batch may still be refused.

    Args:
        buffers: that move, on this rank.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [buffer.detach() for buffer in buffers]
        self._before = [torch.empty_like(buffer) for buffer in self._buffers]

    def another(self) -> KeptBuffers:
        """Room for one more copy of the same buffers."""
        return KeptBuffers(self._buffers)

    def keep(self) -> None:
        """Takes down what the buffers hold."""
        _copy(self._before, self._buffers)

    def put_back(self) -> None:
        """Gives them what was taken down last."""
        _copy(self._buffers, self._before)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
