"""Hooks that are called when each action, message, bucket and segment of a step begins and ends.

F0 ------ [segment] ---    begin, segment, end
1SEND_F0                   sent
0POST_B0 ... 0RECV_B0      posted, arrived
gradients                  summing, summed
weights                    publishing, published
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch

from whale.comm import Channel, Launched
from whale.ir.schedule import Action
from whale.sharding.crossings import Direction

Place = tuple[Direction, int, int]
"""(direction, stage, micro-batch)."""

_NOTHING = nullcontext()


class Watch:
    """Hooks that do nothing; subclasses override what they need."""

    def run_begins(self) -> None:
        """A training run of the planned batch size begins: all actions of a step before the optimizer's."""

    def run_ends(self) -> None:
        pass

    def busy_seconds(self) -> float:
        """Compute time of this rank in the last finished run that was not returned before; 0 for none."""
        return 0.0

    def begin(self, action: Action) -> None:
        pass

    def end(self) -> None:
        """The current action is done."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait that is no action: for gradients, or inside a pass for a split group."""
        return _NOTHING

    def segment(self, name: str) -> AbstractContextManager[None]:
        """Around a segment of a stage's program."""
        return _NOTHING

    def on_host(self) -> AbstractContextManager[None]:
        """Around the allocation of a host tensor."""
        return _NOTHING

    def resized(self, tensor: torch.Tensor) -> None:
        """The storage of a tensor was freed, or allocated again."""

    def sent(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        """A send was started."""

    def posted(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        """A receive was posted."""

    def arrived(self, sender: Place, receiver: Place, channel: Channel) -> None:
        """A receive was waited for."""

    def summing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        """The sum of a bucket of gradients was started."""

    def summed(self, bucket: int) -> None:
        """It was waited for."""

    def publishing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        """The send of a bucket of weights, for which ops of the next step wait, was started."""

    def published(self, bucket: int) -> None:
        """It was waited for."""


NOBODY = Watch()
