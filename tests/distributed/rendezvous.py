"""A stand-in for a network on which every launch waits until its other end has come to its own, as NCCL's first uses do.

    send     says "here", waits for "here", sends
    receive  posts, says "here", waits for "here"
    sum      waits for the result

``WHALE_TEST_NETWORK=rendezvous`` runs all distributed tests on it. A program that runs on it relies on no buffer, and starts
what it sends and receives in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from whale.comm import Channel, Channels, Groups, Launched
from whale.runtime.execute.call_check import WorldSums

_FROM_SENDER, _FROM_RECEIVER = 1, 2


@contextmanager
def launches_wait() -> Iterator[None]:
    """Within it, channels and groups of this process wait at every launch."""
    send, receive, collective, start = Channels.send, Channels.receive, Groups._started, WorldSums.start

    def meeting_send(self: Channels, tensor: torch.Tensor, channel: Channel) -> Launched:
        _meet(channel.target, _FROM_SENDER, _FROM_RECEIVER)
        return send(self, tensor, channel)

    def meeting_receive(self: Channels, tensor: torch.Tensor, channel: Channel) -> Launched:
        work = receive(self, tensor, channel)
        _meet(channel.source, _FROM_RECEIVER, _FROM_SENDER)
        return work

    def meeting_collective(self: Groups, *arguments: Any) -> None:
        work = collective(self, *arguments)
        if work is not None:
            work.work.wait()

    def meeting_everyone(self: WorldSums, tensor: torch.Tensor) -> None:
        work = start(self, tensor)
        if work is not None:
            work.work.wait()
            if work.finish is not None:
                work.finish()

    replaced: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (Channels, "send", meeting_send),
        (Channels, "receive", meeting_receive),
        (Groups, "_started", meeting_collective),
        (WorldSums, "start", meeting_everyone),
    )
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(patch.object(*each))
        yield


def _meet(peer: int, own: int, other: int) -> None:
    """Tells a peer that this rank is here, and waits until it says so too."""
    here = dist.isend(torch.zeros(1, dtype=torch.uint8), peer, tag=own)
    dist.recv(torch.empty(1, dtype=torch.uint8), peer, tag=other)
    assert here is not None
    here.wait()
