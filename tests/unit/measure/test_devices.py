"""The devices at hand, with NVML played by a stand-in."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from whale.comm import World
from whale.errors import ClusterError
from whale.hardware import catalogue
from whale.measure import devices_at_hand, rank_profiles
from whale.measure.devices import Gpu, gpus, host_cores, host_memory, in_cuda_order

Handle = int | tuple[int, int]
ALONE = World(0, 1, 0, 1, torch.device("cpu"), timedelta(seconds=1))


class NVMLError(Exception):
    pass


@dataclass
class Nvml:
    """What is used of the module pynvml; a handle is a position among `names`, or that of a card and of a slice of it.

    Attributes:
        slices: per card in MIG mode, the places of its slices.
    """

    names: list[str]
    details: bool = True
    broken: bool = False
    started: int = 0
    slices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    NVML_DEVICE_MIG_ENABLE: int = 1
    NVMLError: type[Exception] = field(default=NVMLError)
    NVML_CLOCK_SM: int = 1
    NVML_CLOCK_MEM: int = 2

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("driver not loaded")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple[int, int]:
        for card, places in self.slices.items():
            for place in places:
                if uuid == self.nvmlDeviceGetUUID((card, place)):
                    return card, place
        raise NVMLError(f"no {uuid}")

    def nvmlDeviceIsMigDeviceHandle(self, handle: Handle) -> int:
        return int(isinstance(handle, tuple))

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not self.slices:
            raise NVMLError("not supported")
        return [int(handle in self.slices), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:
        if place not in self.slices[handle]:
            raise NVMLError("not found")
        return handle, place

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return f"MIG-{'abcdef'[handle[0]]}{handle[1]}" if isinstance(handle, tuple) else f"GPU-{'abcdef'[handle]}000"

    def nvmlDeviceGetName(self, handle: Handle) -> bytes:
        return f"{self.names[handle[0]]} MIG 1g.5gb".encode() if isinstance(handle, tuple) else self.names[handle].encode()

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> SimpleNamespace:
        return SimpleNamespace(total=5 << 30 if isinstance(handle, tuple) else (handle + 1) * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> list[int]:
        if isinstance(handle, tuple):
            return [8, 0]
        return [7, 0] if "V100" in self.names[handle] else [7, 5]

    def nvmlDeviceGetNumGpuCores(self, handle: Handle) -> int:
        if not self.details or isinstance(handle, tuple):
            raise NVMLError("not supported")
        return 1000

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return {1: 2000, 2: 5000}[clock]

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return 256


def play(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, visible: str | None = None, cuda: str | None = "13.0") -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return nvml


def test_gpus_with_the_figures_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = play(monkeypatch, Nvml(["Tesla V100-SXM2-32GB", "Tesla T4"]))
    cluster = devices_at_hand()
    assert [device.model for device in cluster.devices] == ["V100-32GB", "T4"]
    assert [device.memory for device in cluster.devices] == [2**30, 2**31]
    assert cluster.devices[0].peak_flops("float16") == 125e12
    assert cluster.hosts[0].link == catalogue().links["pcie3"]
    assert nvml.started == 0


def test_fewer_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Nvml(["NVIDIA H200"] * 4))
    assert len(devices_at_hand(2).devices) == 2
    assert len(devices_at_hand().devices) == 4


def test_more_ranks_than_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Nvml(["Tesla T4", "Tesla T4"]))
    whole = catalogue().devices["T4"]
    first, second, third = devices_at_hand(3).devices
    assert (first.memory, second.memory, third.memory) == (2**29, 2**31, 2**29)
    assert first.peak_flops("float32") == dict(whole.flops)["float32"] / 2
    assert second.peak_flops("float32") == dict(whole.flops)["float32"]
    assert [each.sharers for each in (first, second, third)] == [2, 1, 2]
    assert not devices_at_hand(3).has_nccl and devices_at_hand(2).has_nccl


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "abc"), ("2,0", "ca"), ("GPU-b", "b"), ("", ""), ("-1", ""), ("1,7,0", "b"), (" 1 , 2 ", "bc"), ("GPU-", "")],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str) -> None:
    play(monkeypatch, Nvml(["Tesla T4"] * 3))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.uuid[4] for gpu in gpus(environment)] == list(expected)


A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("slices", "visible", "expected"),
    [
        ({0: (0, 1), 1: (0,)}, None, "MIG-a0"),
        ({0: (2, 5)}, None, "MIG-a2"),
        ({1: (3,)}, None, "MIG-b3"),
        ({1: (3,)}, "0", "GPU-a000"),
        ({0: (0, 1), 1: (0,)}, "1,0", "MIG-b0"),
        ({0: (0, 1), 1: (0,)}, "MIG-a1", "MIG-a1"),
        ({0: (0, 1), 1: (0,)}, "MIG-b0,MIG-a1", "MIG-b0"),
        ({0: ()}, None, "GPU-b000"),
        ({0: (), 1: ()}, None, ""),
    ],
)
def test_of_cards_in_slices_a_process_has_one_slice(
    monkeypatch: pytest.MonkeyPatch, slices: dict[int, tuple[int, ...]], visible: str | None, expected: str
) -> None:
    play(monkeypatch, Nvml([A100] * 2, slices=slices), visible)
    assert [gpu.uuid for gpu in gpus()] == ([expected] if expected else [])


def test_a_slice_is_not_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Nvml([A100] * 2, slices={0: (0, 1)}))
    (gpu,) = gpus()
    assert (gpu.name, gpu.memory, gpu.flops) == (f"{A100} MIG 1g.5gb", 5 << 30, 0.0)
    assert rank_profiles(ALONE)[0].model == gpu.name
    with pytest.raises(ClusterError, match=r"unknown device model 'NVIDIA A100-SXM4-40GB MIG 1g\.5gb'"):
        devices_at_hand()


def test_a_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = play(monkeypatch, Nvml(["Tesla T4"]), visible="MIG-1")
    with pytest.raises(ClusterError, match=r"a GPU does not respond \(no MIG-1\)"):
        devices_at_hand(1)
    assert nvml.started == 0


def test_an_unknown_gpu_is_described_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Nvml(["Brand New"]))
    device = devices_at_hand(1).devices[0]
    assert device.model == "Brand New"
    assert device.peak_flops("float32") == device.peak_flops("bfloat16") == 2 * 1000 * 2e9
    assert device.bandwidth == 2 * 32 * 5e9


def test_an_unknown_gpu_that_nvml_cannot_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Nvml(["Brand New"], details=False))
    assert rank_profiles(ALONE)[0].model == "Brand New"  # harmless with a cluster file
    with pytest.raises(ClusterError, match="unknown device model 'Brand New'") as caught:
        devices_at_hand(1)
    assert "cluster file" in str(caught.value)


@pytest.mark.parametrize(
    ("built_for", "runs"),
    [
        (["sm_75", "sm_80"], False),
        (["sm_70", "sm_80"], True),
        (["sm_60"], False),
        (["compute_60"], True),
        (["compute_75"], False),
        (["sm_70a"], True),
        (["sm_90a"], False),
        ([], True),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(monkeypatch: pytest.MonkeyPatch, built_for: list[str], runs: bool) -> None:
    play(monkeypatch, Nvml(["Tesla V100-SXM2-32GB"]))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    if runs:
        assert rank_profiles(ALONE)[0].model == "V100-32GB"
        return
    with pytest.raises(ClusterError, match=r"no kernels for Tesla V100-SXM2-32GB \(compute capability 7\.0; built for ") as caught:
        rank_profiles(ALONE)[0]
    assert "CUDA 12.6" in str(caught.value) and devices_at_hand().devices[0].model == "V100-32GB", "it can be planned for"


@pytest.mark.parametrize("why", ["no driver", "no library", "hidden", "torch without CUDA"])
def test_cpu_ranks_otherwise(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    play(
        monkeypatch,
        Nvml(["Tesla T4"], broken=why == "no driver"),
        visible="" if why == "hidden" else None,
        cuda=None if "torch" in why else "13",
    )
    if why == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    cluster = devices_at_hand(4)
    assert [device.model for device in cluster.devices] == ["cpu"] * 4
    assert sum(device.memory for device in cluster.devices) <= host_memory()
    core = dict(catalogue().devices["cpu"].flops)["float32"]
    assert sum(device.peak_flops("float32") for device in cluster.devices) == pytest.approx(host_cores() * core)
    assert len(devices_at_hand().devices) == 1


def test_less_than_one_rank() -> None:
    with pytest.raises(ClusterError, match="0 ranks for a cluster"):
        devices_at_hand(0)


def test_more_ranks_than_a_machine_is_asked_for() -> None:
    with pytest.raises(ClusterError, match="10000000 ranks on this machine are more than 4,096") as caught:
        devices_at_hand(10_000_000)
    assert "devices: 10000000 x cpu}]" in str(caught.value)


def test_cuda_counts_unlike_gpus_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Gpu("GPU-a", "slow", 1), Gpu("GPU-b", "fast", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ba"[index]))
    assert in_cuda_order((slow, fast), {}) == (fast, slow)
    assert in_cuda_order((slow, fast), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (slow, fast)
    assert in_cuda_order((slow, slow), {}) == (slow, slow)
    with pytest.raises(ClusterError, match="CUDA and NVML disagree"):
        in_cuda_order((slow, Gpu("GPU-c", "fast", 2)), {})


def test_limits_of_a_container(tmp_path: Path) -> None:
    assert host_memory(tmp_path) > 2**20
    assert host_cores(tmp_path) >= 1
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host_memory(tmp_path) == 2**20
    assert host_cores(tmp_path) == 0.5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2097152\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert host_memory(tmp_path) == 2**21
    assert host_cores(tmp_path) == host_cores(tmp_path / "none")


@dataclass(frozen=True)
class Gathering(World):
    """A rank of several on one host, whose GPUs are known."""

    gpus: tuple[str, ...] = ()

    def gather_objects(self, value: object) -> list[object]:
        assert isinstance(value, tuple) and value[1] == self.gpus[self.rank]
        return [(value[0], gpu) for gpu in self.gpus]


@pytest.mark.parametrize(
    ("gpus", "parts"),
    [(("MIG-a0", "MIG-a1"), (1, 1)), (("MIG-a0", "MIG-a0"), (2, 2)), (("MIG-a0", "MIG-b0", "MIG-a0", "MIG-c0"), (2, 1, 2, 1))],
)
def test_ranks_share_a_gpu_that_is_the_same(monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], parts: tuple[int, ...]) -> None:
    """Each sees one slice alone, as where a launcher sets CUDA_VISIBLE_DEVICES for every rank."""
    play(monkeypatch, Nvml([A100] * 2, slices={0: (0, 1)}), "MIG-a0")
    world = Gathering(0, len(gpus), 0, len(gpus), torch.device("cpu"), timedelta(seconds=1), gpus=gpus)
    assert [each.memory for each in rank_profiles(world)] == [(5 << 30) // part for part in parts]
    assert [each.num_cores for each in rank_profiles(world)] == [1 / part for part in parts]


def test_a_rank_has_the_gpu_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun there is no ``LOCAL_RANK``, and it is 0 for all."""
    play(monkeypatch, Nvml([A100] * 2), cuda="13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    identifiers = [gpu.uuid for gpu in gpus()]
    for rank in (0, 1):
        world = Gathering(rank, 2, 0, 2, torch.device("cuda", rank), timedelta(seconds=1), gpus=tuple(identifiers))
        assert [each.memory for each in rank_profiles(world)] == [gpus()[rank].memory] * 2
