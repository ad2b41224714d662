"""The law across checkpoints: a training that goes from plan to plan equals one that is never interrupted, with its scheduler.

Each part trains one more step while its checkpoint is written, which nobody goes on from; or SIGTERM comes to one rank, and ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.split_training import plan_case
from tests.distributed.training import Case, make_cluster
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import Block, Description, build, descriptions
from whale.runtime.checkpoint import contents

TOLERANCE = 1e-10
Named = list[tuple[str, nn.Parameter]]


def in_groups(named: Named, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """A group for each module, with a rate that goes by its name: which groups a rank has depends on the plan."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault(name.rpartition(".")[0], []).append(parameter)
    return make([{"params": own, "lr": 0.01 * (1 + sum(map(ord, name)) % 7)} for name, own in groups.items()])


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, amsgrad=True),
    "sgd in groups": partial(in_groups, make=partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "adam in groups": partial(in_groups, make=partial(torch.optim.Adam, lr=0.01, eps=1e-2)),
}
BY_NAME = {"*weight": OPTIMIZERS["sgd in groups"], "*": OPTIMIZERS["amsgrad"]}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda own: lr_scheduler.LambdaLR(own, lambda epoch: 1 / (1 + epoch)),
    "restarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 3),
    "in turn": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=2), lr_scheduler.LambdaLR(own, lambda epoch: 0.8**epoch)], [2]
    ),
}


def used(course: Course, names: Collection[str]) -> tuple[Any, Any]:
    """The optimizer and the scheduler of a course, or those by patterns, of the patterns that have any of the names."""
    optimizer = OPTIMIZERS.get(course.optimizer)
    if optimizer is not None:
        return optimizer, SCHEDULERS[course.scheduler]
    weights = [name for name in names if name.endswith("weight")]
    left_out = {"*weight": not weights, "*": len(weights) == len(names)}
    made = {pattern: make for pattern, make in BY_NAME.items() if not left_out[pattern]}
    return made, SCHEDULERS.get(course.scheduler) or dict.fromkeys(list(made)[:1], SCHEDULERS["restarts"])


