"""Groups that step on their own, and average weights and optimizer state every few steps, equal their definition in one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import whale
from tests import reference
from tests.distributed.split_training import plan_case
from tests.distributed.test_state_law import with_state
from tests.distributed.test_unlike_replicas import ONE, SPLIT, TWO, Blocks, blocks, unlike, with_order
from tests.distributed.training import OPTIMIZERS, Case, captured_case, largest_of, make_cluster, make_engine, run_case
from tests.distributed.world import RankFailure, World
from tests.examples import at_most, further
from tests.models import Description, build, descriptions
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.plan import Plan, Rounds, Zero, devices_of
from whale.runtime.state.local_steps import LocalSteps

TOLERANCE = 1e-10
NUM_STEPS = 2
BUCKETS = ("communication.bucket_bytes", 200)
CLIP = ("gradient.clip_norm", 0.1)
ROUNDS = ("communication.sync_steps", NUM_STEPS)
NESTEROV = (("communication.outer_rate", 0.7), ("communication.outer_momentum", 0.9))


@dataclass(frozen=True)
class Apart:
    """Replicas, the sync group of each rank, the keeper group of each if state is sharded, and settings."""

    replicas: Blocks
    groups: tuple[int, ...]
    zero: Zero = 0
    keepers: tuple[int, ...] = ()
    config: tuple[tuple[str, Any], ...] = (BUCKETS,)
    optimizer: str = "adam"


FIXED = {
    "each alone": Apart((ONE, ONE), (0, 1), optimizer="sgd"),
    "each alone, DiLoCo": Apart((ONE, ONE), (0, 1), config=(BUCKETS, *NESTEROV)),
    "two and two": Apart((ONE, ONE, ONE, ONE), (0, 0, 1, 1), config=(BUCKETS, CLIP)),
    "groups across the order of ranks": Apart((ONE, ONE, ONE, ONE), (0, 1, 0, 1), config=(BUCKETS, CLIP), optimizer="sgd"),
    "unlike replicas": Apart((TWO | {"schedule": "zb_h1"}, ONE | {"num_micro_batch": 3}), (0, 0, 1), config=(BUCKETS, CLIP, *NESTEROV)),
    "split and whole": Apart((SPLIT, ONE, ONE), (0, 0, 1, 1), config=(CLIP,)),
    "sharded inside": Apart((ONE, ONE, ONE, ONE), (0, 0, 1, 1), 2, (0, 0, 1, 1), (BUCKETS, CLIP, *NESTEROV)),
    "weights sharded inside": Apart((ONE, ONE, ONE, ONE), (0, 0, 1, 1), 3, (0, 0, 1, 1)),
    "copies in one group": Apart((ONE, ONE, ONE), (0, 0, 1), 1, (0, 1, 2)),
    "split and sharded": Apart((SPLIT, ONE, ONE), (0, 0, 1, 1), 2, (0, 0, 1, 1), (BUCKETS, *NESTEROV)),
}


def case_of(apart: Apart, **more: Any) -> Case:
    return unlike(*apart.replicas, rows=(14, 13, 15, 12), config=(ROUNDS, *apart.config), optimizer=apart.optimizer, **more)


def planned(world: World, apart: Apart, **more: Any) -> tuple[Case, Plan]:
    case = case_of(apart, **more)
    plan, graph = world.prepare(plan_case, case)  # on one host, where nobody steps on its own
    plan = with_state(plan, graph, apart.zero, groups=apart.keepers)
    outer = dict(NESTEROV) if set(NESTEROV) <= set(apart.config) else {}
    return case, replace(plan, rounds=Rounds(apart.groups, NUM_STEPS, *outer.values()))


def train_apart(case: Case, plan: Plan) -> reference.Run:
    """The definition: a model per group; the global loss of all outputs together; each gradient divided by the share of the rows."""
    model, _, loss = build(case.description, case.seed)
    groups = [copy.deepcopy(model) for _ in plan.sync_members]
    steppers = [OPTIMIZERS[case.optimizer](list(own.named_parameters())) for own in groups]
    group_of = [plan.sync_group_of(replica.index) for replica in plan.replicas]
    weights = [sum(each.share for each in plan.replicas if group_of[each.index] == number) for number in range(len(groups))]
    losses, rounds = list[float](), plan.rounds
    assert rounds is not None
    before, momenta = reference.copy_of(dict(model.named_parameters())), dict[str, torch.Tensor]()
    for number, batch in enumerate(case.batches):
        rows = plan.replica_rows(case.rows[number])
        outputs = [reference.call(groups[group], reference.rows_of(batch, *own)) for group, own in zip(group_of, rows, strict=True)]
        output = pytree.tree_map(partial(_together, [stop - start for start, stop in rows]), *outputs)
        value = reference.loss_value(loss(output, batch))
        for stepper in steppers:
            stepper.zero_grad()
        value.backward()
        losses.append(float(value.detach()))
        for group, (own, stepper) in enumerate(zip(groups, steppers, strict=True)):
            share = sum(stop - start for other, (start, stop) in zip(group_of, rows, strict=True) if other == group) / case.rows[number]
            trained = [parameter for parameter in own.parameters() if parameter.grad is not None]
            for parameter in trained:
                parameter.grad /= share
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, case.clip_norm)
            stepper.step()
        if (number + 1) % rounds.num_steps == 0:
            _end_round(groups, steppers, [weight / sum(weights) for weight in weights], rounds, before, momenta)
    return reference.Run(losses, {}, reference.copy_of(groups[0].state_dict()))


def _together(num_rows: Sequence[int], *parts: torch.Tensor) -> torch.Tensor:
    """The output for all rows; what depends on no row is the mean of the groups' by rows."""
    if parts[0].dim():
        return torch.cat(parts)
    return torch.stack([own * count for own, count in zip(parts, num_rows, strict=True)]).sum() / sum(num_rows)


