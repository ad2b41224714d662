"""The bytes of pieces, by which stages are cut, beside the lines of the parts that these stages become."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import cluster
from tests.unit.search.exhaustive import replica_of, seater_of
from tests.unit.search.many import drawn_graph
from whale.config import Config
from whale.estimate.prices.part import NOTHING
from whale.hardware import parse_cluster
from whale.planning.cutting.partition import Partition, wishes_of
from whale.planning.pipeline.recompute import Policy
from whale.planning.realizing import Realizer
from whale.planning.replicas.solve import Solver
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Assignment, assign
from whale.search.freedom import Order
from whale.workloads import GPT

ROWS = 3  # of a micro-batch
STATES = [{"memory.zero": str(zero)} for zero in range(4)] + [{"memory.offload": "activations"}, {"memory.offload": "optimizer+parameters"}]


def cut_at(solver: Solver, units: tuple[int, ...]) -> Assignment:
    """The stages of a cut at these units."""
    points = solver.tables.points
    partition = Partition(tuple(int(points.bounds[unit]) for unit in units), units, lambda _: 0.0)
    return assign(solver.prices.graph, points.structure, wishes_of(points, partition), len(units) - 1)[0]


def solver_of(planner: Realizer, num_ranks: int, width: int, schedule: str, num_micro_batch: int) -> tuple[Solver, Placed]:
    names = [device.name for device in planner.cluster.devices]
    placed = tuple(tuple(names[rank * width : (rank + 1) * width]) for rank in range(num_ranks))
    replica = replica_of(placed, planner.cluster, Order(schedule, 1), num_micro_batch)
    return planner.solver(replica, "none", planner.pricing_for([replica], "none")), placed


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["1f1b", "gpipe", "zb_h1"]), st.sampled_from(STATES))
def test_pieces_hold_what_their_parts_hold_but_for_what_crosses(
    seed: int, num_stages: int, num_micro_batch: int, schedule: str, state: dict[str, object]
) -> None:
    """State to the byte, unless a part runs ops of its neighbours; what is kept up to what crosses at its two ends, once for each
    micro-batch in flight: a piece counts what passes by and not what only another stage keeps.
    """
    draw = random.Random(seed)
    graph, num_ranks = drawn_graph(draw, scoped=False), num_stages
    planner = seater_of(graph, cluster([1e9] * num_ranks), Config(state), ROWS * num_micro_batch)
    solver, placed = solver_of(planner, num_ranks, 1, schedule, num_micro_batch)
    tables, points, prices, budget = solver.tables, solver.tables.points, solver.prices, solver.pricing.budget
    if points.num_units < num_stages:
        return
    units = (0, *sorted(draw.sample(range(1, points.num_units), num_stages - 1)), points.num_units)
    loads = tables.loads(placed, ROWS, units)
    crossing = points.crossing_fixed + points.crossing_per_row * ROWS
    for stage, (part, (start, stop)) in enumerate(zip(cut_at(solver, units).parts, pairwise(units), strict=True)):
        alive = solver.pipeline.alive(stage)
        own = prices.part(part, float(ROWS), budget=budget, waits=alive.waiting > 0)
        state_bytes = points.held.parameters[start, stop]
        assert state_bytes == sum(prices.parameter_bytes(name, budget) for name in part.parameters)
        let_go = state_bytes - own.parameter_bytes
        kept = own.activation.at(ROWS) * alive.in_flight
        gradients = own.gradient_bytes if budget.is_alone else 0
        ends = alive.in_flight * (crossing[start] / 2 + crossing[stop] / 2)
        assert -ends - gradients - 1 <= loads[stage] - (state_bytes - let_go) - kept <= ends + 1


def test_pieces_of_a_chain_hold_what_the_parts_hold() -> None:
    """Each value is kept by the op that reads it: nothing passes by."""
    graph = GPT(layers=4, hidden=64, heads=4, sequence=16, vocabulary=128).graph()
    planner = seater_of(graph, cluster([1e9, 1e9]), Config({"memory.zero": "3"}), 2 * ROWS)
    solver, placed = solver_of(planner, 2, 1, "1f1b", 2)
    points = solver.tables.points
    units = 0, points.num_units // 2, points.num_units
    parts = cut_at(solver, units).parts
    own = [solver.prices.part(part, float(ROWS), budget=solver.pricing.budget) for part in parts]
    held = [each.held(solver.pipeline.alive(stage)).at(ROWS) for stage, each in enumerate(own)]
    assert solver.tables.loads(placed, ROWS, units) == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_pieces_of_a_split_group_hold_what_its_devices_hold(tied: bool) -> None:
    """Of the whole model as one stage, which is cut in the same way; other stages have cuts of their own."""
    graph = GPT(layers=2, hidden=128, heads=4, sequence=32, vocabulary=256, tied=tied).graph()
    there = parse_cluster("hosts: [{devices: {model: A100-80GB, count: 2}}]\n")
    planner = seater_of(graph, there, Config({"estimate.communicator_bytes": 0}), ROWS)
    solver, placed = solver_of(planner, 1, 2, "1f1b", 1)
    units = 0, solver.tables.points.num_units
    priced = solver.pricing.price(solver.pipeline, cut_at(solver, units), 0, placed, float(ROWS), (NOTHING,))
    held = solver.tables.pieces.held(there.devices[0].kind, 2)
    part = priced.costs[0].part
    assert held.state == part.parameter_bytes < solver.tables.points.held.state
    assert held.kept_at(ROWS)[-1] == pytest.approx(part.activation.at(ROWS), rel=1e-6)


def test_what_waits_on_the_host_is_not_held_by_pieces() -> None:
    """Under every policy, those that keep only some of it too."""
    graph = GPT(layers=2, hidden=64, heads=4, sequence=16, vocabulary=128, attention="explicit").graph()
    planner = seater_of(graph, cluster([1e9, 1e9]), Config({"memory.offload": "activations"}), 2 * ROWS)
    points = [planner.cuts.points(Policy(kind)).held for kind in ("none", "selective")]
    assert not any(np.any(each.kept) for each in points)
