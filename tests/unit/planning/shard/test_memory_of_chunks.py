"""The chunks of an interleaved pipeline that are split share the memory of their devices."""

from __future__ import annotations

import pytest

from whale.config import Config
from whale.estimate import Costs, estimate
from whale.hardware import parse_cluster
from whale.planning import make_plan
from whale.workloads import GPT

pytestmark = pytest.mark.slow

AXES = ["attention.qkv.weight:0.1", "up.weight:0", "tokens.vocabulary"]
CHUNKS = {"schedule": "interleaved", "num_chunks": 2}
HOSTS = "hosts: [{count: 2, devices: [A100-80GB, {model: A100-80GB, memory: %s}]}]\nnetwork: ethernet-10g\n"


@pytest.mark.parametrize("more", [{}, CHUNKS], ids=["whole stages", "chunks"])
def test_units_move_to_the_devices_that_have_room_for_all_chunks(more: dict[str, object]) -> None:
    """Equal devices but for memory: the smaller ones have too little for equal parts of all chunks, but not of each by itself."""
    graph = GPT(layers=8, hidden=128, heads=16, sequence=64, vocabulary=512, attention="explicit", dropout=0.1).graph()
    plan = {"num_stages": 2, "blocks": "even", "split": 2, "axes": AXES, "micro_batch_rows": 1, "recompute": "none"}
    config = Config({"plan": {**plan, **more}, "estimate.communicator_bytes": 0})
    roomy = parse_cluster(HOSTS % "80 GiB")
    equal = make_plan(graph, roomy, config, rows=8)
    assert all(len(set(shard.sizes)) == 1 for stage in equal.replicas[0].stages for shard in stage.shards)
    most = max(device.peak.total for device in estimate(equal, graph, roomy, Costs(communicator_bytes=0)).devices)
    tight = make_plan(graph, parse_cluster(HOSTS % f"{int(most)} B"), config, rows=8)
    assert any(shard.sizes[0] > shard.sizes[1] for stage in tight.replicas[0].stages for shard in stage.shards)