@torch.no_grad()
def _end_round(
    groups: Sequence[nn.Module],
    steppers: Sequence[torch.optim.Optimizer],
    weights: Sequence[float],
    rounds: Rounds,
    before: dict[str, torch.Tensor],
    momenta: dict[str, torch.Tensor],
) -> None:
    for name, first in groups[0].named_parameters():
        copies = [own.get_parameter(name) for own in groups]
        mean = sum(weight * own for weight, own in zip(weights, copies, strict=True))
        change = before[name] - mean
        momenta[name] = rounds.momentum * momenta.get(name, torch.zeros_like(first)) + change
        after = before[name] - rounds.rate * (change + rounds.momentum * momenta[name])
        before[name] = after
        for own in copies:
            own.copy_(after)
        states = [stepper.state[own] for stepper, own in zip(steppers, copies, strict=True)]
        for key in [key for key, value in states[0].items() if isinstance(value, torch.Tensor) and value.dim()]:
            together = sum(weight * state[key] for weight, state in zip(weights, states, strict=True))
            for state in states:
                state[key].copy_(together)


def trained_in_rounds(rank: int, size: int, case: Case, plan: Plan, then: Plan, folder: str) -> reference.Run:
    """Trains a case; after half of the steps it goes on by another plan, after a checkpoint or by replanning."""
    engine, losses = make_engine(case, plan), list[float]()
    for number, batch in enumerate(case.batches):
        if number == len(case.rows) // 2 and folder:
            engine.save(Path(folder) / "checkpoint")
            engine.close()
            engine = make_engine(case, then)
            engine.load(Path(folder) / "checkpoint")
        elif number == len(case.rows) // 2:
            engine.replan(then)
        losses.append(float(engine.step(batch)))
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return reference.Run(losses, {}, reference.copy_of(state))


@pytest.mark.parametrize(("name", "saves"), [*((name, False) for name in FIXED), *further((name, True) for name in FIXED)])
def test_law(world: World, name: str, saves: bool) -> None:
    case, plan = planned(world, FIXED[name])
    expected = train_apart(case, plan)
    with TemporaryDirectory() as folder:
        runs = run_case(world, trained_in_rounds, case, plan, plan, folder if saves else "")
    error, where = largest_of(runs, expected)
    assert error < TOLERANCE, where


