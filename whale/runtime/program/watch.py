"""Who is told when each action, message, bucket and segment of a step begins and ends: as a rule nobody.

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
"""Direction, stage and micro-batch."""

_NOTHING = nullcontext()


class Watch:
    """Takes no notice. A recorder overrides what it is told."""

    def run_begins(self) -> None:
        """A training run of the size that the plan is for begins: all actions of a step up to the optimizer's."""

    def run_ends(self) -> None:
        """It is done."""

    def busy_seconds(self) -> float:
        """Of the last run that is known and was not asked for before, how long this rank has computed in it; 0 where there is none."""
        return 0.0

    def begin(self, action: Action) -> None:
        """An action begins."""

    def end(self) -> None:
        """The action that has begun is done."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait for others that is no action: for gradients, or inside a pass for what a split group exchanges."""
        return _NOTHING

    def segment(self, name: str) -> AbstractContextManager[None]:
        """Around a segment of a stage's program."""
        return _NOTHING

    def on_host(self) -> AbstractContextManager[None]:
        """Around the making of a tensor in the memory of the host."""
        return _NOTHING

    def resized(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor that stays has been let go, or is there again."""

    def sent(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        """A tensor's way has begun."""

    def posted(self, sender: Place, receiver: Place, channel: Channel, wire: torch.Tensor) -> None:
        """A tensor may come."""

    def arrived(self, sender: Place, receiver: Place, channel: Channel) -> None:
        """A tensor has been waited for."""

    def summing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        """The sum of a bucket of gradients has begun."""

    def summed(self, bucket: int) -> None:
        """It has been waited for."""

    def publishing(self, bucket: int, stages: Collection[int], ranks: Collection[int], flat: torch.Tensor, work: Launched) -> None:
        """A bucket of weights, which ops of the next step wait for, is on its way."""

    def published(self, bucket: int) -> None:
        """It has been waited for."""


NOBODY = Watch()
