"""What scripts do around a step, on several ranks: values that change between steps, and sizes that only values tell."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
import whale.api.modes
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import BatchError, ConfigError, WhaleError

Batch = dict[str, Tensor]
Named = list[tuple[str, nn.Parameter]]
SGD = partial(torch.optim.SGD, lr=0.1)
SETTINGS: dict[str, dict[str, object]] = {
    "uneven": {"planning.search": "off"},
    "pipeline": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2},
    "split": {"replicas": [{"split": 2}]},
}
ALWAYS: dict[str, object] = {"runtime.retrace": "always"}
VALUES = (0.5, 2.0, 0.5)
FACTOR = torch.ones(())


class Net(nn.Module):
    """Two layers with a setting between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = 1.0
        self.first, self.last = nn.Linear(8, 12).double(), nn.Linear(12, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 8, generator=generator).double(), "labels": torch.randint(0, 5, (8,), generator=generator)}


def mean(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"])


def masked(output: Tensor, batch: Batch) -> Tensor:
    return torch.masked_select(output**2, batch["x"][:, :5] > 0).mean()


def of_some(output: Tensor, batch: Batch) -> Tensor:
    some = batch["labels"] < 3
    return nn.functional.cross_entropy(output[some], batch["labels"][some])


def balanced(output: Tensor, batch: Batch) -> Tensor:
    count = torch.bincount(batch["labels"], minlength=5).to(output)
    return (nn.functional.cross_entropy(output, batch["labels"], reduction="none") / count[batch["labels"]]).mean()


def made(
    name: str, loss: Callable[[Tensor, Batch], Tensor], optimizer: Callable[[Named], torch.optim.Optimizer] = SGD
) -> tuple[Net, whale.Engine]:
    model = Net()
    cluster = make_cluster((1.0, 3.0) if name == "uneven" else (1e-4, 1e-4))
    return model, whale.parallelize(model, loss=loss, optimizer=optimizer, batch=batch(0), config=SETTINGS[name], cluster=cluster)


def changing(rank: int, num_ranks: int, name: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, engine = made(name, mean)
        losses = []
        for number, value in enumerate(VALUES):
            losses.append(float(engine.step(batch(number))))
            model.scale = value
        losses.append(float(engine.evaluate(batch(9))))
    return losses, engine.state_dict() or {}, [str(each.message) for each in said if "plain values" in str(each.message)]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_that_changes_between_steps(world: World, name: str) -> None:
    model, expected = Net(), []
    optimizer = SGD(model.parameters())
    for number, value in enumerate(VALUES):
        optimizer.zero_grad()
        loss = mean(model(batch(number)["x"]), batch(number))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
        model.scale = value
    expected.append(float(mean(model(batch(9)["x"]), batch(9)).detach()))
    for rank, (losses, state, said) in enumerate(world.run(changing, name, num_ranks=2)):
        assert losses == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-10, atol=1e-12)
        assert len(said) == (rank == 0)


def unlike(rank: int, num_ranks: int) -> tuple[str, float]:
    """What is said where one rank alone changes a value; then the loss of the next step, in which they agree again."""
    model, engine = made("uneven", mean)
    model.scale = 0.5 if rank else 1.0
    warnings.simplefilter("ignore")
    with pytest.raises(BatchError) as caught:
        engine.step(batch(0))
    model.scale = 1.0
    return caught.value.message, float(engine.step(batch(0)))


def test_a_value_that_changes_on_one_rank_is_refused_on_all(world: World) -> None:
    expected = float(mean(Net()(batch(0)["x"]), batch(0)).detach())
    for said, loss in world.run(unlike, num_ranks=2):
        assert said.startswith("ranks captured different models")
        assert loss == pytest.approx(expected, rel=1e-12)


class Far(Net):
    """Reads what nobody watches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTOR.item()


def far(rank: int, num_ranks: int, name: str, on: int | None) -> tuple[str, str, int]:
    cluster = make_cluster((1.0, 3.0) if name == "uneven" else (1e-4, 1e-4))
    engine = whale.parallelize(Far(), loss=mean, optimizer=SGD, batch=batch(0), config=SETTINGS[name] | ALWAYS, cluster=cluster)
    engine.step(batch(0))
    if on in (None, rank):
        FACTOR.fill_(2.0)
    with pytest.raises(WhaleError) as caught:
        engine.step(batch(0))
    return caught.value.message, str(caught.value.where), engine.step_number


@pytest.mark.parametrize(("name", "on"), [("split", None), ("pipeline", 1)])
def test_what_nobody_watches_is_found_on_all_ranks(world: World, name: str, on: int | None) -> None:
    for rank, (said, where, steps) in enumerate(world.run(far, name, on, num_ranks=2)):
        own = "" if on in (None, rank) else f"the batch was refused on rank {on}: "
        assert said.startswith(f"{own}the model changed since it was captured (traced again before step 2: %mul")
        assert ": 2.0, captured: 1.0)" in said and steps == 1
        assert ("test_guards.py:" in where) == (on in (None, rank))


def one_step(rank: int, num_ranks: int, loss: Callable[[Tensor, Batch], Tensor]) -> tuple[float, dict[str, Tensor]]:
    _, engine = made("split", loss)
    return float(engine.step(batch(0))), engine.state_dict() or {}


@pytest.mark.parametrize("loss", [masked, of_some, balanced])
def test_sizes_that_only_values_tell(world: World, loss: Callable[[Tensor, Batch], Tensor]) -> None:
    model = Net()
    value = loss(model(batch(0)["x"]), batch(0))
    value.backward()
    SGD(model.parameters()).step()
    for found, state in world.run(one_step, loss, num_ranks=2):
        assert found == pytest.approx(float(value.detach()), rel=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-10, atol=1e-12)


class Clipped(torch.optim.SGD):
    """Clips by the norm of the gradients that it sees."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.01)
        return super().step(closure)


def hooked(named: Named) -> torch.optim.Optimizer:
    optimizer = SGD(named)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def of_the_first_layer(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for name, value in named if name.startswith("first")], lr=0.1)


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "torch's": SGD,
    "clipped": partial(Clipped, lr=0.1),
    "hooked": hooked,
    "of a layer": of_the_first_layer,
}