@at_most(25, suppress_health_check=list(HealthCheck))
@given(blocks(), descriptions(), st.data())
def test_law_of_drawn_cases(world: World, replicas: Blocks, description: Description, data: st.DataObject) -> None:
    """Drawn replicas, models, schedules, shares, groups, rounds and states."""
    config = tuple(own for each in ((BUCKETS,), (CLIP,), NESTEROV) if data.draw(st.booleans()) for own in each)
    apart = Apart(replicas, (), data.draw(st.sampled_from((0, 1, 2, 3))), (), config, data.draw(st.sampled_from(("sgd", "adam"))))
    case = replace(case_of(apart), seed=data.draw(st.integers(0, 99)))
    case = replace(case, description=replace(description, placement="none", copies=None))
    try:
        plan, graph = world.prepare(plan_case, case)
    except (whale.PlanError, whale.AnnotationError):  # too few places to cut at, or nothing to split
        assume(False)
        raise
    plan = with_order(plan, data.draw)
    numbers = data.draw(
        st.lists(st.integers(0, 1), min_size=len(plan.replicas), max_size=len(plan.replicas)).filter(lambda own: len(set(own)) > 1)
    )
    own = {plan.rank_of[device]: numbers[replica.index] for replica in plan.replicas for device in devices_of([replica])}
    groups = tuple(own[rank] for rank in range(len(plan.devices)))
    outer = dict(NESTEROV) if set(NESTEROV) <= set(config) else {}
    plan = with_state(plan, graph, apart.zero, groups=groups if apart.zero else ())
    plan = replace(plan, rounds=Rounds(groups, NUM_STEPS, *outer.values()))
    note(str(plan))
    expected = train_apart(case, plan)
    assume(max(map(abs, expected.losses)) < 1e3)
    error, where = largest_of(run_case(world, trained_in_rounds, case, plan, plan, ""), expected)
    assert error < TOLERANCE, where


def test_a_round_goes_on_under_another_plan(world: World) -> None:
    """What one plan's groups have agreed on is all that another's need: groups that are cut and sharded otherwise, with equal rows."""
    case, plan = planned(world, FIXED["sharded inside"])
    _, then = planned(world, replace(FIXED["two and two"], config=FIXED["sharded inside"].config))
    with TemporaryDirectory() as folder:
        runs = run_case(world, trained_in_rounds, case, plan, then, folder)
    error, where = largest_of(runs, train_apart(case, plan))
    assert error < TOLERANCE, where


def test_one_step_of_each_group_is_a_step_of_plain_sgd(world: World) -> None:
    """The average of the groups' gradients is that of the global loss, whatever loss that is: here of plain SGD, one step a round."""
    apart = replace(FIXED["two and two"], optimizer="sgd", config=(BUCKETS,))
    case, plan = planned(world, apart, seed=3)
    case = replace(case, rows=case.rows[:1])
    run = run_case(world, after_one_step, case, plan)[0]
    model, _, loss = build(case.description, case.seed)
    expected = reference.train(model, loss, case.batches, OPTIMIZERS["sgd"])
    error, where = largest_of([run], replace(expected, gradients={}))
    assert error < TOLERANCE, where


