"""The devices of this host: the GPUs that NVML and PyTorch know, else its cores and memory, within the limits of its container."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from whale.errors import ClusterError
from whale.hardware import CPU, DeviceProfile, catalogue, make_cluster
from whale.ir.cluster import Cluster
from whale.units import counted, format_bytes

if TYPE_CHECKING:
    from whale.comm import World

UNKNOWN_EFFICIENCY = 0.7  # for a GPU outside of the catalogue: about what plain float32 reaches on those inside


MOST_RANKS = 4096  # of one machine: each is looked up by itself


def devices_at_hand(num_ranks: int | None = None) -> Cluster:
    """This host as a cluster.

    Args:
        num_ranks: devices, one per rank; ranks share GPUs if there are fewer. None: every GPU, or one CPU rank.

    Raises:
        ClusterError: less than one rank, or an unknown GPU.
    """
    found = _usable_gpus()
    count = num_ranks if num_ranks is not None else max(1, len(found))
    if count < 1:
        raise ClusterError(f"{num_ranks} ranks for a cluster; it needs at least one")
    if count > MOST_RANKS:
        raise ClusterError(
            f"{num_ranks} ranks on this machine are more than {MOST_RANKS:,}",
            hint=f"for a plan write a cluster file: hosts: [{{name: one, devices: {num_ranks} x cpu}}]",
        )
    return make_cluster([_profile(found, rank, count) for rank in range(count)])[0]


def rank_profiles(world: World) -> list[DeviceProfile]:
    """Per rank, its own device. A collective.

    The GPU that the rank uses, else number ``local_rank`` as CUDA counts them (modulo their number, if there are fewer than ranks), of
    which ranks that have the same one get equal parts; or an equal share of the host's cores and memory. Which ranks have one GPU is told
    by its identifier: each rank may see a GPU, or a slice of one, of its own alone. For a GPU that neither catalogue nor NVML describes,
    the profile has name and memory alone; `make_cluster` then asks for a cluster file.

    Raises:
        ClusterError: a GPU does not answer NVML; or the installed torch has no kernels for this one.
    """
    index = world.device.index if world.device.type == "cuda" else None
    gpu = _own_gpu(world.local_rank if index is None else index)
    own = _cpu_profile(world.local_size) if gpu is None else gpu_profile(socket.gethostname(), gpu)
    found = cast(list[tuple[DeviceProfile, str]], world.gather_objects((own, "" if gpu is None else gpu.uuid)))
    sharers = Counter(uuid for _, uuid in found)
    return [_part(profile, sharers[uuid]) if uuid else profile for profile, uuid in found]


def _own_gpu(number: int) -> Gpu | None:
    found = _usable_gpus()
    if not found:
        return None
    found = in_cuda_order(found)
    check_kernels(found[number % len(found)])
    return found[number % len(found)]


def check_kernels(gpu: Gpu) -> None:
    """Refuses a GPU that the installed torch cannot run on: it was built for newer ones, or for older ones without PTX."""
    import torch

    built_for = torch.cuda.get_arch_list()
    if gpu.capability is None or not built_for or any(_runs_on(each, gpu.capability) for each in built_for):
        return
    major, minor = gpu.capability
    raise ClusterError(
        f"torch {torch.__version__} has no kernels for {gpu.name} (compute capability {major}.{minor}; built for {', '.join(built_for)})",
        hint="install a build of torch for this GPU: for V100 (7.0) one for CUDA 12.6; or hide the GPU with CUDA_VISIBLE_DEVICES",
    )


def _runs_on(built_for: str, capability: tuple[int, int]) -> bool:
    """Whether kernels run on a GPU: machine code (``sm_75``) within its generation, PTX (``compute_75``) on all later ones too."""
    form, _, number = built_for.partition("_")
    if not number.isdecimal():  # sm_90a: of that GPU alone
        return number[:-1] == f"{capability[0]}{capability[1]}"
    built = divmod(int(number), 10)
    return built <= capability and (form == "compute" or built[0] == capability[0])


def _usable_gpus() -> tuple[Gpu, ...]:
    """The visible GPUs; none if PyTorch was built without CUDA."""
    found = gpus()
    if not found:
        return ()
    import torch

    return found if torch.version.cuda is not None else ()


def _profile(found: tuple[Gpu, ...], local_rank: int, ranks_on_host: int) -> DeviceProfile:
    if not found:
        return _cpu_profile(ranks_on_host)
    position = local_rank % len(found)
    return _part(gpu_profile(socket.gethostname(), found[position]), len(range(position, ranks_on_host, len(found))))


def _cpu_profile(ranks_on_host: int) -> DeviceProfile:
    return DeviceProfile(socket.gethostname(), CPU, host_memory() // ranks_on_host, host_cores() / ranks_on_host)


def gpu_profile(host: str, gpu: Gpu) -> DeviceProfile:
    known = catalogue().match_nvml(gpu.name)
    if known is not None:
        return DeviceProfile(host, known.name, gpu.memory)
    if not gpu.flops or not gpu.bandwidth:
        return DeviceProfile(host, gpu.name, gpu.memory)
    link = catalogue().links["pcie3"]  # NVLink is not guessed
    return DeviceProfile(host, gpu.name, gpu.memory, 1.0, (("float32", gpu.flops),), gpu.bandwidth, UNKNOWN_EFFICIENCY, link)


def _part(profile: DeviceProfile, sharers: int) -> DeviceProfile:
    """The profile of a GPU that so many ranks share equally, for one of them."""
    flops = tuple((dtype, speed / sharers) for dtype, speed in profile.flops)
    memory, bandwidth, cores = profile.memory // sharers, profile.bandwidth / sharers, profile.num_cores / sharers
    return replace(profile, memory=memory, num_cores=cores, flops=flops, bandwidth=bandwidth, sharers=sharers)


MEGAHERTZ = 1e6


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    uuid: str  # ``GPU-...``
    name: str  # NVML's name for the model
    memory: int  # bytes in all
    flops: float = 0.0  # peak float32 FLOP/s, from cores and clock; 0 if NVML has no answer
    bandwidth: float = 0.0  # bytes per second of its memory, from bus width and clock; 0 if NVML has no answer
    capability: tuple[int, int] | None = None  # CUDA's compute capability; None if NVML has no answer


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The visible GPUs or slice of one, in the order of ``CUDA_VISIBLE_DEVICES`` or else of NVML; none without NVML.

    Raises:
        ClusterError: a GPU does not answer NVML.
    """
    with in_nvml() as nvml:
        if nvml is None:
            return ()
        try:
            return tuple(_read(nvml, handle) for handle in visible(nvml, environment))
        except nvml.NVMLError as error:
            raise ClusterError(
                f"a GPU does not respond ({error})", hint="nvidia-smi shows which; or hide it with CUDA_VISIBLE_DEVICES"
            ) from None


