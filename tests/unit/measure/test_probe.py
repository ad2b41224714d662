"""What ranks measure as a cluster: who exchanges with whom, what is pooled, what is shared; and the verb on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.measure.test_devices import Nvml, NVMLError, play
from whale.cli import main
from whale.hardware import DeviceProfile, catalogue, load_cluster
from whale.ir.cluster import NO_HANDLING, Handling, Link
from whale.measure import probing
from whale.measure.devices import gpu_notes
from whale.measure.link_speed import ALONE, AT_ONCE, ExchangePhase, phases
from whale.measure.probing import Report, probed_cluster
from whale.measure.samples import Samples


def test_pairs_alone_and_all_at_once() -> None:
    found = list(phases(["a", "a", "b", "a", "b", "a", "c"]))
    assert found == [
        ExchangePhase("inside a", ALONE, ((0, 1), (1, 0))),
        ExchangePhase("inside a", AT_ONCE, ((0, 1), (1, 3), (3, 5), (5, 0))),
        ExchangePhase("inside b", ALONE, ((2, 4), (4, 2))),
        ExchangePhase("inside b", AT_ONCE, ((2, 4), (4, 2))),
        ExchangePhase("a - b", ALONE, ((0, 2), (2, 0))),
        ExchangePhase("a - b", AT_ONCE, ((0, 2), (2, 0), (1, 4), (4, 1))),
        ExchangePhase("b - c", ALONE, ((2, 6), (6, 2))),
        ExchangePhase("b - c", AT_ONCE, ((2, 6), (6, 2))),
    ]
    assert list(phases(["a"])) == []


def report(host: str, speed: float, *messages: tuple[str, str, float]) -> Report:
    products = [("float32, 128 x 128", speed / 2), ("float32, 1024 x 1024", speed), ("bfloat16, 128 x 128", speed / 3)]
    compute = [Samples(f"products of {name}", "FLOP/s", (value, value)) for name, value in products]
    compute += [Samples("products of float32, 1024 x 1024, one rank alone", "FLOP/s", (4 * speed,))]
    compute += [Samples("memory", "B/s", (2e10,)), Samples("start of a kernel", "s", (2e-6,))]
    sent = [(where, Samples(f"{what}, {how}", unit, (value,))) for where, how, value in messages for what, unit in UNITS]
    return Report(DeviceProfile(host, "cpu", 2**30), tuple(compute), tuple(sent))


UNITS = (("latency", "s"), ("bandwidth", "B/s"))


def test_alike_devices_are_pooled_and_what_hosts_share_is_a_card() -> None:
    cluster = probed_cluster(
        [
            report("a", 1e9, ("inside a", ALONE, 5.0), ("inside a", AT_ONCE, 3.0), ("a - b", ALONE, 4.0), ("a - b", AT_ONCE, 3.0)),
            report("a", 1.1e9),
            report("b", 8e9, ("inside b", ALONE, 7.0), ("inside b", AT_ONCE, 6.0)),
            report("b", 8e9),
        ]
    )
    a, b = cluster.hosts
    assert [dict(device.flops) for device in a.devices] == [{"float32": 1.05e9, "bfloat16": pytest.approx(1.05e9 / 3)}] * 2
    assert b.devices[0].peak_flops("float32") == 8e9
    assert a.devices[0].kernel_start == 2e-6 and a.devices[0].bandwidth == 2e10
    assert (a.link, b.link, cluster.network) == (Link(3.0, 3.0), Link(6.0, 6.0), Link(4.0, 4.0))
    assert (a.card, b.card) == (6.0, 6.0), "two pairs at once had 3 each, where one alone has 4"
    assert {figure.name for figure in cluster.measured} >= {"a cpu: memory", "inside a: bandwidth, all at once", "a - b: latency, alone"}


def test_a_slower_device_of_the_same_kind_is_not_pooled_with_the_others() -> None:
    (host,) = probed_cluster([report("a", speed) for speed in (1e9, 3e9, 2.9e9, 1.1e9)]).hosts
    assert [device.peak_flops("float32") for device in host.devices] == [1.05e9, 2.95e9, 2.95e9, 1.05e9]


def test_what_messages_take_of_a_rank() -> None:
    first = report("a", 1e9)
    sums = (Samples("handling of a message", "s", (2e-4, 4e-4)), Samples("handling of bytes", "B/s", (1e9, 3e9)))
    cluster = probed_cluster([replace(first, compute=(*first.compute, *sums)), report("a", 5e9)])
    assert [device.handling for device in cluster.devices] == [Handling(pytest.approx(3e-4), 1 / 2e9), NO_HANDLING]


def test_a_link_that_all_share_is_as_one_pair_has_it() -> None:
    figures = {"latency": ("s", (1e-4, 2e-4, 6e-4)), "bandwidth": ("B/s", (1e9, 3e9, 4e9))}
    messages = tuple(
        ("inside a", Samples(f"{what}, {how}", unit, values)) for how in (ALONE, AT_ONCE) for what, (unit, values) in figures.items()
    )
    (host,) = probed_cluster([replace(report("a", 1e9), messages=messages), report("a", 1e9)]).hosts
    assert host.link == Link(3e9, 2e-4)
    shared = [("inside a", Samples(f"bandwidth, {AT_ONCE}", "B/s", (1e9,)))]
    kept = [(where, each) for where, each in messages if each.name != f"bandwidth, {AT_ONCE}"]
    (host,) = probed_cluster([replace(report("a", 1e9), messages=(*kept, *shared)), report("a", 1e9)]).hosts
    assert host.link == Link(3e9, 2e-4, True)


def test_a_gpu_is_as_fast_as_measured_and_waits_for_its_host() -> None:
    first = report("a", 1e12)
    (device,) = probed_cluster([replace(first, profile=DeviceProfile("a", "T4", 2**34))]).devices
    assert device.reached_flops("float32") == 1e12 and device.traffic == 1.0
    assert (device.kernel_start, device.host_seconds) == (None, 2e-6), "a GPU's host runs ahead"
    assert device.half_width == catalogue().devices["T4"].half_width


def test_pairs_that_get_together_what_one_has_alone_share_the_link() -> None:
    first = report("a", 1e9, ("inside a", ALONE, 5.0), ("inside a", AT_ONCE, 1.3))
    (host,) = probed_cluster([first, *[report("a", 1e9)] * 3]).hosts
    assert host.link == Link(5.0, 1.3, shared=True)


def test_a_network_that_no_pair_slows_is_not_shared() -> None:
    cluster = probed_cluster([report(host, 1e9, ("a - b", ALONE, 4.0), ("a - b", AT_ONCE, 3.9)) for host in "ab"])
    assert [host.card for host in cluster.hosts] == [None, None]
    assert cluster.warnings == ()


class Linked(Nvml):
    """Two GPUs with four NVLinks each, and two without."""

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle > 1 or link > 5:
            raise NVMLError("no such link")
        return int(link < 4)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        if handle == 3:
            raise NVMLError("not supported")
        return 16

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1500

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        raise NVMLError("not supported")

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        raise NVMLError("not supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        raise NVMLError("not supported")

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return 40 if (first, second) != (2, 3) else 99


def test_gpus_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Linked(["A100"] * 4))
    assert gpu_notes({}) == (
        "GPU 0, A100: 4 NVLinks, PCIe 4 x16, 1500 of 2000 MHz",
        "GPU 1, A100: 4 NVLinks, PCIe 4 x16, 1500 of 2000 MHz",
        "GPU 2, A100: no NVLink, PCIe 4 x16, 1500 of 2000 MHz",
        "GPU 3, A100: no NVLink, 1500 of 2000 MHz",
        "GPU 0 - GPU 1: 4 NVLinks",
        "GPU 0 - GPU 2: through one NUMA node",
        "GPU 0 - GPU 3: through one NUMA node",
        "GPU 1 - GPU 2: through one NUMA node",
        "GPU 1 - GPU 3: through one NUMA node",
        "GPU 2 - GPU 3: through an unknown connection",
    )


@dataclass
class Wired(Linked):
    """GPUs whose NVLinks say where they end.

    Attributes:
        ends: per GPU, at which GPU, or switch ``x`` or ``y``, each of its links ends.
        users: per GPU, processes and the bytes that they have there.
    """

    ends: tuple[tuple[str, ...], ...] = ()
    NVML_NVLINK_DEVICE_TYPE_SWITCH: int = 2
    users: tuple[dict[int, int | None], ...] = ({}, {}, {}, {})

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link < len(self.ends[handle]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.ends[handle][link] in "xy" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.ends[handle][link].encode())

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId="0123"[handle].encode())

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.users[handle].items()]


def told_of_pairs(monkeypatch: pytest.MonkeyPatch, *ends: tuple[str, ...]) -> dict[str, str]:
    play(monkeypatch, Wired(["A100"] * len(ends), ends=ends))
    notes = (note.removeprefix("GPU ").split(": ") for note in gpu_notes({}) if " - " in note)
    return {pair.replace(" - GPU ", ""): way for pair, way in notes}


def test_links_that_join_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_of_pairs(monkeypatch, ("1", "1"), ("0", "0"), ("3", "3"), ("2", "2"))
    assert {pair for pair, way in told.items() if way == "2 NVLinks"} == {"01", "23"}
    assert told["02"] == told["13"] == "through one NUMA node" and len(told) == 6


def test_pairs_with_more_links_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_of_pairs(monkeypatch, ("1", "2", "2"), ("0", "2"), ("0", "0", "1"))
    assert told == {"01": "1 NVLink", "02": "2 NVLinks", "12": "1 NVLink"}


def test_nothing_is_told_of_pairs_that_a_switch_joins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_of_pairs(monkeypatch, *[("x", "x", "y", "y")] * 4) == {}


@pytest.mark.parametrize(
    ("own", "told"), [((7,), "also used by 2 processes of others (3.00 GiB)"), ((8, 9), "also used by 1 process of others"), ((1,), "")]
)
def test_a_gpu_that_others_use(monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...], told: str) -> None:
    play(monkeypatch, Wired(["A100", "T4"], ends=((), ()), users=({7: 1 << 30, 8: 3 << 30, 9: None}, {})))
    first, second, _ = gpu_notes({}, own)
    assert told in first and ("used by" in first) == bool(told) and "used by" not in second


def test_the_verb_writes_a_cluster_that_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probing, "SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(probing, "BEYOND_CACHES", {"cpu": 1 << 10})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "here.yaml"
    assert main(["probe", "--rounds", "2", "--output", str(path)]) == 0
    said = capsys.readouterr()
    assert "memory: " in said.out and f"written to {path}" in said.out
    assert "whale probe: the speed of 1 rank, all at once" in said.err
    cluster = load_cluster(path)
    assert [device.model for device in cluster.devices] == ["cpu"] and cluster.measured
    assert {"float32", "bfloat16", "float16", "float64"} <= set(dict(cluster.devices[0].flops))


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_too_few_ranks(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--ranks", ranks]) == 1
    assert "--ranks must be at least 1" in capsys.readouterr().err
