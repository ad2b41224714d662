"""The law under every schedule and every kind of recomputation, and what a run holds in flight is what its schedule promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests import reference
from tests.distributed.training import OPTIMIZERS, Case, largest_of, make_cluster, make_engine, run_case, train_reference
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import Block, Description, Segment, build, descriptions
from whale.config import SCHEDULES
from whale.ir.plan import Plan
from whale.runtime.execute.roster import find_rank_place
from whale.schedules import count_in_flight

TOLERANCE = 1e-10
RECOMPUTING = ("recompute_early", "last_no_recompute", "shifted_critical_path")

CHAIN = (
    Block("feed_forward"),
    Block("attention", skip_from=0),
    Block("norm"),
    Block("in_place"),
    Block("linear", skip_from=1),
    Block("linear", tied_to=4),
    Block("attention"),
    Block("gelu"),
)
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")


@dataclass(frozen=True)
class Outcome:
    """What one rank saw.

    Attributes:
        run: the numbers.
        plan: the plan.
        in_flight: the most micro-batches alive at once in the last step.
        counted: the same in its schedule.
        promised: the most that the schedule promises.
    """

    run: reference.Run
    plan: Plan
    in_flight: int
    counted: int
    promised: int


def train_and_watch(rank: int, num_ranks: int, case: Case) -> Outcome:
    """Trains a case on one rank."""
    engine = make_engine(case)
    try:
        losses, gradients = [], {}
        for number, batch in enumerate(case.batches):
            losses.append(float(engine.step(batch)))
            if number == 0:
                gradients = reference.copy_of(engine.gradients())
        state = engine.state_dict()
        assert state is not None
        run = reference.Run(losses, gradients, reference.copy_of(state))
        place = find_rank_place(engine.plan, rank if rank < len(engine.plan.devices) else None)
        if place is None:
            return Outcome(run, engine.plan, engine.peak_in_flight, 0, 0)
        schedule, seat = engine.schedules[place.replica], place.pipeline_rank
        return Outcome(run, engine.plan, engine.peak_in_flight, count_in_flight(schedule)[seat], schedule.peak_in_flight[seat])
    finally:
        engine.close()


def check(world: World, case: Case) -> list[Outcome]:
    """Checks the law and the promise on all ranks."""
    outcomes: list[Outcome] = run_case(world, train_and_watch, case)
    error, where = largest_of([outcome.run for outcome in outcomes], train_reference(case))
    assert error < TOLERANCE, where
    for outcome in outcomes:
        assert outcome.in_flight == outcome.counted <= outcome.promised
    return outcomes


def pipeline(schedule: str, num_stages: int, num_micro_batch: int, speeds: tuple[float, ...], **more: Any) -> Case:
    """A case of the chain cut into stages; speeds that differ make the stages uneven."""
    config: dict[str, Any] = {"pipeline.schedule": schedule, "pipeline.num_stages": num_stages}
    config |= {"pipeline.num_micro_batch": num_micro_batch}
    if schedule in ("interleaved", "aiao", "aiao_early_loss"):
        config["pipeline.num_chunks"] = 2
    config |= {name.replace("__", "."): value for name, value in more.items()}
    rows = 2 * num_micro_batch * max(1, len(speeds) // num_stages)
    return Case(TOKENS, (rows, rows + 1), speeds, tuple(config.items()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(world: World, schedule: str) -> None:
    outcomes = check(world, pipeline(schedule, 2, 4, (1.0, 2.0)))
    assert [outcome.in_flight for outcome in outcomes] == [outcome.promised for outcome in outcomes]


MODULES = {"steps.1.layer": "keep", "steps.[0156]": "recompute", "*": "keep"}
"""What is recomputed by name: two ops, an attention and what is around another."""

CASES = {
    "one rank": pipeline("zb_h1", 1, 3, (1.0,)),
    "three ranks": pipeline("interleaved", 3, 3, (1.0, 2.0, 1.0)),
    "four ranks": pipeline("shifted_critical_path", 4, 6, (1.0,) * 4),
    "zero bubble on four ranks": pipeline("zb_h2", 4, 7, (1.0, 1.0, 2.0, 1.0)),
    "data parallel around, interleaved": pipeline("interleaved", 2, 4, (1.0, 2.0, 1.0, 1.0)),
    "data parallel around, zb_v": pipeline("zb_v", 2, 4, (1.0, 1.0, 2.0, 1.0)),
    "data parallel around, aiao": pipeline("aiao", 2, 3, (1.0,) * 4, communication__bucket_bytes=200),
    "blocks": pipeline("1f1b", 2, 4, (1.0, 2.0), recompute__policy={0: 1, 1: 0.5}),
    "blocks, interleaved": pipeline("interleaved", 2, 4, (1.0, 1.0), recompute__policy={0: 1, 3: 1}),
    "blocks, zero bubble": pipeline("zb_h1", 2, 4, (1.0, 1.0), recompute__policy={0: 0.5, 1: 1}),
    "attention": pipeline("1f1b", 2, 2, (1.0, 1.0), recompute__policy="selective"),
    "modules": pipeline("1f1b", 2, 2, (1.0, 1.0), recompute__policy=MODULES),
    "kinds": pipeline("1f1b", 2, 4, (1.0, 2.0), recompute__policy={0: "full", 1: "blocks"}),
    "kinds, three ranks": pipeline("gpipe", 3, 3, (1.0, 1.0, 1.0), recompute__policy={0: "blocks", 1: "selective", 2: "full"}),
    "kinds, interleaved": pipeline("interleaved", 2, 4, (1.0, 1.0), recompute__policy={0: "full", 1: "blocks", 3: "full"}),
    "kinds, zero bubble": pipeline("zb_h1", 2, 4, (1.0, 1.0), recompute__policy={0: "blocks", 1: "full"}),
    "kinds, early": pipeline("recompute_early", 2, 4, (1.0, 2.0), recompute__policy={0: 0.5, 1: "full"}),
    "kinds, shifted": pipeline("shifted_critical_path", 4, 6, (1.0,) * 4, recompute__policy={0: "full", 1: "blocks", 2: "full"}),
    "stages, gpipe": pipeline("gpipe", 2, 3, (1.0, 1.0), recompute__policy="full"),
    "stages, aiao": pipeline("aiao", 2, 3, (1.0, 1.0), recompute__policy="full"),
    "stages, zero bubble": pipeline("zb_h1", 2, 4, (1.0, 1.0), recompute__policy="full"),
    "late receives": pipeline("1f1b", 2, 4, (1.0, 2.0), pipeline__receive_early=False),
    "late receives, zero bubble": pipeline("zb_h1", 4, 6, (1.0,) * 4, pipeline__receive_early=False),
    "data parallel around, recomputing": pipeline("1f1b", 2, 2, (1.0, 2.0, 1.0, 1.0), recompute__policy={0: 1, 1: 1}),
}


KINDS = {
    "kinds": (0,),
    "kinds, three ranks": (2,),
    "kinds, interleaved": (0, 3),
    "kinds, zero bubble": (1,),
    "kinds, early": (1,),
    "kinds, shifted": (0, 2),
}
"""Cases by kinds, with the stages that are computed again as a whole."""


@pytest.mark.parametrize("name", CASES)
def test_the_law(world: World, name: str) -> None:
    plan = check(world, CASES[name])[0].plan
    policy = dict(CASES[name].config).get("recompute.policy")
    full = range(len(plan.replicas[0].stages)) if policy == "full" else KINDS.get(name, ())
    assert plan.pipelines[0].recomputed_stages == tuple(full)
    assert any(stage.recomputed for replica in plan.replicas for stage in replica.stages) == (policy not in (None, "full"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random models under random schedules and policies."""
    description = draw(descriptions(max_devices=1))
    schedule = draw(st.sampled_from(SCHEDULES))
    num_ranks = draw(st.integers(1, 2 if len(description.blocks) >= 4 else 1))
    policies: list[object] = ["full", "none", "auto", {0: "full"}]
    if num_ranks > 1 and description.placement == "none":
        policies += [{0: 0.5, 1: "full"}, {0: "full", 1: "selective"}]
    if schedule not in RECOMPUTING:
        policies += ["selective", {0: 1}, {0: 0.5}, {0: "selective"}, {"steps.*": "recompute", "*": "keep"}]
    m = draw(st.integers(1, 3))
    config = {
        "pipeline.schedule": schedule,
        "pipeline.num_micro_batch": m,
        "recompute.policy": draw(st.sampled_from(policies)),
    }
    if description.placement == "none":
        config["pipeline.num_stages"] = num_ranks
    if schedule == "zb_v" and description.placement != "none":  # it has two stages on a device
        config["pipeline.schedule"] = "1f1b" if config["recompute.policy"] != "full" else "zb_h1"
    rows = 2 * m * num_ranks
    return Case(description, (rows + 1, rows), (1.0,) * num_ranks, tuple(config.items()), seed=draw(st.integers(0, 99)))


