"""Training runs that others measured, each as a model, a cluster and a written plan that can be simulated as it was run.

What a source does not say is filled in by one rule for all of its runs (`RULES`), never by a constant for a row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from whale.config import Config
from whale.estimate import Costs, StepEstimate, estimate
from whale.hardware import catalogue, parse_cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Form, Replica, states_of
from whale.planning import make_plan
from whale.workloads import GPT

RULES = """All of these runs are of Megatron-LM or made from it. For all of them alike: float16 with float32 master weights and Adam
states, gradients in float16 where the source does not say float32 (16 T4 does); heads, feed-forward features and the vocabulary are cut;
kernels fused by hand (`fuses_pointwise`); gradients summed in one piece when the last backward pass is done (`bucket_bytes`), and rows
of a split stage computed at once, as Megatron-LM did then; 60 us of the host for each kernel and 20 us for each message, which no source
tells; between hosts half of the rate of the cards. The figures of a device or a link are the same in all rows and all sets."""

COSTS = Costs(fuses_pointwise=True, message_seconds=20e-6, bucket_bytes=2**60)
HOST = "60 us"
AXES = ["attention.qkv.weight:0.1", "up.weight:0", "tokens.vocabulary"]


@dataclass(frozen=True)
class Run:
    """One measured run.

    Attributes:
        layers, hidden, heads, sequence, vocabulary: of the GPT.
        device, num_devices, per_host: of the cluster.
        network: link between hosts; `card` what all devices of a host share of it, None for each its own.
        batch: rows of a step.
        plan: as it is written in a recipe.
        seconds: measured, of a step.
        gradients: their type.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    device: str
    num_devices: int
    per_host: int
    network: str
    card: str | None
    batch: int
    plan: Mapping[str, Any]
    seconds: float
    gradients: str = "float16"

    @property
    def cluster(self) -> str:
        """The cluster file."""
        count, hosts = min(self.per_host, self.num_devices), -(-self.num_devices // self.per_host)
        card = f", card: {self.card}" if self.card else ""
        device = f"{{model: {self.device}, count: {count}, host_seconds: {HOST}}}"
        return f"hosts: [{{count: {hosts}, devices: {device}{card}}}]\nnetwork: {self.network}\n"

    @property
    def constant_mfu_seconds(self) -> float:
        """Seconds of a step at the device's peak, by the usual count of FLOPs."""
        ratio = 1 + self.sequence / (6 * self.hidden) + self.vocabulary / (12 * self.layers * self.hidden)
        flops = 72 * self.batch * self.sequence * self.layers * self.hidden**2 * ratio
        return flops / (self.num_devices * dict(catalogue().devices[self.device].flops)["float16"])

    @property
    def question(self) -> tuple[Any, ...]:
        """Equal for runs that differ in their plans alone."""
        return (self.layers, self.hidden, self.heads, self.sequence, self.device, self.num_devices, self.batch)

    def __str__(self) -> str:
        plan = self.plan
        parts = plan.get("split", 1), plan["replicas"], plan["num_stages"], plan["micro_batch_rows"]
        return f"{self.layers} x {self.hidden}, t{parts[0]} d{parts[1]} p{parts[2]} b{parts[3]}, {plan['recompute']}"


def simulate(run: Run, *, costs: Costs = COSTS, scatters: bool = True) -> StepEstimate:
    """The estimate of a step of a run.

    Args:
        run: as it was run.
        costs: what prices are made of beside the figures of devices and links.
        scatters: whether tensors between split stages may cross in parts.

    Raises:
        WhaleError: it cannot be planned so.
    """
    sizes = {name: getattr(run, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    graph = _graph(GPT(**sizes, dtype="float16", attention="explicit", dropout=0.1))
    cluster = parse_cluster(run.cluster)
    plan = make_plan(graph, cluster, Config({"plan": run.plan, "communication": {"overlap": False}}), rows=run.batch)
    replicas = plan.replicas if scatters else tuple(map(_crossing_whole, plan.replicas))
    states = states_of(graph.parameters, gradient=Form(run.gradients), optimizer=Form("float32"))  # master weights, two states of Adam
    return estimate(replace(plan, parameter_states=states, replicas=replicas), graph, cluster, costs)


@lru_cache(maxsize=4)  # the runs of one model stand near one another
def _graph(model: GPT) -> ModelGraph:
    return model.graph()


def _crossing_whole(replica: Replica) -> Replica:
    """The replica with tensors whole on every device while they cross between its stages."""
    stages = (replace(stage, shards=tuple(replace(shard, arriving=(), handed_on=()) for shard in stage.shards)) for stage in replica.stages)
    return replace(replica, stages=tuple(stages))


def written(tensor: int, replicas: int, stages: int, rows: int, **more: Any) -> dict[str, Any]:
    """A plan as it is written in a recipe."""
    plan = {"replicas": replicas, "num_stages": stages, "micro_batch_rows": rows, "recompute": "blocks"} | more
    if stages > 1:
        plan.setdefault("blocks", "even")
    else:
        plan.pop("blocks", None)
    return plan | ({"split": tensor, "axes": AXES} if tensor > 1 else {})


def a100_runs(path: Path) -> Iterator[Run]:
    """Runs of the files ``a100_*.csv``: 8 A100 a host, 100 GB/s of InfiniBand for each host, every block computed again."""
    for row in csv.DictReader(path.open()):
        tensor, replicas, stages, rows = (int(row[name]) for name in ("tensor", "data", "pipeline", "micro_batch"))
        sizes = (int(row[name]) for name in ("layers", "hidden", "heads", "sequence"))
        where = "A100-80GB", int(row["gpus"]), 8, "infiniband-hdr", "50 GB/s"
        plan = written(tensor, replicas, stages, rows)
        yield Run(*sizes, 51200, *where, int(row["global_batch"]), plan, float(row["iteration_ms"]) / 1e3)  # type: ignore[call-arg]


def t4_runs(path: Path) -> Iterator[Run]:
    """Runs of ``t4_sixteen.csv``: 4 hosts of 4 T4 with one card of 50 Gbit/s, stages as stated, nothing computed again."""
    for row in csv.DictReader(path.open()):
        tensor, replicas, stages, rows = (int(row[name]) for name in ("tensor", "data", "pipeline", "micro_batch"))
        blocks = [int(count) for count in row["layers_per_stage"].split()]
        plan = written(tensor, replicas, stages, rows, blocks=blocks, recompute="none")
        yield Run(24, 1024, 16, 1024, 52256, "T4", 16, 4, "ethernet-50g", "25 Gbit/s", 32, plan, float(row["seconds"]), "float32")


def _of_a100s(num_devices: int) -> tuple[str, int, int, str, None]:
    """Hosts of 8 A100 with an InfiniBand card for each."""
    return "A100-80GB", num_devices, 8, "infiniband-hdr", None


def megatron_runs(path: Path) -> Iterator[Run]:
    """Table 1 of the SC'21 paper, from ``published.yaml``."""
    table = yaml.safe_load(path.read_text())["megatron_sc21_table1"]
    sequence, vocabulary = table["sequence"], table["vocabulary"]
    for _, heads, hidden, layers, tensor, stages, gpus, batch, tflops, rows, chunks in table["rows"]:
        ratio = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
        seconds = 96 * batch * sequence * layers * hidden**2 * ratio / (gpus * tflops * 1e12)
        plan = written(tensor, gpus // tensor // stages, stages, rows, **_chunked(chunks))
        yield Run(layers, hidden, heads, sequence, vocabulary, *_of_a100s(gpus), batch, plan, seconds)


def sequence_parallel_runs(path: Path) -> Iterator[Run]:
    """Table 5 of the paper on sequence parallelism, from ``published.yaml``: per row the full recomputation, then both."""
    for layers, hidden, heads, stages, chunks, rows, batch, full, both in yaml.safe_load(path.read_text())["sequence_parallel_table5"]:
        where = _of_a100s(8 * stages)
        for seconds, more in ((full, {}), (both, {"recompute": "selective", "more_axes": ["tokens:1"]})):
            plan = written(8, 1, stages, rows, **_chunked(chunks), **more)
            yield Run(layers, hidden, heads, 2048, 51200, *where, batch, plan, seconds)


def _chunked(chunks: int) -> dict[str, Any]:
    return {"num_chunks": chunks, "schedule": "interleaved"} if chunks > 1 else {}