@contextmanager
def in_nvml() -> Iterator[Any]:
    """The pynvml module, initialized; None without the library or its driver, which only means that there are no GPUs."""
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
    """What CUDA has: of cards in MIG mode a process gets one slice, the first, and then no card beside it."""
    chosen = _chosen(nvml, environment)
    slices = [_slices(nvml, handle) for handle in chosen]
    whole = [handle for handle, own in zip(chosen, slices, strict=True) if own is None]
    return next(([own[0]] for own in slices if own), whole)


def _slices(nvml: Any, handle: Any) -> list[Any] | None:
    """The slices of a card in MIG mode, or the one that this is; None for a whole card."""
    if any(_asked(nvml, _is_slice, handle)):
        return [handle]
    if not any(_asked(nvml, _is_sliced, handle)):
        return None
    return [own for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) for own in _asked(nvml, _slice, handle, number)]


def _is_slice(nvml: Any, handle: Any) -> bool:
    return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))


def _is_sliced(nvml: Any, handle: Any) -> bool:
    return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)


def _slice(nvml: Any, handle: Any, number: int) -> Any:
    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def _chosen(nvml: Any, environment: Mapping[str, str]) -> list[Any]:
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
    capability = None
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = int(major), int(minor)
        cores = nvml.nvmlDeviceGetNumGpuCores(handle)
        core_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * MEGAHERTZ
        bus_bytes = nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
        memory_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * MEGAHERTZ
    except nvml.NVMLError:  # an old driver, or a slice of a GPU
        return Gpu(uuid, name, memory, capability=capability)
    # A multiply-add per core and cycle; two transfers per cycle of the memory's clock.
    return Gpu(uuid, name, memory, 2 * cores * core_clock, 2 * bus_bytes * memory_clock, capability)


