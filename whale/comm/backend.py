"""Which backend serves tensors of which device: asked of the group, per kind of device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """The backend (``gloo``, ``nccl``) that a group uses for tensors of a device; None where it has none for them.

    A group of an imagined world does as Gloo would.

    Args:
        device: where the tensors lie.
        group: torch's; the world's own by default.
    """
    served = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl": torch tells the whole, whatever the device
    found = dict(pair.split(":") for pair in served.split(",")).get(device.type)
    return "gloo" if found == "fake" else found


def blocks_host(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether who waits for tensors of a device waits on the host; with NCCL the device does."""
    return device.type == "cpu" or backend_of(device, group) != "nccl"