def after_one_step(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    engine = make_engine(case, plan)
    losses = [float(engine.step(case.batches[0]))]
    engine.sync_weights()
    engine.sync_weights()  # there is nothing left to do
    state = engine.state_dict()
    assert state is not None
    engine.close()
    return reference.Run(losses, {}, reference.copy_of(state))


def within_a_round(rank: int, size: int, case: Case, plan: Plan) -> list[str]:
    engine, found = make_engine(case, plan), list[str]()
    engine.average(0.5)
    engine.step(case.batches[0])
    for call in (engine.state_dict, lambda: engine.save("nowhere"), engine.replan):
        with pytest.raises(whale.ConfigError) as raised:
            call()
        found.append(str(raised.value))
    with pytest.raises(whale.BatchError, match="leaves a group of devices that steps on its own without any"):
        engine.step(reference.rows_of(case.batches[0], 0, 1))
    engine.forward_backward(case.batches[0])
    with pytest.raises(whale.ConfigError, match="sync_weights would lose the gradients"):
        engine.sync_weights()
    engine.update()  # the last of a round
    for averaged in (False, True):
        state = engine.state_dict(averaged=averaged)
        assert state is not None
        found.append(str({name: value.sum().item() for name, value in state.items()}))
    found += [str(own.double().sum().item()) for own in engine.state.averages.values()]
    engine.close()
    return found


def test_weights_that_differ_are_not_read(world: World) -> None:
    """And averages of weights are averaged with them."""
    case, plan = planned(world, FIXED["each alone"])
    found = run_case(world, within_a_round, case, plan)
    assert found[0] == found[1] and found[0][3] != found[0][4]
    for text, call in zip(found[0], ("state_dict", "save", "replan"), strict=False):
        assert f"engine.{call}: hosts have other weights, after 1 of 2 local steps" in text


class Odd(torch.optim.SGD):
    """Keeps something more of each parameter: what `make` gives for its gradient."""

    make: Callable[[torch.Tensor], Any]

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["odd"] = type(self).make(parameter.grad)


def train_oddly(rank: int, size: int, case: Case, plan: Plan, make: str) -> str:
    class Own(Odd):
        pass

    Own.make = staticmethod({"number": lambda g: g.sum(), "integers": lambda g: g.int(), "rows": lambda g: g[:1].clone()}[make])
    engine = whale.parallelize(
        captured_case(case).model,
        loss=captured_case(case).loss,
        optimizer=partial(Own, lr=0.1),
        batch=captured_case(case).batch,
        config=dict(case.config),
        cluster=make_cluster(case.speeds),
        plan=plan,
    )
    with pytest.raises(whale.WhaleError) as raised:
        for batch in case.batches:
            engine.step(batch)
    assert engine.step_number == (NUM_STEPS if make == "number" else 1)
    with pytest.raises(whale.WhaleError):
        engine.state_dict()
    return str(raised.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("number", "hosts have other numbers in the optimizer's state \\('odd' of "),
        ("integers", "the optimizer keeps 'odd' \\(torch.int32, "),
        ("rows", "the optimizer keeps 'odd' \\(torch.float64, "),
    ],
)
def test_what_has_no_average_is_refused(world: World, make: str, said: str) -> None:
    case, plan = planned(world, FIXED["each alone"])
    for text in run_case(world, train_oddly, case, plan, make):
        assert re.search(said, text), text


class Scaled(nn.Module):
    """A parameter that is a number, tables, and a weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def train_scaled(rank: int, size: int, kind: str) -> dict[str, torch.Tensor]:
    """Two rounds of a step on two ranks, which are two hosts."""
    optimizer = {"nadam": torch.optim.NAdam, "rprop": torch.optim.Rprop, "asgd": torch.optim.ASGD}[kind]
    hosts = tuple(Host(f"h{n}", (Device(f"h{n}/0", f"h{n}", "cpu", (("float32", 1e9),), 1 << 30, 1e9),), Link(1e9, 1e-6)) for n in range(2))
    engine = whale.parallelize(
        Scaled().double(),
        loss=lambda output, batch: output.square().mean(),
        optimizer=partial(optimizer, lr=0.01),
        batch={"x": torch.arange(24, dtype=torch.float64).view(6, 4)},
        config={"communication.sync_steps": 1000, "planning.search": "off", "pipeline.num_stages": 1},
        cluster=Cluster("two", hosts, Link(1e9, 1e-6)),
    )
    for number in range(3):
        engine.step({"x": torch.arange(24, dtype=torch.float64).view(6, 4).sin() + number})
    engine.sync_weights()
    found = {f"{name} {key}": value.clone() for name, own in engine.state.read_kept().state.items() for key, value in own.items()}
    found |= {name: value.clone() for name, value in (engine.state_dict() or {}).items()}
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["nadam", "rprop", "asgd"])
def test_all_that_optimizers_keep_is_equal_after_a_round(world: World, kind: str) -> None:
    first, second = world.run(train_scaled, kind, num_ranks=2)
    assert first.keys() == second.keys() and len(first) > 6
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert all(float(value) == 3 for name, value in first.items() if name.endswith(" step"))


def train_without_averages(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    with mock.patch.object(LocalSteps, "_average", lambda *_: None):
        return trained_in_rounds(rank, size, case, plan, plan, "")


def test_the_law_would_notice_groups_that_do_not_average(world: World) -> None:
    case, plan = planned(world, FIXED["each alone"])
    with pytest.raises((RankFailure, AssertionError)):
        runs = run_case(world, train_without_averages, case, plan)
        assert largest_of(runs, train_apart(case, plan))[0] < TOLERANCE
