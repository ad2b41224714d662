"""Sums over a group: small ones of two ranks through Gloo by handing each other what they have, all others by an all-reduce.

    all-reduce   halves around the ring and around again: two messages one after another
    two ranks    all of it to the other: one message each way, as many bytes; a + b on one rank is b + a on the other, to the last bit

Where little travels the turns are the cost, the more so where cores are busy: each waits until its rank has one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from whale.comm.backend import backend_of, blocks_host
from whale.comm.waiting import Launched

SMALL_BYTES = 1 << 18
"""The largest small sum: an all-reduce sends more than that in pieces, of which one is added while the next is on its way."""


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts the sum of a tensor over a group, in place; it is there once it has been waited for.

    Args:
        tensor: of one shape on all ranks.
        group: torch's.

    Returns:
        What to wait for; None where it is there already.
    """
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if is_small and dist.get_world_size(group) == 2 and backend_of(tensor.device, group) == "gloo":
        return _swapped(tensor, group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return None if work is None else Launched(work, blocks_host(tensor.device, group))


def _swapped(tensor: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    sent, sizes = tensor.reshape(-1), [0, 0]
    sizes[1 - dist.get_rank(group)] = sent.numel()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, sizes, sizes, group=group, async_op=True)

    def add() -> None:
        tensor.add_(received.view_as(tensor))

    if work is None:
        add()
        return None
    return Launched(work, blocks_host=True, finish=add)