def said_of_an_optimizer(rank: int, num_ranks: int, name: str, optimizer: str) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            made(name, mean, OPTIMIZERS[optimizer])
        except ConfigError as error:
            return [error.message]
    return [str(each.message) for each in said if "optimizer" in str(each.message)]


@pytest.mark.parametrize(
    ("name", "optimizer", "expected"),
    [
        ("uneven", "clipped", ""),
        ("pipeline", "torch's", ""),
        (
            "pipeline",
            "clipped",
            "the optimizer may combine several parameters (Clipped is not one of torch's), but each of ranks 0, 1 has only some of them",
        ),
        (
            "pipeline",
            "hooked",
            "the optimizer may combine several parameters (SGD has hooks on its step), but each of ranks 0, 1 has only some of them",
        ),
        (
            "split",
            "hooked",
            "the optimizer may combine several parameters (SGD has hooks on its step), but each of ranks 0, 1 has only some of them",
        ),
    ],
)
def test_an_optimizer_that_may_look_at_all_parameters_is_told(world: World, name: str, optimizer: str, expected: str) -> None:
    told, silent = world.run(said_of_an_optimizer, name, optimizer, num_ranks=2)
    assert not silent and len(told) == bool(expected) and (not told or told[0].startswith(expected))


def test_an_optimizer_function_that_fails_on_some_of_the_parameters(world: World) -> None:
    first, last = world.run(said_of_an_optimizer, "pipeline", "of a layer", num_ranks=2)
    said = "optimizer= failed on the parameters of this rank (last.weight, last.bias): ValueError: "
    assert last[0].startswith(said) and first[0].startswith(f"rank 1: {said}")


def mistaken(rank: int, num_ranks: int) -> list[float]:
    _, engine = made("uneven", mean)
    for verb, given in ((engine.step, ()), (engine.evaluate, (batch(0), 2)), (engine.state_dict, (0, 1))):
        with pytest.raises(TypeError, match="argument"):
            verb(*given)
    return [float(engine.step(batch(0)))]


def test_an_engine_goes_on_after_arguments_that_a_verb_does_not_take(world: World) -> None:
    expected = float(mean(Net()(batch(0)["x"]), batch(0)).detach())
    assert world.run(mistaken, num_ranks=2) == [[pytest.approx(expected)]] * 2


def steps_with_traces(rank: int, num_ranks: int, name: str) -> list[int]:
    """The steps before which this rank traced the model again; its clock goes as fast as its number says."""
    told = array("d", [0.0, 0.0])  # the time, and the traces
    whale.api.modes.time = SimpleNamespace(monotonic=lambda: told[0])  # type: ignore[attr-defined]

    def counted(output: Tensor, batch: Batch) -> Tensor:
        told[0] += 0.3 * (1 + rank)
        told[1] += 1
        return mean(output, batch)

    _, engine = made(name, counted)
    found = []
    for step in range(1, 13):
        before = told[1]
        engine.step(batch(step))
        told[0] += 15.0 / (1 + rank)
        found += [step] if told[1] > before else []
    return found


@pytest.mark.parametrize("name", ["uneven", "pipeline"])
def test_all_ranks_trace_again_before_the_same_steps_by_the_clock_of_rank_0(world: World, name: str) -> None:
    found = world.run(steps_with_traces, name, num_ranks=2)
    assert found == [[6, 7, 8, 10, 12]] * 2
