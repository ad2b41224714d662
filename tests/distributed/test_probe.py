"""Ranks that measure one another: all have the same cluster, and `whale probe` starts them and writes it."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch

from tests.distributed.launched import python
from tests.distributed.ranks import PATIENCE_SECONDS
from tests.distributed.world import World as Ranks
from whale.comm import World
from whale.hardware import DeviceProfile, cluster_text, load_cluster, parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.profile import read_profile
from whale.measure import link_speed, probing
from whale.measure.probing import probe


def measure_little() -> None:
    """From now on small sizes are measured."""
    probing.SIZES, probing.DTYPES = {"cpu": (8, 16)}, ("float32", "bfloat16")
    probing.BEYOND_CACHES = {"cpu": 1 << 10}
    link_speed.LARGE_BYTES = link_speed.LARGE_SUM = 1 << 12
    link_speed.SMALL_SUM = link_speed.SWEPT_BYTES = 1 << 8
    link_speed.PERIODS = 1e-2


def measure(rank: int, num_ranks: int, on_host: int) -> tuple[Cluster, list[str]]:
    """What is measured is not looked at. So many ranks make a host."""
    measure_little()
    told: list[str] = []
    probing.rank_profiles = lambda _: [DeviceProfile(f"host{number // on_host}", "cpu", 2**30) for number in range(num_ranks)]  # type: ignore[attr-defined]
    world = World(rank, num_ranks, rank % on_host, on_host, torch.device("cpu"), timedelta(seconds=PATIENCE_SECONDS))
    cluster, _ = probe(world, 2, told.append)
    return cluster, told


def test_all_ranks_have_one_cluster(world: Ranks) -> None:
    found = world.run(measure, 4, num_ranks=4)
    cluster, told = found[0]
    assert all(other == cluster for other, _ in found)
    (host,) = cluster.hosts
    assert len(host.devices) == 4
    names: Counter[str] = Counter()
    for figure in cluster.measured:  # ranks of which one was slowed down meanwhile are told apart
        names[figure.name.partition(": ")[2]] += figure.num_samples
    assert names["memory"] == 8 and names["bandwidth, alone"] == 4 and names["bandwidth, all at once"] == 8
    assert names["products of float32, 16 x 16, one rank alone"] == 2
    assert [what for what in told if what.startswith("messages")] == [
        f"messages inside {host.name}, {how}" for how in ("alone", "all at once")
    ]
    assert names["handling of a message"] == names["handling of bytes"] == 8
    assert all(device.handling for device in host.devices)


def test_ranks_of_several_hosts_measure_what_is_between_them(world: Ranks) -> None:
    found = world.run(measure, 2, num_ranks=4)
    cluster, told = found[0]
    assert all(other == cluster for other, _ in found)
    assert [host.name for host in cluster.hosts] == ["host0", "host1"] and cluster.network is not None
    assert [what for what in told if what.startswith("messages")] == [
        f"messages {where}, {how}" for where in ("inside host0", "inside host1", "host0 - host1") for how in ("alone", "all at once")
    ]
    assert [len(host.devices) for host in parse_cluster(cluster_text(cluster)).hosts] == [2, 2]


def test_the_verb_starts_ranks_and_writes_what_they_measured(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    result = python("-m", "whale", "probe", "--ranks", "2", "--rounds", "1", "--output", str(path))
    assert result.returncode == 0, result.stderr
    assert "messages inside" in result.stderr and "written to" in result.stdout
    cluster = load_cluster(path)
    assert len(cluster.devices) == 2


SCRIPT = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    return model, (torch.randn(4, 8),), lambda output, batch: output.square().mean()
"""
CLUSTER = "hosts: [{name: a, devices: {model: cpu, count: 2}}]\n"


def test_the_verb_profiles_on_as_many_ranks_as_the_cluster_has(tmp_path: Path) -> None:
    (tmp_path / "profiled.py").write_text(SCRIPT)
    (tmp_path / "two.yaml").write_text(CLUSTER)
    words = ["profile", "profiled.py:build", "--cluster", "two.yaml", "--rounds", "1", "--output", "p.json"]
    result = python("-m", "whale", *words, cwd=tmp_path, ranks=2)
    assert result.returncode == 0, result.stderr
    (kind,) = read_profile(tmp_path / "p.json").kinds
    assert kind.device == load_cluster(tmp_path / "two.yaml").devices[0].kind
    assert [figure.num_samples for figure in kind.forward] == [1, 1], "the slower rank of a round"
