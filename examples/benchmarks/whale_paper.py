"""The studies of the Whale paper on V100 and P100 devices, each as plans that are simulated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figure import Figure
from torch import Tensor, nn

import whale
from whale.capture import capture
from whale.config import Config
from whale.estimate import Costs, estimate
from whale.estimate.prices.collective_costs import CollectiveCosts, StagePlace
from whale.estimate.prices.prices import Prices
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Replica, Stage
from whale.planning import make_plan
from whale.units import counted
from whale.workloads import GPT

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import ResNet

CLASSES = 100_000
ROWS = 64
"""Images of a device in a step."""

INSIDE = "link: {bandwidth: 10 GB/s, latency: 8 us}, card: 25 Gbit/s"
"""Of every host, which the paper does not describe: each device at a PCIe 3 switch, by ways of its own; half of the 50 Gbit/s of the card
that all share."""


class Classifier(nn.Module):
    """A ResNet-50 and a layer with one output for each class.

    Args:
        classes: how many there are.
        split: under what the layer is; None for no scopes at all.
    """

    def __init__(self, classes: int, split: whale.Scope | None) -> None:
        super().__init__()
        if split is None:
            self.backbone, self.head = ResNet(50, 64), nn.Linear(2048, classes)
            return
        whale.set_default_strategy(whale.replicate())
        self.backbone = ResNet(50, 64)
        with split:
            self.head = nn.Linear(2048, classes)
        whale.set_default_strategy(None)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[rows, classes]`` of images ``[rows, 3, 56, 56]``."""
        logits: Tensor = self.head(self.backbone(images))
        return logits


@cache
def classifier(classes: int, kind: str) -> ModelGraph:
    """The graph, with the classifier ``copied``, or split by ``classes`` or by ``features``."""
    splits = {"classes": {"axis": "head.weight:0"}, "features": {"axis": "backbone.blocks.channels.1#4"}}
    with torch.device("meta"):
        model = Classifier(classes, whale.split(name="classifier", **splits[kind]) if kind in splits else None)
        batch = {"images": torch.zeros(4, 3, 56, 56), "label": torch.zeros(4, dtype=torch.int64)}
    graph, _ = capture(model, batch, lambda logits, given: F.cross_entropy(logits, given["label"]))
    return graph


