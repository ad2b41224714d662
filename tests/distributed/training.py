"""A training run as a picklable case: what each rank does with it, and what the reference does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.world import World
from tests.models import Description, build, make_batch
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A model, its batches and how to run it.

    Attributes:
        description: the model.
        rows: rows of each step's global batch; the first is the example's number.
        speeds: relative speed of each device, so of each rank.
        config: settings by key.
        optimizer: ``sgd`` or ``adam``.
        seed: of weights and batches.
        evaluates: whether the trained model is evaluated and asked for its output.
        num_accumulated: batches whose mean gradients make one update.
        decay: of averages of the weights; None for none.
    """

    description: Description
    rows: tuple[int, ...]
    speeds: tuple[float, ...]
    config: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "sgd"
    seed: int = 0
    evaluates: bool = False
    num_accumulated: int = 1
    decay: float | None = None

    @property
    def batches(self) -> list[Any]:
        return [make_batch(self.description, rows, self.seed + step) for step, rows in enumerate(self.rows)]

    @property
    def clip_norm(self) -> float | None:
        return dict(self.config).get("gradient.clip_norm")


OPTIMIZERS: dict[str, reference.Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.AdamW, lr=0.01, eps=1e-2),  # a large eps, so that rounding of zero gradients stays small
}


def make_cluster(speeds: tuple[float, ...], memory: int = 1 << 30) -> Cluster:
    """A host of CPU devices with these relative speeds."""
    devices = tuple(
        Device(f"host0/{index}", "host0", "cpu", (("float32", speed * 1e9), ("float64", speed * 1e9)), memory, speed * 1e9)
        for index, speed in enumerate(speeds)
    )
    return Cluster("test", (Host("host0", devices, Link(1e9, 1e-6)),), None)


def captured_case(case: Case) -> Captured:
    """The model of a case, its batch and loss, captured in the modes that the case needs."""
    made = captured_once(build, case.description, case.seed, case.rows[0])
    for mode in ("eval", "predict") if case.evaluates else ():
        made.capture(mode)
    return made


def _prepare(case: Case) -> None:
    captured_case(case)


def run_case(world: World, function: Callable[..., T], case: Case, *arguments: Any) -> list[T]:
    """Runs ``function(rank, num_ranks, case, *arguments)`` on the ranks of a case, where its model is captured already."""
    world.prepare(_prepare, case)
    return world.run(function, case, *arguments, num_ranks=len(case.speeds))


def train_rank(rank: int, num_ranks: int, case: Case) -> reference.Run:
    """Trains the case on one rank, inside the process group that is there."""
    return train_rank_and_plan(rank, num_ranks, case)[0]


def train_rank_and_plan(rank: int, num_ranks: int, case: Case) -> tuple[reference.Run, Plan]:
    """Trains the case on one rank; also gives the plan."""
    engine = make_engine(case)
    return trained(engine, case), engine.plan


def trained(engine: whale.Engine, case: Case) -> reference.Run:
    """Trains the case by an engine, which is closed then."""
    try:
        losses: list[float] = []
        norms: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(case.batches):
            losses.append(train_on(engine, case, number, batch))
            norms += norms_of(engine, case, number)
            if number == 0:
                gradients = reference.copy_of(engine.gradients())
        return finished(engine, case, reference.Run(losses, gradients, norms=tuple(norms)))
    finally:
        engine.close()


def train_on(engine: whale.Engine, case: Case, number: int, batch: Any) -> float:
    """Trains on one batch; where the case accumulates, the last batch of each update applies the gradients. The loss of the batch."""
    if case.num_accumulated == 1:
        return float(engine.step(batch))
    loss = float(engine.step(batch, update=False))
    if (number + 1) % case.num_accumulated == 0:
        engine.update(scale=1 / case.num_accumulated)
    return loss


def norms_of(engine: whale.Engine, case: Case, number: int) -> list[float]:
    """The norm of the gradients of an update that this batch has ended, where the case has them clipped."""
    return [] if case.clip_norm is None or (number + 1) % case.num_accumulated else [float(engine.gradient_norm)]


def finished(engine: whale.Engine, case: Case, run: reference.Run) -> reference.Run:
    """The run with what the trained engine has at the end."""
    state = engine.state_dict()
    assert state is not None
    run = replace(run, state=reference.copy_of(state))
    if case.decay is not None:
        averaged = engine.state_dict(averaged=True)
        assert averaged is not None
        evaluation = float(engine.evaluate(case.batches[0], averaged=True)) if case.evaluates else None
        run = replace(run, averaged=reference.copy_of(averaged), averaged_evaluation=evaluation)
        assert all(torch.equal(own, state[name]) for name, own in (engine.state_dict() or {}).items())
    if case.evaluates:
        evaluation, output = float(engine.evaluate(case.batches[0])), engine.predict(case.batches[0])
        run = replace(run, evaluation=evaluation, prediction=reference.tensors_of(output))
    return run


def make_engine(case: Case, plan: Plan | None = None) -> whale.Engine:
    """The engine of a case, by a plan or by its own, inside the process group that is there."""
    made = captured_case(case)
    engine = whale.parallelize(
        made.model,
        loss=made.loss,
        optimizer=OPTIMIZERS[case.optimizer],
        batch=made.batch,
        config=dict(case.config),
        cluster=make_cluster(case.speeds),
        plan=plan,
    )
    if case.decay is not None:
        engine.average(case.decay)
    return engine


def train_reference(case: Case) -> reference.Run:
    """Trains the case in this process."""
    model, _, loss = build(case.description, case.seed)
    run = reference.train(model, loss, case.batches, OPTIMIZERS[case.optimizer], case.clip_norm, case.num_accumulated, case.decay)
    if not case.evaluates:
        return run
    evaluation, prediction = reference.evaluate(model, loss, case.batches[0])
    return replace(run, evaluation=evaluation, prediction=prediction)


def errors(world: World, case: Case) -> tuple[float, str]:
    """The largest error of any rank against the reference, and where it is; all gradients must be there, once or more."""
    return largest_of(run_case(world, train_rank, case), train_reference(case))


def largest_of(runs: Sequence[reference.Run], expected: reference.Run, *, all_gradients: bool = True) -> tuple[float, str]:
    """The largest error of all ranks' runs, and where it is."""
    worst = (0.0, "nothing")
    for rank, run in enumerate(runs):
        owned = {name: value for name, value in expected.gradients.items() if name in run.gradients}
        error, where = reference.largest_error(run, replace(expected, gradients=owned))
        worst = max(worst, (error, f"{where} on rank {rank}"))
    missing = set(expected.gradients) - {name for run in runs for name in run.gradients}
    assert not (all_gradients and missing), f"no rank has the gradients of {sorted(missing)}"
    return worst


def three_steps(engine: whale.Engine, make_batch: Callable[[int], Any], path: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, the last after a checkpoint was saved, a step was made that does not count, and it was loaded; the weights."""
    losses = [float(engine.step(make_batch(step))) for step in range(2)]
    engine.save(path)
    engine.step(make_batch(7))
    engine.load(path)
    losses.append(float(engine.step(make_batch(2))))
    state = engine.state_dict()
    assert state is not None
    return losses, {name: value.clone() for name, value in state.items()}