@at_most(8, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_the_law_of_random_cases(world: World, case: Case) -> None:
    note(f"{case!r}")
    check(world, case)


NORMALISED = Description(
    tokens=False,
    blocks=(Block("feed_forward"), Block("batch_norm"), Block("linear"), Block("gelu"), Block("linear"), Block("batch_norm", skip_from=2)),
    loss="pair",
    segments=(Segment(0), Segment(3)),
    placement="construction",
)


@pytest.mark.parametrize("policy", ["full", {0: 1, 1: 1}])
def test_running_statistics_move_once(world: World, policy: object) -> None:
    case = Case(NORMALISED, (8, 8), (1.0, 1.0), (("pipeline.num_micro_batch", 2), ("recompute.policy", policy)))
    outcomes: list[Outcome] = run_case(world, train_and_watch, case)
    plan = outcomes[0].plan
    model, _, loss = build(case.description, case.seed)
    pieces = [[list(plan.micro_batch_rows(0, rows))] for rows in case.rows]
    expected = reference.train_in_pieces(model, loss, case.batches, pieces, OPTIMIZERS[case.optimizer])
    error, where = largest_of([outcome.run for outcome in outcomes], expected)
    assert error < TOLERANCE, where
    assert plan.pipelines[0].recomputed_stages or all(stage.recomputed for stage in plan.replicas[0].stages)


class Dropping(nn.Module):
    """Two stages of layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        with whale.replicate(1, name="front"):
            self.front = self.layers()
        with whale.replicate(1, name="back"):
            self.back = self.layers()

    def layers(self) -> nn.Module:
        return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x))


def train_dropping(rank: int, num_ranks: int, configs: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights after two steps, per configuration."""
    found = []
    batch = (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),)
    for config in configs:
        torch.manual_seed(0)
        engine = whale.parallelize(
            Dropping(),
            loss=lambda output, batch: F.mse_loss(output, torch.ones_like(output)),
            optimizer=OPTIMIZERS["sgd"],
            batch=batch,
            config={"pipeline.num_micro_batch": 4, **config},
            cluster=make_cluster((1.0, 1.0)),
        )
        losses = [float(engine.step(batch)) for _ in range(2)]
        state = engine.state_dict()
        engine.close()
        assert state is not None
        found.append((losses, reference.copy_of(state)))
    return found


def test_dropout_is_the_same_bit_for_bit_with_and_without_recomputation(world: World) -> None:
    policies: list[dict[str, Any]] = [
        {},
        {"recompute.policy": "full"},
        {"recompute.policy": {0: 1, 1: 0.5}},
        {"pipeline.schedule": "recompute_early"},
    ]
    for plain, *others in world.run(train_dropping, policies, num_ranks=2):
        for losses, state in others:
            assert losses == plain[0]
            assert all(torch.equal(value, plain[1][name]) for name, value in state.items())
