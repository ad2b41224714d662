"""Memory of split stages that compute again: what cuts are chosen by, what stages are planned by, and the estimate say the same."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import pytest

from tests.unit.planning.graphs import Graph, cluster, scope
from tests.unit.search.exhaustive import recomputing, replica_of
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.hardware import parse_cluster
from whale.ir.graph import ModelGraph
from whale.planning import make_plan
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.recompute import rank_memory
from whale.planning.plan import EstimatedPlan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy
from whale.search.freedom import Order
from whale.workloads import GPT

ROWS = 16
WHOLE_MEMORY = "80 GiB"
CHUNKS = {"interleaved": 2}


@lru_cache
def graph() -> ModelGraph:
    return GPT(layers=4, hidden=128, heads=4, sequence=256, vocabulary=256).graph()


def drafted(policy: str, memory: str = WHOLE_MEMORY, *, schedule: str = "1f1b", width: int = 2) -> EstimatedPlan:
    """Two ranks, each split over some devices of one host, with 8 micro-batches."""
    cluster = parse_cluster(f"hosts: [{{devices: {{model: A100-80GB, count: {2 * width}, memory: {memory}}}}}]\n")
    names = [device.name for device in cluster.devices]
    config = Config({"recompute.policy": policy, "estimate.communicator_bytes": 0})
    seater = Realizer(Prices(graph(), cluster, Costs.for_model(config, graph(), cluster)), config, ROWS)
    placed = (tuple(names[:width]), tuple(names[width:]))
    replica = replica_of(placed, cluster, Order(schedule, CHUNKS.get(schedule, 1)), 8)
    return seater.realize(recomputing(Strategy((replica,)), policy))


def fullest(draft: EstimatedPlan) -> float:
    return max(device.peak.total for device in draft.step.devices)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("policy", ["none", "selective", "blocks", "full"])
def test_cuts_are_chosen_by_the_bytes_that_the_estimate_tells(policy: str, schedule: str) -> None:
    draft = drafted(policy, schedule=schedule)
    model = draft.chosen.best.replicas[0]
    for stage, (costs, sharding) in enumerate(zip(model.costs, model.shardings, strict=True)):
        assert sharding is not None
        cut = sharding.cut
        [budget] = cut.costs._held
        problem = cut.costs.problem(cut.sizes, cut.insisted, budget)
        assert problem.memory is not None
        by_labels = problem.memory.lacking(cut.chosen.labels) + [cost.capacity for cost in costs]
        planned = [
            max(line.at(cut.costs.site.num_rows) for line in rank_memory([(cost.part, model.pipeline.alive(stage))])) for cost in costs
        ]
        names = model.placed[model.pipeline.stage_rank[stage]]
        told = [draft.step.of(name).peak.total for name in names]
        assert planned == pytest.approx(told, rel=0.12)
        assert list(by_labels) == pytest.approx(planned, rel=0.15)


def fits(policy: str, mebibytes: float) -> bool:
    try:
        drafted(policy, f"{mebibytes * 2**20:.0f} B")
    except MemoryShortage:
        return False
    return True


@pytest.mark.slow
def test_a_split_stage_may_hold_nothing() -> None:
    """Frozen weights are on hosts, and nothing is kept for gradients that there are not."""
    made = Graph()
    made.path = (scope(0, 2, "frozen", "split"),)
    value = made.call("layer", "aten.linear.default", made.input("x"), made.parameter("weight", 8, 8, trainable=False), grad=False)
    made.path = ()
    made.sum_loss(value)
    plan = make_plan(made.build(), cluster((1e9, 1e9)), Config({"memory.offload": "optimizer+parameters"}))
    assert plan.replicas[0].stages[0].split == 2


def test_the_more_is_computed_again_the_less_memory_is_enough() -> None:
    most = fullest(drafted("none")) / 2**20 * 2
    low, blocks = most / 8, most
    assert not fits("blocks", low)
    while blocks > 1.1 * low:
        middle = (low * blocks) ** 0.5
        low, blocks = (low, middle) if fits("blocks", middle) else (middle, blocks)
    assert not fits("none", blocks / 0.85)
    assert fits("auto", 1.06 * blocks)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_as_much_is_computed_again_as_memory_demands_and_no_more(schedule: str) -> None:
    least, most = (fullest(drafted(policy, schedule=schedule)) for policy in ("blocks", "none"))
    memory = (0.95 * least + 0.05 * most) / 0.9
    draft, every = drafted("auto", f"{memory:.0f} B", schedule=schedule), drafted("blocks", schedule=schedule)
    with suppress(MemoryShortage):
        assert drafted("none", f"{memory:.0f} B", schedule=schedule).plan.step_seconds > draft.plan.step_seconds
    assert fullest(draft) <= 0.9 * memory
    numbers = [sum(len(stage.recomputed) for stage in each.plan.replicas[0].stages) for each in (draft, every)]
    assert 0 < numbers[0] < numbers[1]
