"""What a script changes around an engine between steps, beside tensors, is followed; what cannot be is told."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from whale.errors import BatchError, CaptureError

torch.set_num_threads(1)

GENERATOR = torch.Generator().manual_seed(0)
BATCH = {"x": torch.randn(8, 4, generator=GENERATOR, dtype=torch.float64), "y": torch.randn(8, 1, generator=GENERATOR, dtype=torch.float64)}
SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]
Change = Callable[[nn.Module, float], None]

options = types.SimpleNamespace(factor=1.0, steps=0)


def plain(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


class Scaled(nn.Module):
    """A model with settings in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)
        self.drop = nn.Dropout(0.0)
        self.scale, self.parts, self.aside, self.seen = 1.0, [1.0, 1.0], False, 0
        self.mask = torch.ones(3, dtype=torch.float64)
        self.bend: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.bend(self.first(x)) * self._own_scale()) * self.mask
        return self.last(h + h.cos() if self.aside else h)

    def _own_scale(self) -> float:
        return self.scale * self.parts[0]


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().double()


class Weighted:
    """A loss that is an object, with a default in its class."""

    weight = 1.0

    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.weight * plain(output, batch)


class Trainer:
    """A loss that is a method; its object counts steps for itself."""

    def __init__(self) -> None:
        self.weight, self.steps = 1.0, 0

    def compute(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self._weight() * plain(output, batch)

    def _weight(self) -> float:
        return self.weight

    def log(self) -> int:
        return self.steps


def own_loss() -> tuple[Loss, Change]:
    return plain, lambda model, value: setattr(model, "scale", value)


def item_of_a_list() -> tuple[Loss, Change]:
    def change(model: Any, value: float) -> None:
        model.parts[0] = value

    return plain, change


def other_tensor() -> tuple[Loss, Change]:
    return plain, lambda model, value: setattr(model, "mask", torch.full((3,), value, dtype=torch.float64))


def other_ops() -> tuple[Loss, Change]:
    return plain, lambda model, value: setattr(model, "aside", value > 1)


def of_a_layer() -> tuple[Loss, Change]:
    def change(model: Any, value: float) -> None:
        model.drop.p = 1.0 if value > 1 else 0.0

    return plain, change


def closure() -> tuple[Loss, Change]:
    weight = 1.0

    def change(_: nn.Module, value: float) -> None:
        nonlocal weight
        weight = value

    return lambda output, batch: weight * plain(output, batch), change


def of_a_class() -> tuple[Loss, Change]:
    loss = Weighted()
    return loss, lambda _, value: setattr(loss, "weight", value)


def method() -> tuple[Loss, Change]:
    trainer = Trainer()
    return partial(trainer.compute), lambda _, value: setattr(trainer, "weight", value)


def other_function() -> tuple[Loss, Change]:
    return plain, lambda model, value: setattr(model, "bend", torch.sin if value > 1 else torch.tanh)


def other_forward() -> tuple[Loss, Change]:
    def change(model: Any, value: float) -> None:
        model.first.forward = lambda x: value * nn.functional.linear(x, model.first.weight, model.first.bias)

    return plain, change


CASES = (
    other_function,
    other_forward,
    own_loss,
    item_of_a_list,
    other_tensor,
    other_ops,
    of_a_layer,
    closure,
    of_a_class,
    method,
)


def run(case: Callable[[], tuple[Loss, Change]], values: tuple[float, ...], step: Callable[..., Any]) -> list[float]:
    """The losses of steps between which a value changes."""
    (loss, change), model = case(), scaled()
    losses = []
    take = step(model, loss)
    for value in values:
        losses.append(take())
        change(model, value)
    return [*losses, take()]


def plain_loop(model: nn.Module, loss: Loss) -> Callable[[], float]:
    optimizer = SGD(model.parameters())

    def take() -> float:
        optimizer.zero_grad()
        value = loss(model(BATCH["x"]), BATCH)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return take


def by_engine(model: nn.Module, loss: Loss) -> Callable[[], float]:
    engine = whale.parallelize(model, loss=loss, optimizer=SGD, batch=BATCH)
    return lambda: float(engine.step(BATCH))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_value_that_changes_between_steps(case: Callable[[], tuple[Loss, Change]]) -> None:
    with pytest.warns(UserWarning, match=r"plain values that the model or its loss reads changed since the capture \(.*, now ") as said:
        found = run(case, (2.0, 0.5), by_engine)
    assert found == pytest.approx(run(case, (2.0, 0.5), plain_loop), rel=1e-12)
    assert len(said) == 1 and said[0].filename == __file__


@settings(max_examples=3, deadline=None)
@given(st.sampled_from((own_loss, closure, other_ops)), st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=1, max_size=4))
def test_any_sequence_of_values(case: Callable[[], tuple[Loss, Change]], values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(case, tuple(values), by_engine)
    assert found == pytest.approx(run(case, tuple(values), plain_loop), rel=1e-12)


def test_what_no_code_of_the_step_reads_may_change() -> None:
    model, trainer = scaled(), Trainer()
    engine = whale.parallelize(model, loss=trainer.compute, optimizer=SGD, batch=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            engine.step(BATCH)
            model.seen = trainer.steps = options.steps = number
    model.scale = 2.0
    with pytest.warns(UserWarning, match=r"\(Scaled.scale: 1.0, now 2.0\)"):
        engine.step(BATCH)
    model.scale = 1.0
    assert len(engine.modes._modes["train"].others) == 1
    engine.step(BATCH)
    assert len(engine.modes._modes["train"].others) == 1  # the first capture serves again


def test_a_part_that_is_frozen_later_stays_in_evaluation_mode() -> None:
    def frozen(model: nn.Module) -> nn.Module:
        model[1].eval()
        return model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    batch = {"input": BATCH["x"], "y": BATCH["y"]}
    engine = whale.parallelize(model, loss=plain, optimizer=partial(torch.optim.SGD, lr=0.0), batch=batch)
    engine.step(batch)
    model.eval()  # the whole model: to look at it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(batch)
    frozen(model.train())
    with pytest.warns(UserWarning, match=r"\(1.training: True, now False\)"):
        found = engine.step(batch)
    state = engine.state_dict()
    assert state is not None and int(state["1.num_batches_tracked"]) == 2
    model.load_state_dict(state)
    torch.testing.assert_close(found, plain(model(BATCH["x"]), BATCH).detach())


def test_a_value_with_which_the_model_cannot_be_captured() -> None:
    class Doubtful(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + float(x.sum()) if self.scale > 1 else x)

    torch.manual_seed(0)
    model = Doubtful().double()
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH)
    model.scale = 2.0
    with (
        pytest.warns(UserWarning),
        pytest.raises(BatchError, match=r"cannot be captured for plain values that changed \(Doubtful.scale: 1.0, now 2.0\): "),
    ):
        engine.step(BATCH)


def test_layers_that_are_replaced_are_told() -> None:
    model = scaled()
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH)
    model.last = nn.Linear(3, 1).double()
    with pytest.raises(CaptureError, match="last of the model was replaced after capture"):
        engine.step(BATCH)