def name_of(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetName(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def in_cuda_order(found: tuple[Gpu, ...], environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs as CUDA numbers them.

    NVML counts by bus; CUDA, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, puts the fastest first. That matters only for different GPUs; then
    CUDA itself is asked.
    """
    if len({gpu.name for gpu in found}) <= 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return found
    import torch

    by_uuid = {gpu.uuid: gpu for gpu in found}
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    missing = [uuid for uuid in uuids if uuid not in by_uuid]
    if missing:
        raise ClusterError(
            f"CUDA and NVML disagree about the GPUs of this host: only CUDA has {missing[0]}", hint="export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return tuple(by_uuid[uuid] for uuid in uuids)


CGROUP = Path("/sys/fs/cgroup")


def host_memory(cgroup: Path = CGROUP) -> int:
    """Bytes: the host's, or the container's limit if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_file_number(cgroup / "memory.max"), _file_number(cgroup / "memory" / "memory.limit_in_bytes")]
    return min([physical, *(int(limit) for limit in limits if limit)])


def host_cores(cgroup: Path = CGROUP) -> float:
    """Cores that this process may run on, or the container's share of them if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_quotas(cgroup)])


def _quotas(cgroup: Path) -> list[float]:
    words = _file_text(cgroup / "cpu.max").split()
    pairs = [(words[0], words[1])] if len(words) == 2 else []
    pairs.append((_file_text(cgroup / "cpu" / "cpu.cfs_quota_us"), _file_text(cgroup / "cpu" / "cpu.cfs_period_us")))
    return [int(quota) / int(period) for quota, period in pairs if quota.isdecimal() and period.isdecimal() and int(quota) and int(period)]


def _file_number(path: Path) -> int | None:
    text = _file_text(path)
    return int(text) if text.isdecimal() else None


def _file_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


NVLINKS = 18  # most links of a GPU
SWITCH = "a switch"  # which joins all GPUs of a host
# the path between two GPUs without NVLink, by NVML's levels of topology
ANCESTORS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "the link between processors",
}


def gpu_notes(environment: Mapping[str, str] = environ, own: Collection[int] = ()) -> tuple[str, ...]:
    """A line for each visible GPU, for each two of them without NVLink, and for all pairs if these have unlike numbers of links.

    Args:
        own: processes of this run; where NVML knows them, others on a GPU are told.
    """
    with in_nvml() as nvml:
        return () if nvml is None else tuple(_notes(nvml, visible(nvml, environment), own))


def _notes(nvml: Any, handles: list[Any], own: Collection[int]) -> Iterator[str]:
    ends = [_link_ends(nvml, handle) for handle in handles]
    users = [{each.pid: each.usedGpuMemory or 0 for found in _asked(nvml, _users, handle) for each in found} for handle in handles]
    is_known = any(pid in found for found in users for pid in own)  # in a container NVML may count otherwise
    for index, handle in enumerate(handles):
        links = counted(ends[index].total(), "NVLink") if ends[index] else "no NVLink"
        facts = [links, *_asked(nvml, _pcie, handle), *_asked(nvml, _clock, handle)]
        if others := [used for pid, used in users[index].items() if is_known and pid not in own]:
            facts.append(f"also used by {counted(len(others), 'process')} of others ({format_bytes(sum(others))})")
        yield f"GPU {index}, {name_of(nvml, handle)}: " + ", ".join(facts)
    buses = [next(iter(_asked(nvml, _bus, handle)), "") for handle in handles]
    pairs = list(combinations(range(len(handles)), 2))
    joining = {(a, b): ends[a][buses[b]] + sum(min(ends[a][end], ends[b][end]) for end in (SWITCH, None)) for a, b in pairs}
    for (first, second), number in joining.items():
        if not number:
            way = _asked(nvml, _way, handles[first], handles[second]) or ["an unknown connection"]
            yield f"GPU {first} - GPU {second}: through {way[0]}"
        elif len({*joining.values()}) > 1:
            yield f"GPU {first} - GPU {second}: {counted(number, 'NVLink')}"


def _link_ends(nvml: Any, handle: Any) -> Counter[str | None]:
    """The active NVLinks of a GPU by what is at their other ends: the address of a GPU, `SWITCH`, or None if NVML has no answer."""
    active = [link for link in range(NVLINKS) if any(_asked(nvml, _nvlink, handle, link))]
    return Counter(next(iter(_asked(nvml, _link_end, handle, link)), None) for link in active)


def _nvlink(nvml: Any, handle: Any, link: int) -> int:
    return int(nvml.nvmlDeviceGetNvLinkState(handle, link))


def _link_end(nvml: Any, handle: Any, link: int) -> str:
    if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)


def _bus(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _users(nvml: Any, handle: Any) -> Sequence[Any]:
    found: Sequence[Any] = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return found


def _pcie(nvml: Any, handle: Any) -> str:
    return f"PCIe {nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}"


def _clock(nvml: Any, handle: Any) -> str:
    kind = nvml.NVML_CLOCK_SM
    return f"{nvml.nvmlDeviceGetClockInfo(handle, kind)} of {nvml.nvmlDeviceGetMaxClockInfo(handle, kind)} MHz"


def _way(nvml: Any, first: Any, second: Any) -> str:
    return ANCESTORS[nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)]


def _asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The answer; none if the driver, or this model of GPU, has none."""
    try:
        return [question(nvml, *arguments)]
    except (nvml.NVMLError, KeyError):
        return []
