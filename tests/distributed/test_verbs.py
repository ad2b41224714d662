"""All that an engine does, in any order, equals the one process: steps, predictions, gradients, states, checkpoints, captures anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests import reference
from tests.captures import Captured, captured_once, changed
from tests.distributed.split_training import whole_gradients
from tests.distributed.test_checkpoint_law import PLANS
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from tests.examples import at_most
from tests.models import CLASSES, Block, Description, Model, Step, descriptions, make_batch, make_loss
from whale.planning import make_plan

TOLERANCE = 1e-10
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01, eps=1e-2)  # a large eps, so that rounding of zero gradients stays small


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def in_halves(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).softmax(-1).flatten(-2)


def over_halves(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).softmax(-2).flatten(-2)


def flipped(x: Tensor) -> Tensor:
    return x + x.flip(-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "silu": F.silu, "softmax": softmax, "in halves": in_halves, "over halves": over_halves, "flipped": flipped,
}  # fmt: skip
"""Along some of them features may be cut, along others not, or otherwise."""


class WithMore(nn.Module):
    """A model that returns more than its loss reads: of parameters of its own, of early layers once more, of both at once, of all rows."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.inner = Model(description)
        self.side = nn.Linear(CLASSES, 3)
        self.scale, self.column = nn.Parameter(torch.randn(CLASSES)), nn.Parameter(torch.randn(CLASSES, 1))
        self.bias = nn.Parameter(torch.randn(2 * description.width))

    def forward(self, x: Tensor, extra: Tensor | None = None, shift: Tensor | None = None) -> dict[str, Any]:
        out = self.inner(x, extra, shift)
        logits = out[0] if isinstance(out, tuple) else out
        back = F.linear(logits @ self.inner.head.weight, self.inner.steps[0].layer.weight, self.bias)
        return {
            "out": out,
            "total": (logits * self.scale).sum(-1),
            "column": logits @ self.column,
            "side": self.side(logits),
            "back": back,
            "rest": logits[1:] * self.scale,
            "even": logits.detach()[::2],
            "mean": logits.mean(0),
            "count": (logits > 0).sum(),
            "before": logits.flatten(1).cumsum(0),
            "pairs": (logits.flatten(1) @ logits.flatten(1).t())[None],
        }


