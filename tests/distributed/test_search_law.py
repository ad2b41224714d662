"""The law for what a search chooses: random models on random unlike clusters, with just enough memory or more, train as in one process."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, assume, event, example, given, note
from hypothesis import strategies as st

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.training import OPTIMIZERS, largest_of
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import MORE_BLOCKS, Block, Description, build, descriptions, make_batch
from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.plan import Plan
from whale.search.changes import with_plenty
from whale.search.searching import search

TOLERANCE = 1e-10
EFFORT = 12
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A model, and a cluster on which a plan for it is searched.

    Attributes:
        description: the model.
        rows: of each step's batch; the first is the example's number.
        cluster: its devices have plenty of memory.
        room: memory of each device, as so many times what the fullest one holds in the plan of least memory; None for plenty.
        config: settings by key.
        optimizer: ``sgd`` or ``adam``.
    """

    description: Description
    rows: tuple[int, ...]
    cluster: Cluster
    room: float | None
    config: tuple[tuple[str, Any], ...]
    optimizer: str


HOSTS = ((2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, 1, 2))
"""Devices of each host."""


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Devices of up to three speeds, some hosts' links slower than the others'."""
    hosts = []
    for number, size in enumerate(draw(st.sampled_from(HOSTS))):
        speeds = draw(st.lists(st.sampled_from((1e5, 2e5, 1e6)), min_size=size, max_size=size))
        devices = tuple(_device(f"host{number}/{index}", f"host{number}", speed) for index, speed in enumerate(speeds))
        hosts.append(Host(f"host{number}", devices, Link(draw(st.sampled_from((1e5, 1e7))), 1e-5)))
    network = Link(draw(st.sampled_from((1e4, 1e5, 1e7))), 1e-5) if len(hosts) > 1 else None
    return Cluster("random", tuple(hosts), network)


def _device(name: str, host: str, speed: float) -> Device:
    return Device(name, host, "cpu", (("float32", speed),), GIB, speed * 10, kernel_start=0.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases of which most have a plan."""
    cluster = draw(clusters())
    description = draw(descriptions(max_devices=len(cluster.devices), kinds=(*MORE_BLOCKS, "batch_norm")))
    config: dict[str, Any] = {"planning.effort": EFFORT}
    if draw(st.integers(0, 3)) == 3:
        config["planning.objective"] = "memory"
    mixes_samples = any(block.kind == "batch_norm" for block in description.blocks)  # their micro-batches are warned of, and not exact
    if not mixes_samples and draw(st.integers(0, 3)) == 3:
        config["pipeline.num_micro_batch"] = draw(st.integers(1, 4))
    if draw(st.integers(0, 3)) == 3:
        config["gradient.clip_norm"] = 0.1
    if draw(st.booleans()):
        config["communication.bucket_bytes"] = 200
    if draw(st.integers(0, 3)) == 3:
        config |= {"memory.zero": draw(st.sampled_from("123")), "memory.zero_within": draw(st.sampled_from(("host", "auto")))}
    return Case(
        description,
        tuple(draw(st.lists(st.integers(4, 17), min_size=2, max_size=2))),
        cluster,
        draw(st.none() | st.sampled_from((1.0, 1.2, 1.6, 2.5))),
        tuple(config.items()),
        draw(st.sampled_from(("sgd", "adam"))),
    )


def with_memory(case: Case) -> Cluster | None:
    """The cluster with the memory that the case says, and the model captured for the ranks to be; None where no plan is found there."""
    made = captured_once(build, case.description, 0, case.rows[0])
    graph, _ = made.capture()
    config, cluster = Config(dict(case.config)), case.cluster
    try:
        if case.room is not None:
            least = search(graph, with_plenty(cluster), config.with_values({"planning.objective": "memory"})).value
            memory = math.ceil(case.room * least / Costs.of(config).memory_fraction)
            cluster = replace(cluster, hosts=tuple(_with_memory(host, memory) for host in cluster.hosts))
        search(graph, cluster, config)
    except WhaleError:  # the search is not sure to find one where there is hardly room, nor is there one for few rows and wide scopes
        return None
    return cluster


def _with_memory(host: Host, memory: int) -> Host:
    return replace(host, devices=tuple(replace(device, memory=memory) for device in host.devices))


