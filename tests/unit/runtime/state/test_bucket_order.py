"""Unlike replicas start what they share in one order on all ranks, and nobody waits for good where every launch waits for all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.ir.plan import Plan
from whale.ir.schedule import LAUNCHES, POSTS, Action, Kind
from whale.planning import make_plan
from whale.runtime.execute.roster import find_rank_place
from whale.runtime.state.gradient_sync import GradientSync
from whale.runtime.state.holdings import Holdings, RankLinks
from whale.runtime.state.host_copies import HostCopies
from whale.schedules import alike_schedules, schedules_of
from whale.sharding.buckets import Bucket, plan_buckets

COPIES = HostCopies(torch.device("cpu"))

GRAPH = chain(8, width=16)
NAMES = [parameter.name for parameter in GRAPH.parameters]
SIX = cluster((1e9,) * 6)
SEND_OF = {Kind.POST_FORWARD: Kind.SEND_FORWARD, Kind.POST_BACKWARD: Kind.SEND_BACKWARD}
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "recompute_early")


@st.composite
def unlike_plans(draw: st.DrawFn) -> Plan:
    """Two or three replicas of up to three devices, each with a schedule and a cut of its own, some of them alike."""
    shapes = st.tuples(st.integers(1, 3), st.sampled_from(SCHEDULES), st.integers(1, 3))
    chosen = draw(st.lists(shapes, min_size=2, max_size=3).filter(lambda own: sum(stages for stages, _, _ in own) <= 6))
    blocks = [{"num_stages": stages, "schedule": schedule, "num_micro_batch": count} for stages, schedule, count in chosen]
    return make_plan(GRAPH, SIX, Config({"replicas": blocks}), rows=64)


@dataclass
class Launches:
    """Stands for the groups of a rank: notes what it launches, buckets by the first parameter in them."""

    found: list[Hashable] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, ranks: Sequence[int]) -> None:
        self.found.append((NAMES[round(float(flat[0])) - 1], tuple(ranks)))


def buckets_of(plan: Plan, holdings: Holdings, bucket_bytes: int) -> tuple[Bucket, ...]:
    return plan_buckets(plan, holdings.shardings, GRAPH, alike_schedules(plan), bucket_bytes).summed


def launches_of(plan: Plan, rank: int, holdings: Holdings, buckets: Sequence[Bucket], seed: int) -> list[Hashable]:
    """What a rank launches, in order; the gradients of a stage come in any order during its last backward."""
    shuffled = random.Random(seed + rank)
    rank_place = find_rank_place(plan, rank)
    assert rank_place is not None
    replica = plan.replicas[rank_place.replica]
    stages = replica.pipeline.stages_of(rank_place.pipeline_rank)
    held = {name for stage in stages for name in replica.stages[stage].parameters}
    parameters = {name: torch.nn.Parameter(torch.ones(GRAPH.parameter_by_name[name].spec.shape)) for name in held}
    launches = Launches()
    own = {(replica.index, stage) for stage in stages}
    world = range(len(plan.devices))
    links = RankLinks(holdings, rank, world, launches, timedelta(seconds=1), COPIES)
    sync = GradientSync(buckets, links, own, parameters, parameters)
    sync.begin()
    actions = schedules_of(plan)[replica.index].ranks[rank_place.pipeline_rank]
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    for index, action in enumerate(actions):
        if last.get(action.stage) == index:
            sync.arm(action.stage)
            for name in shuffled.sample(NAMES, len(NAMES)):
                if name in replica.stages[action.stage].parameters:
                    (parameters[name] * (NAMES.index(name) + 1)).sum().backward()
        elif action.kind is Kind.SYNC:
            sync.finish_stage(action.stage)
        elif action.kind is Kind.LOSS:
            launches.found.append(Kind.LOSS)
        elif action.kind in LAUNCHES:
            kind = SEND_OF[action.kind] if action.kind in POSTS else action.kind
            launches.found.append((replica.index, Action(kind, action.stage, action.micro_batch)))
    sync.finish()
    return launches.found


def stuck(launches: Sequence[Sequence[Hashable]]) -> list[int]:
    """The ranks that stay at a launch for good, where each launch waits until all who take part have come to it."""
    parties = Counter(launch for own in launches for launch in own)
    at, arrived, moving = [0] * len(launches), dict[Hashable, list[int]](), list(range(len(launches)))
    while moving:
        rank = moving.pop()
        if at[rank] < len(launches[rank]):
            here = arrived.setdefault(launches[rank][at[rank]], [])
            here.append(rank)
            if len(here) == parties[launches[rank][at[rank]]]:
                for other in here:
                    at[other] += 1
                moving += here
    return [rank for rank, own in enumerate(launches) if at[rank] < len(own)]


@at_most(40)
@given(unlike_plans(), st.integers(1, 4000), st.integers(0, 99))
def test_all_ranks_start_their_buckets_in_one_order(plan: Plan, bucket_bytes: int, seed: int) -> None:
    holdings = Holdings.of(plan, GRAPH, None)
    buckets = buckets_of(plan, holdings, bucket_bytes)
    launches = [launches_of(plan, rank, holdings, buckets, seed) for rank in range(len(plan.devices))]
    for ranks in {bucket.owners for bucket in buckets}:
        orders = [[launch for launch in launches[rank] if isinstance(launch, tuple) and launch[1] == ranks] for rank in ranks]
        assert len(orders[0]) == sum(bucket.owners == ranks for bucket in buckets)
        assert all(order == orders[0] for order in orders)
    assert not stuck(launches)


def test_buckets_of_unlike_replicas_that_start_early_would_block_them() -> None:
    """The control: equal stages of one schedule with one and with four micro-batches, each early on its own schedule, block."""
    blocks = [{"num_stages": 2, "schedule": "zb_v", "num_micro_batch": count} for count in (1, 4)]
    plan = make_plan(GRAPH, SIX, Config({"replicas": blocks}), rows=64)
    holdings = Holdings.of(plan, GRAPH, None)
    buckets = buckets_of(plan, holdings, 1)
    assert not any(bucket.is_at_one_place for bucket in buckets)
    early = [replace(bucket, is_at_one_place=True) for bucket in buckets]
    for found, blocked in ((buckets, False), (early, True)):
        assert bool(stuck([launches_of(plan, rank, holdings, found, 0) for rank in range(len(plan.devices))])) == blocked
