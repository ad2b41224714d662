"""The model that the user gave keeps its weights; who asks it for trained ones, or copies an engine, is told what to ask for."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import whale
from tests.captures import alike, at_hand, captured_once
from whale.errors import ConfigError, RuntimeFault

GENERATOR = torch.Generator().manual_seed(0)
BATCH = {"input": torch.randn(8, 4, generator=GENERATOR), "target": torch.randn(8, 1, generator=GENERATOR)}
SGD = partial(torch.optim.SGD, lr=0.1)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def built() -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), BATCH, loss


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with at_hand():
        yield


def made(**changes: Any) -> tuple[nn.Module, whale.Engine]:
    model = alike(captured_once(built), built()[0])
    return model, whale.parallelize(model, **{"loss": loss, "optimizer": SGD, "batch": BATCH, **changes})


def heard(act: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return list(found)


def save(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("ask", [nn.Module.state_dict, lambda model: model(BATCH["input"]), save])
def test_a_model_that_is_asked_after_training_is_told_once_at_the_users_line(ask: Callable[[nn.Module], object]) -> None:
    model, engine = made()
    assert not heard(lambda: ask(model))
    assert not heard(lambda: [engine.step(BATCH), engine.evaluate(BATCH), engine.predict(BATCH), engine.step(BATCH)])
    only, *others = heard(lambda: [ask(model), ask(model)])
    assert not others and only.filename == __file__
    assert str(only.message).startswith("the model given to parallelize keeps its initial weights")


def averaged(model: nn.Module) -> None:
    AveragedModel(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))).update_parameters(model)


def by_hand(model: nn.Module) -> None:
    for average, parameter in zip(built()[0].parameters(), model.parameters(), strict=True):
        average.data.mul_(0.9).add_(parameter, alpha=0.1)


def norm(model: nn.Module) -> float:
    return sum(float(parameter.detach().norm()) for parameter in model.parameters())


def of_a_part(model: nn.Module) -> object:
    return model[2](torch.zeros(1, 3))


@pytest.mark.parametrize("read", [averaged, by_hand, norm, of_a_part, copy.deepcopy, lambda model: model[0].weight.tolist()])
def test_parameters_that_are_read_one_by_one_after_training_are_an_error(read: Callable[[nn.Module], object]) -> None:
    model, engine = made()
    engine.step(BATCH)
    kept = [(p, p.shape, p.device, p.requires_grad, p.grad, p.numel()) for p in model.parameters()]  # what is no value may be read
    assert len(kept) == 4 and len(torch.optim.SGD(model.parameters(), lr=0.1).param_groups[0]["params"]) == 4
    with pytest.raises(
        RuntimeFault, match=r"a parameter of the model was read after parallelize, but .* keeps its initial weights"
    ) as caught:
        read(model)
    file = "copy.py" if read is copy.deepcopy else "test_stale_model.py"
    assert f"/{file}:" in str(caught.value.where) and "engine.state_dict()" in str(caught.value)
    engine.step(BATCH)
    model.load_state_dict(engine.state_dict() or {})
    read(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_model_that_the_script_trains_beside_the_engine_is_its_own() -> None:
    model, engine = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model(BATCH["input"]), BATCH).backward()
    engine.step(BATCH)
    optimizer.step()


def test_another_engine_may_be_made_of_a_model_whose_first_one_has_trained() -> None:
    model, engine = made()
    expected = float(engine.step(BATCH))
    assert float(whale.parallelize(model, loss=loss, optimizer=SGD, batch=BATCH).step(BATCH)) == expected


def test_a_script_with_weights_from_the_engine_may_use_the_model() -> None:
    model, engine = made()
    engine.step(BATCH)
    assert not heard(
        lambda: [model.load_state_dict(engine.state_dict() or {}), model(BATCH["input"]), engine.step(BATCH), model.state_dict()]
    )


def test_a_model_that_trains_under_two_engines_is_captured_in_silence() -> None:
    model, engine = made()
    other = whale.parallelize(model, loss=loss, optimizer=SGD, batch=BATCH)
    assert not heard(lambda: [engine.step(BATCH), other.step(BATCH), other.state_dict()])
    first, *others = heard(model.state_dict)
    assert not others and str(first.message).startswith("the model given to parallelize")


def test_a_pickled_model_is_one_that_computes() -> None:
    model, engine = made()
    engine.step(BATCH)
    with pytest.warns(UserWarning, match="keeps its initial weights"):
        text = pickle.dumps(model)
    assert not heard(lambda: torch.testing.assert_close(pickle.loads(text)(BATCH["input"]), model(BATCH["input"])))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)an Engine cannot be copied or pickled.*engine.state_dict\(\) has the weights"):
        duplicate(made()[1])


HALVING = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        (HALVING, None, "the checkpoint has the state of a scheduler (StepLR), but parallelize was given none: learning rates stay"),
        (None, HALVING, "the checkpoint has no scheduler state: the scheduler of parallelize (StepLR) starts from the beginning"),
        (HALVING, HALVING, ""),
        (None, None, ""),
    ],
)
def test_a_scheduler_that_does_not_go_on_is_told(saved: Any, here: Any, said: str, tmp_path: Path) -> None:
    first, second = made(scheduler=saved)[1], made(scheduler=here)[1]
    first.step(BATCH)
    first.save(tmp_path / "checkpoint")
    found = [each for each in heard(lambda: second.load(tmp_path / "checkpoint")) if "scheduler" in str(each.message)]
    assert [each.filename for each in found] == [__file__] * bool(said)
    assert all(str(each.message).startswith(said) for each in found)
    assert second.step_number == 1


def test_weights_alone_are_loaded_without_a_word_of_schedulers(tmp_path: Path) -> None:
    first, second = made(scheduler=HALVING)[1], made(optimizer=None)[1]
    first.step(BATCH)
    first.save(tmp_path / "checkpoint")
    assert not [each for each in heard(lambda: second.load(tmp_path / "checkpoint")) if "scheduler" in str(each.message)]
