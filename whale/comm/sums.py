"""Sums over a group: two ranks through Gloo hand each other what they have, where that needs no memory to speak of; all others reduce.

    all-reduce   halves around the ring and around again: two messages one after another
    two ranks    all of it to the other: one message each way, as many bytes; a + b on one rank is b + a on the other, to the last bit

Each turn of a message waits until its rank has one, the more so where cores are busy. In place, what is handed over needs memory beside
the tensor, so only little is. Where the sum is to have memory of its own, what comes is received there, and nothing is copied before.
"""

from __future__ import annotations

from collections.abc import Callable

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
    if is_small and _are_two_of_gloo(tensor.device, group):
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return _swapped(received, tensor, lambda: tensor.add_(received), group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return None if work is None else Launched(work, blocks_host(tensor.device, group))


def start_sum_into(total: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Launched | None:
    """Starts the sum of a tensor over a group in other memory; it is there once it has been waited for.

    Args:
        total: contiguous, where the sum will be.
        own: of one shape on all ranks; it is read until the sum is there, so nobody may write to it before.
        group: torch's.

    Returns:
        What to wait for; None where it is there already.
    """
    if _are_two_of_gloo(own.device, group):
        return _swapped(total, own, lambda: total.add_(own), group)
    return start_sum(total.copy_(own), group)


def _are_two_of_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) == 2 and backend_of(device, group) == "gloo"


def _swapped(received: torch.Tensor, own: torch.Tensor, add: Callable[[], object], group: dist.ProcessGroup) -> Launched | None:
    sent, sizes = own.contiguous().reshape(-1), [0, 0]
    sizes[1 - dist.get_rank(group)] = sent.numel()
    work = dist.all_to_all_single(received.view(-1), sent, sizes, sizes, group=group, async_op=True)
    if work is None:
        add()
        return None
    return Launched(work, blocks_host=True, finish=add)