def build(description: Description, activation: str, seed: int, num_rows: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model, loss = WithMore(description).double(), make_loss(description)
    activate(model, activation)
    return model, make_batch(description, num_rows, seed), lambda output, batch: with_metrics(loss(output["out"], batch), output)


def with_metrics(loss: Any, output: Mapping[str, Any]) -> dict[str, Any]:
    """A loss with a mean, a count, one over the other, and something that has a gradient."""
    first = output["column"].squeeze(-1) > 0
    chosen = output["total"] * first
    share = chosen.sum() / first.sum().clamp(min=1)
    return {"loss": loss, "mean": first.double().mean(), "count": first.sum(), "share": share, "square": chosen.square().mean()}


def activate(model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, Step):
            module.activation = ACTIVATIONS[name]


Verb = Literal["step", "accumulate", "evaluate", "predict", "gradients", "state", "averages", "reload", "replan", "activation", "rate"]


@dataclass(frozen=True)
class Course:
    """What is asked of an engine.

    Attributes:
        description: the model.
        plan: by name.
        verbs: what is called, with a number of rows, a rate, or the name of a plan or an activation; with the rows of several batches and
            a largest norm for ``accumulate``.
        activation: at the start.
        seed: of weights and batches.
        zero: `memory.zero` of all plans.
        decay: of the averages of weights; None keeps none.
    """

    description: Description
    plan: str
    verbs: tuple[tuple[Verb, Any], ...]
    activation: str = "gelu"
    seed: int = 0
    zero: str = "0"
    decay: float | None = None

    NUM_ROWS: ClassVar[int] = 16

    @property
    def speeds(self) -> tuple[float, ...]:
        return PLANS[self.plan][0]

    def config(self, plan: str = "") -> dict[str, Any]:
        """Settings for the first plan, or another."""
        return {"replicas": list(PLANS[plan or self.plan][1]), "memory.zero": self.zero}

    def batch(self, number: int) -> Any:
        """The batch of a verb, by its place."""
        return make_batch(self.description, self.verbs[number][1], self.seed + number)

    def batches(self, number: int) -> list[Any]:
        """The batches that one update accumulates."""
        return [make_batch(self.description, rows, self.seed + 1000 * part + number) for part, rows in enumerate(self.verbs[number][1][0])]

    def captured(self) -> Captured:
        return captured_once(build, self.description, self.activation, self.seed, self.NUM_ROWS)


def plan_of(course: Course) -> None:
    graph, _ = course.captured().capture()
    for plan in (course.plan, *(value for verb, value in course.verbs if verb == "replan")):
        make_plan(graph, make_cluster(course.speeds), whale.Config(course.config(plan)))


Found = dict[str, Tensor]
"""What a verb gives, by name."""


def flat(output: Any) -> Found:
    return {str(number): value for number, value in enumerate(reference.tensors_of(output))}


def make(course: Course, plan: str = "") -> whale.Engine:
    made, cluster = course.captured(), make_cluster(course.speeds)
    config = course.config(plan)
    engine = whale.parallelize(made.model, loss=made.loss, optimizer=OPTIMIZER, batch=made.batch, config=config, cluster=cluster)
    if course.decay is not None:
        engine.average(course.decay)
    return engine


def run(rank: int, num_ranks: int, course: Course, expected: list[Found], folder: str) -> list[Found]:
    """What the verbs give on one rank; gradients put into the expected ones in the places that the rank holds."""
    warnings.simplefilter("ignore")
    model, plan, found = course.captured().model, course.plan, []
    engine = make(course)
    for number, (verb, value) in enumerate(course.verbs):
        given: Mapping[str, Any] = {}
        if verb == "step":
            given = {"loss": engine.step(course.batch(number)).double(), **engine.metrics}
        elif verb == "accumulate":
            given = {f"loss {part}": engine.forward_backward(batch).double() for part, batch in enumerate(course.batches(number))}
            if value[1] is not None:
                given |= {"norm": engine.clip_grad_norm_(value[1], scale=1 / len(value[0]))}
            engine.update(scale=1 / len(value[0]))
        elif verb == "evaluate":
            loss, output = engine.evaluate(course.batch(number), outputs=True)
            given = {"loss": loss.double(), **engine.metrics, **flat(output)}
        elif verb == "predict":
            given = flat(engine.predict(course.batch(number)))
            own, rows = engine.predict(course.batch(number), gather=False)
            for name, part in flat(own).items():
                whole = given[name]
                assert torch.equal(part, whole[rows] if part.dim() and whole.shape[0] == value else whole), (name, rows)
        elif verb == "gradients":
            given = whole_gradients(engine, expected[number])
        elif verb in ("state", "averages"):
            given = engine.state_dict(averaged=verb == "averages") or {}
        elif verb == "reload":
            engine.save(Path(folder) / str(number))
            engine.close()
            engine = make(course, plan)
            engine.load(Path(folder) / str(number))
        elif verb == "replan":
            plan = value
            engine.replan(config=course.config(plan))
        elif verb == "activation":
            activate(model, value)
            changed(model)
        elif engine.optimizer is not None:
            engine.optimizer.param_groups[0]["lr"] = value
        found.append(reference.copy_of(given))
    engine.close()
    return found


def noted_loss(loss: Any, results: dict[str, Any], output: Any, batch: Any) -> Any:
    """The loss alone; all that is returned with it goes into `results`."""
    results.update(loss(output, batch))
    return results["loss"]


def metrics_of(results: Mapping[str, Any]) -> Found:
    return {name: value.detach().double() for name, value in results.items() if name != "loss"}


def run_plainly(course: Course) -> list[Found]:
    """The same in one process, without Whale."""
    model, _, loss = build(course.description, course.activation, course.seed, course.NUM_ROWS)
    optimizer, found = OPTIMIZER(model.named_parameters()), []
    averages: Found = {}

    def backward(batch: Any) -> tuple[Tensor, dict[str, Any]]:
        results = loss(reference.call(model, batch), batch)
        result = reference.loss_value(results["loss"])
        result.backward()
        return result.detach(), results

    def update() -> None:
        optimizer.step()
        for name, weight in model.named_parameters(remove_duplicate=False):
            before = averages.get(name)
            decay = 0.0 if before is None else course.decay or 0.0
            averages[name] = weight.detach().clone() if before is None else decay * before + (1 - decay) * weight.detach()

    for number, (verb, value) in enumerate(course.verbs):
        given: Mapping[str, Any] = {}
        if verb == "step":
            optimizer.zero_grad()
            result, results = backward(course.batch(number))
            update()
            given = {"loss": result, **metrics_of(results)}
        elif verb == "accumulate":
            optimizer.zero_grad()
            given = {f"loss {part}": backward(batch)[0] for part, batch in enumerate(course.batches(number))}
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad /= len(value[0])
            if value[1] is not None:
                given |= {"norm": nn.utils.clip_grad_norm_(model.parameters(), value[1])}
            update()
        elif verb in ("evaluate", "predict"):
            results = {}
            evaluation, prediction = reference.evaluate(model, partial(noted_loss, loss, results), course.batch(number))
            given = flat(prediction)
            if verb == "evaluate":
                given |= {"loss": torch.tensor(evaluation, dtype=torch.float64), **metrics_of(results)}
            model.train()
        elif verb == "gradients":
            given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        elif verb in ("state", "averages"):
            given = {**model.state_dict(), **(averages if verb == "averages" else {})}
        elif verb in ("reload", "replan"):
            optimizer.zero_grad()
        elif verb == "activation":
            activate(model, value)
        elif verb == "rate":
            optimizer.param_groups[0]["lr"] = value
        found.append(reference.copy_of(given))
    return found


def check(world: World, course: Course) -> None:
    expected = run_plainly(course)
    with TemporaryDirectory() as folder:
        runs = world.run(run, course, expected, folder, num_ranks=len(course.speeds))
    for number, (verb, wanted) in enumerate(zip(course.verbs, expected, strict=True)):
        floor = 1e-3 * max((float(value.abs().max()) for value in wanted.values() if value.numel()), default=0.0)
        for rank, found in enumerate(each[number] for each in runs):
            names = found if verb[0] == "gradients" else {**wanted, **found}  # a rank has those of its own
            for name in names:
                error = reference.relative_error(found[name], wanted[name], floor)
                assert error < TOLERANCE, f"{name} of {verb[0]} (call {number}) on rank {rank}: {error:g}"
        missing = wanted.keys() - {name for each in runs for name in each[number]}
        assert not missing, f"no rank has {sorted(missing)} of {verb[0]} (call {number})"


CHAIN = (Block("feed_forward"), Block("attention"), Block("feed_forward"))
MODEL = Description(tokens=True, blocks=CHAIN, tied=True, loss="two_terms")


def all_verbs(*activations: str) -> tuple[tuple[Verb, Any], ...]:
    """Steps under each of some activations, and all else after each."""
    found: list[tuple[Verb, Any]] = [("step", 16), ("predict", 16)]
    for name in activations:
        found += [("activation", name), ("step", 12), ("gradients", None), ("state", None), ("step", 16)]
    return (*found, ("predict", 9), ("evaluate", 16), ("reload", None), ("rate", 0.03), ("step", 16), ("state", None))


FIXED = {
    "features cut otherwise": Course(MODEL, "split", all_verbs("gelu"), "flipped"),
    "features no longer cut": Course(MODEL, "split", all_verbs("in halves", "over halves")),
    "split stages": Course(MODEL, "split stages", all_verbs("softmax"), "over halves"),
    "accumulated under averages": Course(
        MODEL,
        "unlike",
        (
            ("accumulate", ((16, 9, 12), None)),
            ("gradients", None),
            ("averages", None),
            ("replan", "split stages"),
            ("accumulate", ((12, 16), 0.5)),
            ("reload", None),
            ("step", 16),
            ("state", None),
            ("averages", None),
        ),
        zero="2",
        decay=0.7,
    ),
    "outputs that are views of weights that come and go": Course(
        Description(tokens=True, blocks=(Block("feed_forward"), Block("linear", frozen=True)), segments=MODEL.segments),
        "unlike",
        (("step", 16), ("predict", 16), ("replan", "split stages"), ("step", 12), ("predict", 9)),
        seed=22,
        zero="3",
    ),
    "one row for several replicas": Course(
        MODEL,
        "uneven",
        (("step", 16), ("step", 1), ("gradients", None), ("reload", None), ("step", 2), ("evaluate", 1), ("step", 16), ("state", None)),
        zero="1",
        decay=0.6,
    ),
    "one row for unlike replicas": Course(
        MODEL, "unlike", (("step", 16), ("accumulate", ((2, 12, 1), 0.3)), ("step", 1), ("gradients", None), ("step", 12), ("state", None))
    ),
    "chunks": Course(MODEL, "chunks", (("step", 16), ("predict", 9), ("step", 16), ("predict", 16))),
}


@pytest.mark.parametrize("name", FIXED)
def test_law_of_fixed_courses(world: World, name: str) -> None:
    world.prepare(plan_of, FIXED[name])
    check(world, FIXED[name])


def held(rank: int, num_ranks: int, course: Course) -> dict[str, int]:
    """Elements of what a rank holds."""
    engine = make(course)
    found = {name: tensor.numel() for name, tensor in engine.tensors.items()}
    engine.close()
    return found


def test_what_only_outputs_read_lies_in_parts(world: World) -> None:
    course = FIXED["features cut otherwise"]
    world.prepare(plan_of, course)
    ranks, whole = world.run(held, course, num_ranks=2), course.captured().model.state_dict()
    for name in ("side.weight", "side.bias", "bias"):
        parts = [each[name] for each in ranks]
        assert min(parts) > 0 and sum(parts) == whole[name].numel(), f"{name}: {parts} of {whole[name].numel()}"


class Listed(nn.Module):
    """Copied features and split classes, each with outputs of its own beside them that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        whale.set_default_strategy(whale.replicate())
        self.features, self.copied = nn.Linear(8, 16), nn.Linear(16, 4)
        with whale.split():
            self.classes, self.side, self.scale = nn.Linear(16, 32), nn.Linear(16, 6), nn.Parameter(torch.randn(32))
        whale.set_default_strategy(None)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = self.features(x).relu()
        classes = self.classes(features)
        return classes, self.copied(features), self.side(features), classes * self.scale


def listed() -> tuple[Listed, Tensor]:
    torch.manual_seed(0)
    return Listed().double(), torch.randn(9, 8, dtype=torch.float64)


def listed_loss(output: tuple[Tensor, ...], batch: Any) -> Tensor:
    return output[0].square().mean()


def train_listed(rank: int, num_ranks: int) -> tuple[Found, dict[str, int]]:
    warnings.simplefilter("ignore")
    model, x = listed()
    engine = whale.parallelize(model, loss=listed_loss, optimizer=OPTIMIZER, batch=x, config={"planning": {"search": "off"}})
    engine.step(x)
    found = flat(engine.predict(x)), {name: tensor.numel() for name, tensor in engine.tensors.items()}
    engine.close()
    return found


def test_what_only_outputs_read_lies_as_its_scope_says(world: World) -> None:
    model, x = listed()
    optimizer = OPTIMIZER(model.named_parameters())
    listed_loss(model(x), None).backward()
    optimizer.step()
    expected = flat(model(x))
    ranks = world.run(train_listed, num_ranks=2)
    for found, _ in ranks:
        for name, value in expected.items():
            assert reference.relative_error(found[name], value.detach(), 0.0) < TOLERANCE, name
    for name, parameter in model.named_parameters():
        held = sum(each[name] for _, each in ranks)
        assert held == (2 if name.startswith(("features", "copied")) else 1) * parameter.numel(), name


@st.composite
def courses(draw: st.DrawFn) -> Course:
    zero = draw(st.sampled_from(("0", "0", "1", "2", "3")))
    rows, any_rows = st.integers(8, 20), st.integers(8 if zero == "3" else 1, 20)
    several = st.lists(any_rows, min_size=1, max_size=3).map(tuple)
    verbs: st.SearchStrategy[tuple[Verb, Any]] = st.one_of(
        st.tuples(st.sampled_from(("step", "evaluate")), any_rows),
        st.tuples(st.sampled_from(("step", "predict")), rows),
        st.tuples(st.sampled_from(("gradients", "state", "reload")), st.none()),
        st.tuples(st.just("activation"), st.sampled_from(list(ACTIVATIONS))),
        st.tuples(st.just("rate"), st.sampled_from((0.003, 0.03))),
        st.tuples(st.just("accumulate"), st.tuples(several, st.sampled_from((None, 0.3, 100.0)))),
    )
    decay = draw(st.sampled_from((None, None, 0.6)))
    if decay is not None:
        verbs |= st.tuples(st.just("averages"), st.none())
    description = replace(draw(descriptions()), placement="none", copies=None, segments=MODEL.segments)
    blocks = (Block("feed_forward"), *(replace(block, tied_to=None, skip_from=None) for block in description.blocks))
    plan = draw(st.sampled_from(list(PLANS)))
    others = [name for name, (speeds, _) in PLANS.items() if len(speeds) == len(PLANS[plan][0])]
    verbs |= st.tuples(st.just("replan"), st.sampled_from(others))
    return Course(
        replace(description, blocks=blocks),
        plan,
        (("step", 16), *draw(st.lists(verbs, min_size=2, max_size=7)), ("step", 16), ("state", None), ("predict", 16)),
        draw(st.sampled_from(list(ACTIVATIONS))),
        draw(st.integers(0, 99)),
        zero,
        decay,
    )


@at_most(12, suppress_health_check=list(HealthCheck))
@given(courses())
def test_law(world: World, course: Course) -> None:
    note(f"{course!r}")
    try:
        world.prepare(plan_of, course)
    except (whale.PlanError, whale.AnnotationError) as error:  # too few places to cut at, or nothing to split
        note(str(error))
        assume(False)
        raise
    check(world, course)