def block(num_stages: int = 1, split: int = 1, num_micro_batch: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    return {"num_stages": num_stages, "split": split, "num_micro_batch": num_micro_batch, "schedule": schedule}


PLANS: dict[str, tuple[tuple[float, ...], tuple[dict[str, Any], ...]]] = {
    "one": ((1.0,), (block(),)),
    "uneven": ((1.0, 3.0, 2.0), (block(), block(), block())),
    "pipeline": ((1.0, 1.0), (block(2, num_micro_batch=4),)),
    "pipeline of three": ((1.0, 2.0, 1.0), (block(3, num_micro_batch=3, schedule="zb_h1"),)),
    "chunks": ((1.0, 1.0), (block(2, num_micro_batch=2, schedule="zb_v"),)),
    "split": ((1.0, 2.0), (block(split=2),)),
    "split stages": ((1.0, 2.0, 1.0, 1.0), (block(2, 2, 2),)),
    "unlike": ((1.0, 2.0, 1.0, 1.0), (block(2, num_micro_batch=2), block(split=2))),
}
"""Speeds of the ranks, and replicas."""


@dataclass(frozen=True)
class Course:
    """A training in parts.

    Attributes:
        description: the model.
        plans: of the parts, in order.
        stops: steps done at the end of each.
        rows: of each step.
        optimizer, scheduler: by name.
        seed: of weights and batches.
        told: the rank (or that less the number of ranks) to which SIGTERM comes; None where each part saves by itself.
    """

    description: Description
    plans: tuple[str, ...]
    stops: tuple[int, ...]
    rows: tuple[int, ...]
    optimizer: str = "adam in groups"
    scheduler: str = "lambda"
    seed: int = 0
    told: int | None = None

    def case(self, part: int) -> Case:
        speeds, replicas = PLANS[self.plans[part]]
        return Case(self.description, self.rows, speeds, (("replicas", list(replicas)),), seed=self.seed)


def written_after(event: Event) -> Event:
    """From now on no tensor is written before the event."""
    bytes_of = contents._bytes_of
    contents._bytes_of = lambda value: bytes_of(value) if event.wait(60) else pytest.fail("the event has not come")
    return event


def train_part(rank: int, num_ranks: int, course: Course, part: int, folder: str) -> reference.Run:
    """The steps of one part, from the checkpoint of the part before it to one of its own."""
    case, place, is_told = course.case(part), Path(folder), course.told is not None and course.told % num_ranks == rank
    made = captured_once(build, case.description, case.seed, case.rows[0])
    optimizer, scheduler = used(course, [name for name, weight in made.model.named_parameters() if weight.requires_grad])
    engine = whale.parallelize(
        made.model,
        loss=made.loss,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=made.batch,
        config=dict(case.config) | ({} if course.told is None else {"runtime.save_on_sigterm": folder}),
        cluster=make_cluster(case.speeds),
    )
    try:
        start, stop = 0 if part == 0 else course.stops[part - 1], course.stops[part]
        if part > 0 and course.told is not None:
            assert engine.load(place / f"step_{start}") is None
        elif part > 0:
            assert engine.load(place / str(part - 1)) == {"part": (part - 1, "é")}
        assert engine.step_number == start
        losses = [float(engine.step(batch)) for batch in case.batches[start : stop - 1]]
        if is_told and num_ranks > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        losses.append(float(engine.step(case.batches[stop - 1])))
        if is_told and num_ranks == 1:  # it has nobody to tell
            os.kill(os.getpid(), signal.SIGTERM)
        if course.told is not None:
            state = reference.copy_of(engine.state_dict() or {})
            with pytest.raises(whale.Preempted) as preempted:
                (engine.evaluate if course.seed % 2 else engine.step)(case.batches[-1])
            assert preempted.value.code == 143 and preempted.value.path == str(place / f"step_{stop}")
            return reference.Run(losses, {}, state)
        has_stepped = written_after(Event())
        engine.save(place / str(part), wait=False, extra={"part": (part, "é")})
        state = reference.copy_of(engine.state_dict() or {})
        engine.step(case.batches[-1])
        has_stepped.set()
        return reference.Run(losses, {}, state)
    finally:
        engine.close()


def train_plainly(course: Course) -> reference.Run:
    """All parts in one loop."""
    model, _, loss = build(course.description, course.seed)
    named, losses = dict(model.named_parameters()), []
    optimizer, scheduler = used(course, named)
    makers, steppers = (optimizer if isinstance(optimizer, dict) else {"*": optimizer}), []
    for pattern, make in makers.items():
        own = [(name, p) for name, p in named.items() if len(makers) == 1 or name.endswith("weight") is (pattern == "*weight")]
        stepper, schedule = make(own), scheduler.get(pattern) if isinstance(scheduler, dict) else scheduler
        steppers += [stepper, *([] if schedule is None else [schedule(stepper)])]
    for batch in course.case(0).batches[: course.stops[-1]]:
        model.zero_grad()
        value = reference.loss_value(loss(reference.call(model, batch), batch))
        value.backward()
        losses.append(float(value.detach()))
        for each in steppers:
            each.step()
    return reference.Run(losses, {}, reference.copy_of(model.state_dict()))


def check(world: World, course: Course) -> None:
    expected, start = train_plainly(course), 0
    with TemporaryDirectory() as folder:
        for part, stop in enumerate(course.stops):
            for run in world.run(train_part, course, part, folder, num_ranks=len(course.case(part).speeds)):
                wanted = replace(
                    expected, losses=expected.losses[start:stop], state=expected.state if part + 1 == len(course.stops) else {}
                )
                error, where = reference.largest_error(replace(run, state=run.state if wanted.state else {}), wanted)
                assert error < TOLERANCE, f"{where} under {course.plans[part]}"
            start = stop


CHAIN = (Block("feed_forward"), Block("attention"), Block("norm"), Block("linear", skip_from=1), Block("linear", tied_to=3), Block("gelu"))
TOKENS = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")
FIXED = {
    "pipelines": Course(TOKENS, ("pipeline", "pipeline of three", "one"), (2, 4, 6), (8,) * 6),
    "by name": Course(TOKENS, ("pipeline", "split stages"), (2, 4), (8,) * 4, "by name", "by name"),
    "chunks and unlike replicas": Course(
        TOKENS, ("chunks", "unlike", "split stages"), (1, 4, 6), (16, 5, 16, 16, 4, 16), "sgd in groups", "in turn"
    ),
    "SIGTERM": Course(TOKENS, ("uneven", "one", "pipeline"), (2, 3, 4), (8,) * 4, seed=1, told=2),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_courses(world: World, name: str) -> None:
    world.prepare(plan_case, FIXED[name].case(0))
    check(world, FIXED[name])


@st.composite
def courses(draw: st.DrawFn) -> Course:
    first = draw(st.integers(1, 2))
    return Course(
        replace(draw(descriptions()), placement="none", copies=None),
        tuple(draw(st.lists(st.sampled_from(list(PLANS)), min_size=2, max_size=2))),
        (first, first + 2),
        (draw(st.integers(16, 20)), *draw(st.lists(st.integers(4, 20), min_size=3, max_size=3))),
        optimizer := draw(st.sampled_from([*OPTIMIZERS, "by name"])),
        draw(st.sampled_from([*SCHEDULERS, *(["by name"] if optimizer == "by name" else [])])),
        draw(st.integers(0, 99)),
        draw(st.none() | st.integers(0, 3)),
    )


@at_most(12, suppress_health_check=list(HealthCheck))
@given(courses())
def test_law(world: World, course: Course) -> None:
    note(f"{course!r}")
    assume(max(map(abs, train_plainly(course).losses)) < 1e3)  # a training that diverges magnifies every rounding
    try:
        for part in range(len(course.plans)):
            world.prepare(plan_case, course.case(part))
    except (whale.PlanError, whale.AnnotationError) as error:  # too few places to cut at, or nothing to split
        note(str(error))
        assume(False)
        raise
    check(world, course)