@pytest.mark.parametrize("part", [nn.Linear(3, 3), nn.Parameter(torch.ones(3))], ids=["layer", "parameter"])
def test_layers_that_are_added_are_told(part: nn.Module | nn.Parameter) -> None:
    model = scaled()
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH)
    model.first.extra = part
    with pytest.raises(CaptureError, match=r"first\.extra of the model was added after capture"):
        engine.step(BATCH)


def test_what_is_written_to_the_users_model_is_told_to_be_lost_once() -> None:
    model = scaled()
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH)
    with torch.no_grad():
        model.first.weight.clamp_(-0.1, 0.1)
    with pytest.warns(UserWarning, match=r"first.weight of the model was written after parallelize; .* engine.load_state_dict") as said:
        engine.step(BATCH)
        engine.step(BATCH)
    assert len(said) == 1 and said[0].filename == __file__


def test_a_buffer_that_is_replaced_is_told_to_be_lost() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)).double()
    engine = whale.parallelize(model, loss=lambda output, batch: output.square().mean(), optimizer=SGD, batch=BATCH["x"])
    model[1].running_mean = torch.ones(1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="1.running_mean of the model was written after parallelize"):
        engine.step(BATCH["x"])


def test_the_engines_weights_may_be_written_to_the_users_model() -> None:
    model = scaled()
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            engine.step(BATCH)
            model.load_state_dict(engine.state_dict() or {})
        engine.step(BATCH)


class Blocks(nn.Module):
    """Equal blocks; an attribute adds ops inside each, or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.last, self.inside, self.after = nn.Linear(4, 1), False, False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = x + block(x)
            x = h.sin() + h if self.inside else h
        return self.last(x.cos() if self.after else x)


@pytest.mark.parametrize("num_micro_batch", [1, 2])
def test_blocks_are_recomputed_where_other_ops_run(num_micro_batch: int) -> None:
    torch.manual_seed(0)
    model, reference = Blocks().double(), Blocks().double()
    reference.load_state_dict(model.state_dict())
    config = {"recompute.policy": "blocks", "pipeline.num_micro_batch": num_micro_batch}
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH, config=config)
    assert engine.plan.replicas[0].stages[0].recomputed
    optimizer = SGD(reference.parameters())
    for inside, after in ((False, False), (True, False), (False, True), (True, True), (False, False)):
        for each in (model, reference):
            each.inside, each.after = inside, after
        optimizer.zero_grad()
        expected = plain(reference(BATCH["x"]), BATCH)
        expected.backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert float(engine.step(BATCH)) == pytest.approx(expected.item(), rel=1e-12)
    other = engine.runtime.plan_of("train 1: ")
    assert other is not None and len(other.replicas[0].stages[0].recomputed) == len(engine.plan.replicas[0].stages[0].recomputed)
    engine.close()


class InPairs(Scaled):
    """Its ops are known for one number of rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(int(x.shape[0]) * 2, 2).reshape(-1, 4))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_plan_captures_other_rows_with_the_values_of_then() -> None:
    torch.manual_seed(0)
    model, alone = InPairs().double(), InPairs().double()
    alone.load_state_dict(model.state_dict())
    engine = whale.parallelize(model, loss=plain, optimizer=SGD, batch=BATCH, config={"pipeline.num_micro_batch": 2})
    optimizer = SGD(alone.parameters())
    for step, bend in enumerate((torch.tanh, torch.relu, torch.relu, torch.tanh)):
        model.bend = alone.bend = bend
        if step == 2:
            engine.replan(config={"pipeline.num_micro_batch": 4})
            assert model.bend is torch.relu
        optimizer.zero_grad()
        expected = plain(alone(BATCH["x"]), BATCH)
        expected.backward()
        optimizer.step()
        assert torch.isclose(engine.step(BATCH), expected.double()), step