def train(rank: int, num_ranks: int, case: Case, cluster: Cluster) -> tuple[reference.Run, Plan]:
    made = captured_once(build, case.description, 0, case.rows[0])
    with mock.patch.dict(os.environ, {"WHALE_PLANNING_SEARCH": "auto"}):
        engine = whale.parallelize(
            made.model, loss=made.loss, optimizer=OPTIMIZERS[case.optimizer], batch=made.batch, config=dict(case.config), cluster=cluster
        )
    try:
        losses = [float(engine.step(make_batch(case.description, rows, step))) for step, rows in enumerate(case.rows)]
        return reference.Run(losses, {}, reference.copy_of(engine.state_dict() or {})), engine.plan
    finally:
        engine.close()


NORMALISED = Description(
    tokens=False,
    blocks=(Block("linear"), Block("linear", frozen=True), Block("buffer"), Block("batch_norm")),
    sequence=2,
    loss="mse",
    placement="construction",
)
UNLIKE = Cluster("unlike", (Host("host0", (_device("host0/0", "host0", 1e5), _device("host0/1", "host0", 1e6)), Link(1e5, 1e-5)),), None)
SHORT = Case(NORMALISED, (7, 4), UNLIKE, 1.0, (("planning.effort", EFFORT),), "sgd")
"""Replicas that compute again as much as their own memory asks for would each normalise its own rows."""


ON_TWO_HOSTS = Cluster(
    "hosts",
    tuple(Host(f"host{n}", tuple(_device(f"host{n}/{i}", f"host{n}", 1e5) for i in (0, 1)), Link(1e7, 1e-6)) for n in (0, 1)),
    Link(1e5, 1e-5),
)
COPIES = Case(
    Description(tokens=False, blocks=(Block("linear"),) * 3, sequence=2, loss="mse"),
    (16, 15),
    ON_TWO_HOSTS,
    None,
    (("memory.zero", "3"), ("memory.zero_within", "host"), ("planning.effort", EFFORT)),
    "adam",
)

ONE_AND_TWO = Case(
    Description(tokens=False, blocks=(Block("linear"),), sequence=2),
    (4, 4),
    Cluster(
        "one and two",
        (
            Host("host0", (_device("host0/0", "host0", 1e6),), Link(1e5, 1e-5)),
            Host("host1", tuple(_device(f"host1/{i}", "host1", 1e6) for i in (0, 1)), Link(1e7, 1e-5)),
        ),
        Link(1e4, 1e-5),
    ),
    None,
    (("planning.effort", EFFORT),),
    "sgd",
)
"""A split over two hosts, the first of which could not hold it alone."""


@at_most(6, suppress_health_check=list(HealthCheck))
@example(case=SHORT)
@example(case=COPIES)
@example(case=ONE_AND_TWO)
@given(case=cases())
def test_law(world: World, case: Case) -> None:
    note(f"{case!r}")
    cluster = world.prepare(with_memory, case)
    assume(cluster is not None)
    runs = world.run(train, case, cluster, num_ranks=len(case.cluster.devices))
    plan = runs[0][1]
    event(_kind(plan))
    model, _, loss = build(case.description, 0)
    batches = [make_batch(case.description, rows, step) for step, rows in enumerate(case.rows)]
    expected = reference.train(model, loss, batches, OPTIMIZERS[case.optimizer], dict(case.config).get("gradient.clip_norm"))
    error, where = largest_of([run for run, _ in runs], replace(expected, gradients={}))
    assert error < TOLERANCE, f"{where}\n{plan}"
    assert case is not COPIES or plan.keeper_groups == (0, 0, 1, 1)


def _kind(plan: Plan) -> str:
    """What there is in a plan, for the statistics of the law."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    said = {
        "idle": bool(plan.idle_devices),
        "replicas": len(plan.replicas) > 1,
        "unlike": len({(len(replica.stages), replica.stages[0].split) for replica in plan.replicas}) > 1,
        "split": any(stage.split > 1 for stage in stages),
        "copies on hosts": bool(plan.keeper_groups),
        "recomputes": any(stage.recomputed for stage in stages),
        "micro-batches": any(replica.pipeline.num_micro_batch > 1 for replica in plan.replicas),
    }
    orders = sorted({replica.pipeline.order for replica in plan.replicas if replica.pipeline.num_ranks > 1})
    return ", ".join([name for name, is_there in said.items() if is_there] + orders) or "one device"
