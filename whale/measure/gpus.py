"""The GPUs that this process may use, as NVML describes them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whale.errors import ClusterError

MEGAHERTZ = 1e6


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        uuid: ``GPU-...``.
        name: NVML's name for the model.
        memory: bytes in all.
        flops: peak float32 FLOP/s, from cores and clock; 0 if NVML does not tell.
        bandwidth: bytes per second of its memory, from bus width and clock; 0 if NVML does not tell.
    """

    uuid: str
    name: str
    memory: int
    flops: float = 0.0
    bandwidth: float = 0.0


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The visible GPUs, in the order of ``CUDA_VISIBLE_DEVICES`` or else of NVML; none where there is no NVML.

    Raises:
        ClusterError: NVML is there but a GPU does not answer.
    """
    with in_nvml() as nvml:
        if nvml is None:
            return ()
        try:
            return tuple(_read(nvml, handle) for handle in visible(nvml, environment))
        except nvml.NVMLError as error:
            raise ClusterError(
                f"a GPU does not answer ({error})", hint="nvidia-smi shows which; or hide it with CUDA_VISIBLE_DEVICES"
            ) from None


@contextmanager
def in_nvml() -> Iterator[Any]:
    """The pynvml module, started; None without the library or its driver, which only means that there are no GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible(nvml: Any, environment: Mapping[str, str]) -> list[Any]:
    """Handles of the visible GPUs."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    found = []
    for entry in wanted.split(","):
        handle = _named(nvml, handles, entry.strip())
        if handle is None:  # as CUDA does: what follows a wrong entry is hidden
            break
        found.append(handle)
    return found


def _named(nvml: Any, handles: list[Any], entry: str) -> Any:
    """The GPU that an entry of ``CUDA_VISIBLE_DEVICES`` names: a number, or (the beginning of) a UUID."""
    if entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    hits = [handle for handle in handles if entry and _text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
    return hits[0] if len(hits) == 1 else None


def _read(nvml: Any, handle: Any) -> Gpu:
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), name_of(nvml, handle)
    try:
        cores = nvml.nvmlDeviceGetNumGpuCores(handle)
        core_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * MEGAHERTZ
        bus_bytes = nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
        memory_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * MEGAHERTZ
    except nvml.NVMLError:  # an old driver, or a slice of a GPU
        return Gpu(uuid, name, memory)
    # A multiply-add per core and cycle; two transfers per cycle of the memory's clock.
    return Gpu(uuid, name, memory, 2 * cores * core_clock, 2 * bus_bytes * memory_clock)


def name_of(nvml: Any, handle: Any) -> str:
    """NVML's name for the model of a GPU."""
    return _text(nvml.nvmlDeviceGetName(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def in_cuda_order(found: tuple[Gpu, ...], environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs as CUDA numbers them, for a process that uses CUDA.

    NVML counts by bus; CUDA, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, puts the fastest first. Only where the GPUs are
    unlike does that matter, and then CUDA itself is asked.
    """
    if len({gpu.name for gpu in found}) <= 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return found
    import torch

    by_uuid = {gpu.uuid: gpu for gpu in found}
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    missing = [uuid for uuid in uuids if uuid not in by_uuid]
    if missing:
        raise ClusterError(
            f"CUDA and NVML disagree about the GPUs of this host ({missing[0]} is CUDA's alone)", hint="export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return tuple(by_uuid[uuid] for uuid in uuids)
