"""Cases with split scopes: planned once, cut anew at random, trained on the ranks by that plan, compared part by part."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

import whale
from tests import reference
from tests.distributed.training import (
    Case,
    captured_case,
    finished,
    largest_of,
    make_cluster,
    make_engine,
    norms_of,
    run_case,
    train_on,
    train_reference,
)
from tests.distributed.world import World
from whale.axes import Axes, discover
from whale.axes.labels import SCATTERED, label
from whale.axes.values import axes_of
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Shard, Stage
from whale.planning import make_plan
from whale.planning.verify import verify
from whale.runtime.program.shard.pieces import part


def plan_case(case: Case) -> tuple[Plan, ModelGraph]:
    """The planner's plan of a case, and what it is for."""
    graph, _ = captured_case(case).capture()
    return make_plan(graph, make_cluster(case.speeds), whale.Config(dict(case.config))), graph


def cut_anew(plan: Plan, graph: ModelGraph, case: Case, *, bridged: bool = False) -> Plan:
    """The plan with other axes cut, in other sizes, drawn by the case's seed; in each replica for itself where that is a plan.

    Args:
        bridged: whether axes may be cut that meet in some ops, which then work along one of them, or on whole tensors.
    """
    draw, axes, cluster = random.Random(case.seed), discover(graph), make_cluster(case.speeds)
    for replica in plan.replicas if draw.random() < 0.5 else plan.replicas[:1]:
        for number, stage in enumerate(replica.stages):
            drawn = (*(_bridged_candidates(stage, graph, axes, draw) if bridged else ()), *_candidates(stage, axes, draw))
            for shards in drawn if stage.split > 1 else ():
                indices = range(len(plan.replicas)) if len(plan.replicas) > 1 and replica is plan.replicas[0] else (replica.index,)
                changed = _with_cuts(plan, indices, number, shards)
                if _is_valid(changed, graph, cluster, axes):
                    plan = changed
                    break
    return plan


def _with_cuts(plan: Plan, replicas: Sequence[int], stage: int, shards: tuple[Shard, ...]) -> Plan:
    found = []
    for replica in plan.replicas:
        stages = list(replica.stages)
        if replica.index in replicas:
            stages[stage] = replace(stages[stage], shards=shards)
        found.append(replace(replica, stages=tuple(stages)))
    return replace(plan, replicas=tuple(found))


def _is_valid(plan: Plan, graph: ModelGraph, cluster: whale.Cluster, axes: Axes) -> bool:
    try:
        verify(plan, graph, cluster, axes)
    except whale.WhaleError:
        return False
    return True


NUM_DRAWS = 6


def _candidates(stage: Stage, axes: Axes, draw: random.Random) -> Iterator[tuple[Shard, ...]]:
    """Sets of axes in random uneven sizes: some that meet in no op, then each alone."""
    ops = [axes.ops[op].roles for op in stage.ops if op in axes.ops]
    names = [name for name in _met(stage, axes) if all(roles[name].kind != "whole" for roles in ops if name in roles)]
    for _ in range(NUM_DRAWS):
        draw.shuffle(names)
        chosen: list[str] = []
        for name in names:
            if not any(name in roles and not roles.keys().isdisjoint(chosen) for roles in ops):
                chosen.append(name)
        yield tuple(Shard(name, _sizes(axes.by_name[name].size, stage.split, draw)) for name in chosen)
    for name in names:
        yield (Shard(name, _sizes(axes.by_name[name].size, stage.split, draw)),)


def _bridged_candidates(stage: Stage, graph: ModelGraph, axes: Axes, draw: random.Random) -> Iterator[tuple[Shard, ...]]:
    """Sets of any axes, with bridges where ops that read one another work along unlike ones."""
    names = _met(stage, axes)
    for _ in range(NUM_DRAWS):
        draw.shuffle(names)
        shards = _bridged(names[: draw.randint(1, 4)], stage, axes, draw)
        if not label(graph, axes, stage.ops, shards).faults():
            yield shards


def _met(stage: Stage, axes: Axes) -> list[str]:
    """The axes of a stage that are long enough for its devices."""
    met = {axis for op in stage.ops if op in axes.ops for axis in axes.ops[op].roles} - {BATCH}
    return [axis.name for axis in axes.axes if axis.name in met and axis.size >= stage.split]


def _bridged(names: Sequence[str], stage: Stage, axes: Axes, draw: random.Random) -> tuple[Shard, ...]:
    """Cuts of these axes, of which each op works along one at most, and each parameter is held in parts of one at most."""
    whole_in: dict[str, list[str]] = {name: [] for name in names}
    whole_parameters: dict[str, list[str]] = {name: [] for name in names}
    scattered: dict[str, list[str]] = {name: [] for name in names}
    for op in stage.ops:
        roles = axes.ops[op].roles if op in axes.ops else {}
        able = [name for name in names if name in roles and roles[name].kind != "whole"]
        work = draw.choice(able) if able and draw.random() < 0.9 else None
        for name in names:
            if name in roles and name != work:
                whole_in[name].append(op)
        others = [name for name in able if name != work]
        if work is not None and others and roles[work].combine in SCATTERED and draw.random() < 0.5:
            scattered[draw.choice(others)].append(op)
    for parameter in stage.parameters:
        having = [name for name in names if any(name in axes_of(dim) for dim in axes.parameters.get(parameter, ()))]
        held = draw.choice(having) if having and draw.random() < 0.8 else None
        for name in having:
            if name != held:
                whole_parameters[name].append(parameter)
    return tuple(
        Shard(
            name,
            _sizes(axes.by_name[name].size, stage.split, draw),
            tuple(whole_in[name]),
            tuple(whole_parameters[name]),
            tuple(scattered[name]),
        )
        for name in names
    )


def _sizes(total: int, num_parts: int, draw: random.Random) -> tuple[int, ...]:
    ends = [0, *sorted(draw.sample(range(1, total), num_parts - 1)), total]
    return tuple(stop - start for start, stop in pairwise(ends))


def whole_gradients(engine: whale.Engine, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's gradients, each put into a copy of the expected whole one in the place that the rank keeps."""
    found = {}
    for name, held in engine.gradients().items():
        assert engine.rank is not None
        holdings = engine.runtime.holdings
        places = holdings.cut_out(name, engine.rank, torch.arange(expected[name].numel()).view(expected[name].shape))
        index = holdings.kept_index(name, engine.rank)
        places = places if index is None else part(places, index)
        assert places.shape == held.shape, (name, places.shape, held.shape)
        found[name] = expected[name].clone(memory_format=torch.contiguous_format)
        found[name].view(-1)[places.reshape(-1)] = held.reshape(-1)
    return found


def train_rank(rank: int, num_ranks: int, case: Case, plan: Plan | None, expected: Mapping[str, torch.Tensor]) -> reference.Run:
    """Trains the case on one rank, by a plan or by its own."""
    engine = make_engine(case, plan)
    try:
        losses: list[float] = []
        norms: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(case.batches):
            losses.append(train_on(engine, case, number, batch))
            norms += norms_of(engine, case, number)
            if number == 0:
                gradients = whole_gradients(engine, expected)
        return finished(engine, case, reference.Run(losses, gradients, norms=tuple(norms)))
    finally:
        engine.close()


def errors(world: World, case: Case, plan: Plan | None) -> tuple[float, str]:
    """The largest error of any rank against the reference, and where it is."""
    expected = train_reference(case)
    runs = run_case(world, train_rank, case, plan, expected.gradients)
    return largest_of(runs, expected)