def of_v100s(num_devices: int) -> Cluster:
    """Hosts of 8 V100-32GB."""
    hosts, count = max(1, num_devices // 8), min(8, num_devices)
    return parse_cluster(f"hosts: [{{count: {hosts}, devices: {count} x V100-32GB, {INSIDE}}}]\nnetwork: ethernet-50g\n")


def seconds(graph: ModelGraph, cluster: Cluster, config: Mapping[str, Any], rows: int, *, scatters: bool = True) -> float:
    """Seconds of a step by the plan that a configuration asks for.

    Args:
        graph: the model.
        cluster: the devices.
        config: what is asked for.
        rows: of the batch.
        scatters: whether of a sum inside a split group each device may keep a part; else it is whole on all.
    """
    plan = make_plan(graph, cluster, Config(config), rows=rows)
    if not scatters:
        plan = replace(plan, replicas=tuple(map(_summed_whole, plan.replicas)))
    return estimate(plan, graph, cluster, Costs()).step_seconds


def _summed_whole(replica: Replica) -> Replica:
    stages = (replace(stage, shards=tuple(replace(shard, scattered=()) for shard in stage.shards)) for stage in replica.stages)
    return replace(replica, stages=tuple(stages))


BESIDE = {"cluster.colocate_split_and_replicate": True}
"""The split layer on the devices of the copied backbone."""


def many_classes() -> Iterator[Figure]:
    """Jia et al., Whale, USENIX ATC'22: samples per second of a ResNet-50 over 100,000 classes on V100-32GB, 8 a host, 50 Gbit/s between.

    In float32, 64 rows for each device, which the paper does not tell. Nor does it describe its hosts: here, and in the blocks below, the
    devices of each are at PCIe 3 switches, 10 GB/s for each. (With NVLink gradients would be summed behind the backward pass: 12 % too
    much on 8 GPUs.) The first convolution is one of 3 x 3 on images of 56 x 56, where the layers behind it begin; group normalisation in
    place of batch normalisation. The sum of gradients hides in the whole backward pass: the classifier's, nine tenths of all, are final
    first.
    """
    published = {1: (319, 319), 8: (2246, 2547), 16: (2843, 4729), 32: (3612, 8788)}
    for count, (copied, hybrid) in published.items():
        rows, cluster = ROWS * count, of_v100s(count)
        found = rows / seconds(classifier(CLASSES, "copied"), cluster, {"plan": {"replicas": count}}, rows)
        yield Figure(f"data parallel, {counted(count, 'GPU')}", copied, found)
        if count > 1:
            yield Figure(
                f"copied backbone, split classifier, {count} GPUs",
                hybrid,
                rows / seconds(classifier(CLASSES, "classes"), cluster, BESIDE, rows),
            )


def sharding_patterns() -> Iterator[Figure]:
    """Jia et al.: the classifier of the block before split by its classes (SP1), over split by its features (SP2): ratio of throughput.

    By features every device has a term of all logits; they are summed whole, as the paper does. (Whale keeps parts of the sum, in half
    of the time.) On 8 GPUs the paper's extra time, 0.62 of a step of 0.2 s, is that of 205 MB summed at 2.9 GB/s a device, as on 16 (3.4)
    and 32 (2.5), as if the 8 were not on one host; at that rate the 872 MB of gradients of the block before would take 0.5 s, and its whole
    step took 0.23 s. No one rate for a host explains both, and no number of rows: more of them give gradients more time to hide, and would
    make 32 GPUs too fast. (EPL's code sums the gradients of a sum again; the prediction gathers their parts. Two whole sums would be -15,
    +12 and +16 %.)
    """
    for count, published in ((8, 1.62), (16, 2.03), (32, 3.75)):
        rows, cluster = ROWS * count, of_v100s(count)
        by_classes = seconds(classifier(CLASSES, "classes"), cluster, BESIDE, rows)
        by_features = seconds(classifier(CLASSES, "features"), cluster, BESIDE, rows, scatters=False)
        yield Figure(f"by classes over by features, {count} GPUs", published, by_features / by_classes)


def bridges() -> Iterator[Figure]:
    """Jia et al.: what bridges take of a step, of the copied backbone and the classifier split by its classes of the blocks before.

    Features handed from rows to the whole batch, their gradients back, and what the devices of the classifier sum; gradients of weights
    are not among it. There is no published number to set beside it.
    """
    for count in (8, 16, 32):
        graph, cluster, rows = classifier(CLASSES, "classes"), of_v100s(count), ROWS * count
        plan = make_plan(graph, cluster, Config(BESIDE), rows=rows)
        step, prices = estimate(plan, graph, cluster, Costs()), Prices(graph, cluster, Costs())
        handed_on = replace(step.straggler, syncs=()).communicating
        summed = sum(_summing(prices, stage, rows) for stage in plan.replicas[0].stages if stage.shards)
        yield Figure(f"share of bridges in a step, {count} GPUs", None, (handed_on + summed) / step.step_seconds)


def _summing(prices: Prices, stage: Stage, rows: int) -> float:
    """Seconds of what the devices of a split stage exchange among them, both ways."""
    collective_costs = CollectiveCosts(prices, StagePlace((stage.virtual_device.devices,), rows, 1, 1))
    found = (collective_costs.both_ways(bridge) for bridge in prices.bridges(stage.ops, stage.shards, frozenset()))
    return sum(there.at(rows) + back.at(rows) for there, back in found)


def bert_large() -> ModelGraph:
    """BERT-Large as a GPT of its size, in float32."""
    return GPT(layers=24, hidden=1024, heads=16, sequence=512, vocabulary=30522, attention="explicit", dropout=0.1).graph()


def bert_pipelines() -> Iterator[Figure]:
    """Jia et al.: how much faster a pipeline of BERT-Large is than one V100; GPipe computes stages again, backward-first keeps all.

    As a GPT of its size (24 layers, hidden 1,024, 512 tokens) in float32, on one host, 20 micro-batches of 4 rows. Neither number is told:
    20 is what suits the four best, of one number for all. (With the 35 that the paper tells for M6, 8 stages are 20 % too good.)
    """
    graph, rows = bert_large(), 4 * 20
    alone = seconds(graph, of_v100s(1), {"plan": {"num_micro_batch": 20}}, rows)
    published = {4: (2.48, 3.63), 8: (4.40, 5.00)}
    for stages, figures in published.items():
        for figure, schedule, recompute in zip(figures, ("gpipe", "1f1b"), ("full", "none"), strict=True):
            plan = {"num_stages": stages, "num_micro_batch": 20, "schedule": schedule, "recompute": recompute}
            found = alone / seconds(graph, of_v100s(stages), {"plan": plan}, rows)
            yield Figure(f"{stages} stages, {'GPipe' if schedule == 'gpipe' else 'backward first'}", figure, found)


def m6() -> Iterator[Figure]:
    """Jia et al.: M6-10B on V100-32GB, 8 stages and 35 micro-batches: throughput on 32 hosts over four times that on 8.

    As a GPT of 48 layers, hidden 4,096 (9.7 billion parameters), 512 tokens, in float16 with stages computed again, one row a micro-batch.
    """
    graph = GPT(
        layers=48, hidden=4096, heads=32, sequence=512, vocabulary=21128, dtype="float16", attention="explicit", dropout=0.1
    ).graph()
    plan = {"num_stages": 8, "num_micro_batch": 35, "recompute": "full"}
    few, many = (seconds(graph, of_v100s(8 * hosts), {"plan": plan | {"replicas": hosts}}, 35 * hosts) for hosts in (8, 32))
    yield Figure("256 GPUs over 64 GPUs, of what is possible", 0.91, few / many)


def unlike_devices() -> Iterator[Figure]:
    """Jia et al.: how much faster balanced shares are than equal ones on V100-32GB and P100-16GB.

    BERT-Large as a GPT of its size in float32, hosts as in the blocks before; 2,048 rows in data parallelism, 512 in the pipeline, in
    micro-batches of 2 to 4, which the paper does not tell: so many that computing rules. ResNet-50 over 1,000 classes, 64 rows a device.
    """
    many, few = (
        parse_cluster(f"hosts: [{{devices: {n} x V100-32GB, {INSIDE}}}, {{devices: {n} x P100, {INSIDE}}}]\nnetwork: ethernet-50g\n")
        for n in (8, 4)
    )
    graph = bert_large()
    for name, model, published, rows, num_micro_batch in (
        ("BERT-Large", graph, 1.45, 2048, 64),
        ("ResNet-50", classifier(1000, "copied"), 1.30, 16 * ROWS, 1),
    ):
        equal = {"num_micro_batch": num_micro_batch, "replicas": [{"devices": [device.name], "rows": 1} for device in many.devices]}
        balanced = {"num_micro_batch": num_micro_batch, "replicas": 16}
        found = seconds(model, many, {"plan": equal}, rows) / seconds(model, many, {"plan": balanced}, rows)
        yield Figure(f"{name}: data parallel on 8 V100 and 8 P100, proportional over equal rows", published, found)
    pipeline = {"num_stages": 4, "replicas": 2, "num_micro_batch": 64}
    even, balanced_cut = (seconds(graph, few, {"plan": plan}, 512) for plan in (pipeline | {"blocks": "even"}, pipeline))
    yield Figure("BERT-Large: 4 stages on 4 V100 and 4 P100, over an even cut", 1.23, even / balanced_cut)
