"""The devices at hand: this host's GPUs where NVML and PyTorch can use them, CPU ranks otherwise."""

from __future__ import annotations

import socket

from whale.errors import ClusterError
from whale.hardware import CPU, DeviceProfile, catalogue, make_cluster
from whale.ir.cluster import Cluster
from whale.measure.gpus import Gpu, gpus, in_cuda_order
from whale.measure.host import host_cores, host_memory

UNKNOWN_EFFICIENCY = 0.7
"""For a GPU that the catalogue does not know: about what plain float32 reaches on those that it does."""


def devices_at_hand(num_ranks: int | None = None) -> Cluster:
    """This host as a cluster.

    Args:
        num_ranks: how many devices to make of it, one per rank; GPUs are shared if they are fewer. None: every GPU, or
            one CPU rank.

    Raises:
        ClusterError: fewer than one rank is asked for, or a GPU is one that nothing is known of.
    """
    found = _usable_gpus()
    count = num_ranks if num_ranks is not None else max(1, len(found))
    if count < 1:
        raise ClusterError(f"a cluster needs at least one rank ({num_ranks} asked for)")
    return make_cluster([_profile(found, rank, count) for rank in range(count)])[0]


def local_profile(local_rank: int, ranks_on_host: int) -> DeviceProfile:
    """This rank's own device.

    GPU number ``local_rank`` as CUDA counts them (modulo their number, if there are fewer than ranks), or an equal share
    of the host's cores and memory. Of a GPU that neither catalogue nor NVML can describe, the profile only has the name
    and the memory; `make_cluster` then asks for a cluster file.

    Args:
        local_rank: from 0, on this host.
        ranks_on_host: how many ranks share this host.
    """
    found = _usable_gpus()
    return _profile(in_cuda_order(found) if found else (), local_rank, ranks_on_host)


def _usable_gpus() -> tuple[Gpu, ...]:
    """The visible GPUs; none where PyTorch was built without CUDA."""
    found = gpus()
    if not found:
        return ()
    import torch

    return found if torch.version.cuda is not None else ()


def _profile(found: tuple[Gpu, ...], local_rank: int, ranks_on_host: int) -> DeviceProfile:
    host = socket.gethostname()
    if not found:
        return DeviceProfile(host, CPU, host_memory() // ranks_on_host, host_cores() / ranks_on_host)
    position = local_rank % len(found)
    sharers = len(range(position, ranks_on_host, len(found)))
    return gpu_profile(host, found[position], sharers)


def gpu_profile(host: str, gpu: Gpu, sharers: int = 1) -> DeviceProfile:
    """A GPU's profile, of which each of `sharers` ranks gets an equal part."""
    memory, share = gpu.memory // sharers, 1 / sharers
    known = catalogue().match_nvml(gpu.name)
    if known is not None:
        return DeviceProfile(host, known.name, memory, num_cores=share)
    if not gpu.flops or not gpu.bandwidth:
        return DeviceProfile(host, gpu.name, memory, num_cores=share)
    flops = (("float32", gpu.flops * share),)
    link = catalogue().links["pcie3"]  # NVLink is not guessed
    return DeviceProfile(host, gpu.name, memory, share, flops, gpu.bandwidth * share, UNKNOWN_EFFICIENCY, link)
