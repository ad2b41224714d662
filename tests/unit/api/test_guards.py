"""What people do around a training loop is exact, or is answered in one clear error or warning."""

from __future__ import annotations

import copy
import dataclasses
import io
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.captures import alike, at_hand, captured_once
from tests.examples import slow
from whale.errors import BatchError, CaptureError, CheckpointError, ConfigError, OpFault, RuntimeFault

torch.set_num_threads(1)

GENERATOR = torch.Generator().manual_seed(0)
BATCH = {"input": torch.randn(8, 4, generator=GENERATOR), "target": torch.randn(8, 1, generator=GENERATOR)}
SGD = partial(torch.optim.SGD, lr=0.1)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def built() -> tuple[nn.Module, dict[str, Tensor], Any]:
    return make_model(), BATCH, loss


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with at_hand():
        yield


def parallelize(model: nn.Module | None = None, **changes: Any) -> whale.Engine:
    model = model or alike(captured_once(built), make_model())
    return whale.parallelize(model, **{"loss": loss, "optimizer": SGD, "batch": BATCH, **changes})


def weights(engine: whale.Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in (engine.state_dict() or {}).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_step_without_an_optimizer_warns_once_at_the_users_line() -> None:
    engine = parallelize(optimizer=None)
    with pytest.warns(UserWarning, match="no weights are updated: parallelize was given no optimizer=") as caught:
        engine.step(BATCH)
        engine.step(BATCH)
    assert len(caught) == 1 and caught[0].filename == __file__


def bad(value: float) -> dict[str, Tensor]:
    return {**BATCH, "target": torch.full((8, 1), value)}


@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"))])
def test_a_loss_that_is_no_number_does_not_go_into_the_weights(value: float) -> None:
    engine = parallelize()
    engine.step(BATCH)
    before = weights(engine)
    with pytest.raises(RuntimeFault) as caught:
        engine.step(bad(value))
    assert caught.value.message == (f"the loss is {value} at step 2 on rank 0; the update was not applied")
    assert "gradient.skip_nonfinite" in str(caught.value)
    assert same(before, weights(engine)) and engine.step_number == 1
    engine.step(BATCH)


class Root(nn.Module):
    """Its gradient is infinite where its output is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input: Tensor) -> Tensor:
        return (input * self.scale).sum(1, keepdim=True).abs().sqrt()


def test_such_steps_are_left_out_on_demand() -> None:
    engine = parallelize(config={"gradient.skip_nonfinite": True})
    reference = parallelize()
    with pytest.warns(UserWarning, match="step 2 is skipped: its loss is nan on rank 0, its gradient norm nan") as caught:
        losses = [float(engine.step(batch)) for batch in (BATCH, bad(float("nan")), BATCH)]
    assert len(caught) == 1
    expected = [float(reference.step(BATCH)) for _ in range(2)]
    assert [losses[0], losses[2]] == expected and losses[1] != losses[1]
    assert same(weights(reference), weights(engine)) and engine.step_number == 3


def test_the_norm_of_gradients_is_there_where_a_setting_needs_it() -> None:
    engine, plain = parallelize(config={"gradient.clip_norm": 1e30}), parallelize()
    with pytest.raises(RuntimeFault, match="no step has run under this plan"):
        _ = engine.gradient_norm
    for each in (engine, plain):
        each.step(BATCH)
    expected = torch.cat([own.double().flatten() for own in plain.gradients().values()]).norm()
    assert engine.gradient_norm.item() == pytest.approx(expected.item()) and same(weights(plain), weights(engine))
    with pytest.raises(ConfigError, match=r"gradient\.clip_norm is not set(?s:.*)set gradient\.clip_norm"):
        _ = plain.gradient_norm


def test_infinite_gradients_of_a_finite_loss_are_left_out_too() -> None:
    engine = parallelize(Root(), config={"gradient.skip_nonfinite": True, "gradient.clip_norm": 1.0})
    with pytest.warns(UserWarning, match=r"step 1 is skipped: its loss is [0-9.]+, its gradient norm (inf|nan)"):
        engine.step({**BATCH, "input": torch.zeros(8, 4)})
    assert torch.equal(weights(engine)["scale"], torch.ones(4))


def test_autocast_belongs_into_the_model() -> None:
    engine = parallelize()
    for action in (lambda: engine.step(BATCH), lambda: engine.evaluate(BATCH), parallelize):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError) as caught:
            action()
        assert "torch.autocast to bfloat16 is active on cpu" in caught.value.message
        assert "inside the model's forward" in str(caught.value)
    engine.step(BATCH)


class Lower(nn.Module):
    """Computes its first layer in a lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = self.layers[0](input)
        output: Tensor = self.layers[1:](value.float())
        return output


def test_autocast_in_forward_is_captured() -> None:
    model = Lower()
    assert float(parallelize(model).step(BATCH)) == pytest.approx(float(loss(model(BATCH["input"]), BATCH).detach()))


def test_what_is_trained_is_decided_at_the_capture() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    engine = parallelize(model)
    engine.step(BATCH)
    model[0].requires_grad_(True)
    with pytest.raises(CaptureError) as caught:
        engine.step(BATCH)
    assert caught.value.message == "0.weight, 0.bias of the model was unfrozen after capture, which decides what is trained"
    assert "call parallelize again" in str(caught.value)
    model[0].requires_grad_(False)
    engine.parameters["2.bias"].requires_grad_(False)
    with pytest.raises(CaptureError, match=r"2\.bias of the model was frozen"):
        engine.step(BATCH)


def test_forward_hooks_are_told_that_they_are_called_once() -> None:
    model, seen = make_model(), []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output.shape)

    model[0].register_forward_hook(keep)
    with pytest.warns(
        UserWarning,
        match=rf"forward hooks run only during capture \(0: keep at .*{__name__.split('.')[-1]}.py",
    ):
        engine = parallelize(model)
    calls = len(seen)
    engine.step(BATCH)
    assert len(seen) == calls


def test_hooks_of_torch_are_operations() -> None:
    model = make_model()
    nn.utils.spectral_norm(model[0]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model)


class WithMean(nn.Module):
    """Returns one value per row, one of the batch and one of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = self.layers(input)
        return value, value.mean(), self.layers[0].weight.sum()


def test_an_output_without_rows_is_of_the_whole_batch() -> None:
    model = WithMean()
    engine = parallelize(model, loss=lambda output, batch: loss(output[0], batch), config={"pipeline.num_micro_batch": 2})
    found, expected = engine.predict({"input": BATCH["input"]}), model(BATCH["input"])
    assert all(torch.allclose(own, plain) for own, plain in zip(found, expected, strict=True))


@pytest.mark.parametrize("given", [nn.MSELoss(), slow(nn.functional.mse_loss)])
def test_a_loss_of_torch_gets_the_part_that_the_model_leaves_over(given: Any) -> None:
    pair = (BATCH["input"], BATCH["target"])
    assert (
        float(parallelize(loss=given).step(BATCH))
        == float(parallelize().step(BATCH))
        == float(parallelize(loss=given, batch=pair).step(pair))
    )


def test_a_loss_whose_target_is_unclear_says_how_to_pass_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parallelize(loss=nn.MSELoss(), batch={**BATCH, "weight": torch.ones(8)})
    assert "MSELoss takes the output and one target, the part of the batch that forward does not take ('target', 'weight')" in str(
        caught.value
    )
    assert "loss=lambda output, batch: MSELoss(output, batch['target'])" in str(caught.value)
    with pytest.raises(ConfigError, match=r"TripletMarginLoss takes \(anchor, positive, negative\)"):
        parallelize(loss=nn.TripletMarginLoss())


def test_an_optimizer_with_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS\.step needs a closure"):
        parallelize(optimizer=lambda named: torch.optim.LBFGS([value for _, value in named]))


@pytest.mark.parametrize(
    "make",
    [
        lambda named: torch.optim.SGD(make_model().parameters(), lr=0.1),
        lambda named: torch.optim.SGD([*(value for _, value in named), nn.Parameter(torch.ones(2))], lr=0.1),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer= returned SGD with \d parameters that it was not given"):
        parallelize(optimizer=make)


class Around(torch.optim.Optimizer):
    """An optimizer around another, as they are found on the web: no constructor of torch's is called."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_around_another_steps_it() -> None:
    plain, around = parallelize(), parallelize(optimizer=lambda named: Around(SGD(named)))
    for engine in (plain, around):
        engine.step(BATCH)
    assert same(weights(plain), weights(around))


def test_a_scheduler_that_the_script_steps_too_is_told_once(tmp_path: Path) -> None:
    engine = parallelize(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    engine.step(BATCH)
    engine.save(tmp_path / "one")
    engine.step(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load(tmp_path / "one")
        engine.step(BATCH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.scheduler.step()
            engine.step(BATCH)
    (only,) = said
    assert str(only.message).startswith("the scheduler was stepped outside engine.step (from 2 to 3)")


def test_a_batch_that_gradients_end_at_is_refused() -> None:
    upstream, engine = nn.Linear(4, 4), parallelize()
    for example, made in ((upstream(BATCH["input"]), "comes from Addmm"), (BATCH["input"].clone().requires_grad_(), "was marked so")):
        said = rf"^batch\['input'\] requires a gradient, which would be lost \(it {made}\)"
        for act in (engine.step, engine.evaluate, lambda batch: parallelize(batch=batch)):
            with pytest.raises(BatchError, match=said):
                act({**BATCH, "input": example})
    engine.step(BATCH)


def test_a_model_in_evaluation_mode_is_told_to_be_trained() -> None:
    with pytest.warns(UserWarning, match="^the model is in evaluation mode, but step runs all of it in training mode") as said:
        parallelize(make_model().eval())
    assert [each.filename for each in said] == [__file__]


class Held(torch.optim.SGD):
    """Waits in its step."""

    entered, may_go = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.entered.set()
        assert self.may_go.wait(60)
        return super().step(closure)


def test_an_engine_works_for_one_thread_at_a_time() -> None:
    engine = parallelize(optimizer=partial(Held, lr=0.1))
    other = threading.Thread(target=engine.step, args=(BATCH,), name="other")
    other.start()
    assert Held.entered.wait(60)
    with pytest.raises(RuntimeFault, match="evaluate in thread MainThread was called while step in thread other is running"):
        engine.evaluate(BATCH)
    Held.may_go.set()
    other.join()
    engine.step(BATCH)
    assert engine.step_number == 2


def test_inference_mode_around_it_all_changes_nothing() -> None:
    plain = parallelize()
    with torch.inference_mode():
        inside = parallelize()
        batch = {name: value.clone() for name, value in BATCH.items()}
        assert all(value.is_inference() for value in batch.values())
        for _ in range(3):
            assert float(plain.step(BATCH)) == float(inside.step(batch))
        assert float(plain.evaluate(BATCH)) == float(inside.evaluate(batch))
        assert torch.equal(plain.predict(BATCH), inside.predict(batch))
        inside.load_state_dict(inside.state_dict() or {})
        inside.step(batch)
    assert float(plain.step(BATCH)) > float(inside.step(BATCH)) and not inside.parameters["0.weight"].is_inference()


def test_a_scheduler_that_goes_by_a_metric_gets_the_loss() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")

    engine = parallelize(scheduler=plateau)
    for _ in range(3):
        engine.step(BATCH)
    assert engine.optimizer is not None and engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_scheduler_that_passes_on_what_it_is_given_gets_no_loss() -> None:
    class Halving(torch.optim.lr_scheduler.ExponentialLR):
        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)

    engine = parallelize(scheduler=lambda optimizer: Halving(optimizer, 0.5))
    for _ in range(2):
        engine.step(BATCH)
    assert engine.optimizer is not None and engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@cache
def loss_of(verb: str) -> Tensor:
    found: Tensor = getattr(parallelize(), verb)(BATCH)
    return found


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss: loss.backward(),
        lambda loss: (loss / 4).backward(),
        lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
        lambda loss: torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward(),
        lambda loss: torch.autograd.grad(loss, [torch.ones(1, requires_grad=True)]),
    ],
)
@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_backward_of_a_loss_that_is_done_is_told(ask: Any, verb: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(loss_of(verb))
    assert caught.value.message.startswith("backward() was called on the loss of engine.step")
    assert "leave out loss.backward(), optimizer.step() and a GradScaler" in str(caught.value)


def test_what_is_added_to_a_loss_afterwards_is_told() -> None:
    engine = parallelize()
    with pytest.raises(ConfigError, match=r"has no autograd graph\n.*add the term to the loss= of parallelize"):
        engine.step(BATCH) + sum(value.norm() for value in engine.parameters())


def test_a_loss_is_a_plain_tensor_to_all_else() -> None:
    loss = parallelize().step(BATCH)
    total = torch.zeros(()) + loss
    total += loss
    stored = io.BytesIO()
    torch.save({"loss": loss}, stored)
    stored.seek(0)
    for value in (total, loss + 1, torch.stack([loss, loss]), torch.load(stored)["loss"], copy.deepcopy(loss), loss.detach()):
        assert type(value) is torch.Tensor
    assert f"{loss:.3f}" == f"{float(loss):.3f}" and repr(loss).startswith("tensor(") and bool(loss > 0)


def test_the_optimizer_is_stepped_by_the_engine_alone() -> None:
    engine = parallelize()
    engine.step(BATCH)
    before = weights(engine)
    assert engine.optimizer is not None
    with pytest.raises(ConfigError, match=r"the engine's optimizer was stepped outside engine\.step"):
        engine.optimizer.step()
    with pytest.raises(ConfigError, match=r"leave out optimizer.step\(\) and GradScaler.step"):
        torch.amp.GradScaler("cpu", enabled=False).step(engine.optimizer)
    assert same(before, weights(engine))
    engine.step(BATCH)
    assert not same(before, weights(engine))


def test_what_modules_have_is_answered() -> None:
    engine = parallelize()
    for name, said in {
        "train": "step trains",
        "backward": "runs forward, backward",
        "cuda": "the plan says",
        "named_parameters": "items()",
    }.items():
        with pytest.raises(AttributeError, match=f"an Engine has no {name}") as caught:
            getattr(engine, name)()
        assert said in str(caught.value) and isinstance(caught.value, ConfigError) and not hasattr(engine, name)
    with pytest.raises(ConfigError, match=r"(?s)an Engine is not callable.*engine.predict\(batch\) the output"):
        engine(BATCH)
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'quux'"):
        engine.quux  # noqa: B018
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'stp', did you mean 'step'"):
        engine.stp  # noqa: B018
    assert sum(parameter.numel() for parameter in engine.parameters()) == 19
    assert list(engine.parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Noting(nn.Linear):
    """Keeps a value of its own beside its weights."""

    note = 3

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        self.note = state


def test_modules_keep_values_of_their_own_in_a_state_dict() -> None:
    model = nn.Sequential(Noting(4, 3), nn.Linear(3, 1))
    engine = parallelize(model)
    engine.step(BATCH)
    state = engine.state_dict() or {}
    assert list(state) == list(model.state_dict()) and state["0._extra_state"] == 3
    fresh = nn.Sequential(Noting(4, 3), nn.Linear(3, 1))
    fresh.load_state_dict(state)
    assert torch.equal(fresh(BATCH["input"]), engine.predict(BATCH))
    engine.load_state_dict({**state, "0._extra_state": 5})
    assert model[0].note == 5 and (engine.state_dict() or {})["0._extra_state"] == 5


def test_hooks_may_rename_the_keys_of_a_state_dict_and_make_no_tensors() -> None:
    model = make_model()

    def rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in list(state):
            state[f"net.{key}"] = state.pop(key)

    handle = model.register_state_dict_post_hook(rename)
    engine = parallelize(model)
    engine.step(BATCH)
    renamed = engine.state_dict() or {}
    handle.remove()
    assert {key.removeprefix("net."): value.tolist() for key, value in renamed.items()} == {
        key: value.tolist() for key, value in weights(engine).items()
    }
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(total=module[0].weight + 1))
    with pytest.raises(CheckpointError, match="total of the state dict is a tensor made by a hook, not a parameter or buffer of the model"):
        engine.state_dict()


def test_tensors_that_are_not_dense_are_refused() -> None:
    sparse, nested = BATCH["input"].to_sparse(), torch.nested.nested_tensor([BATCH["input"][:2], BATCH["input"][2:]])
    for value, form in ((sparse, "sparse_coo"), (nested, "nested")):
        with pytest.raises(BatchError, match=rf"batch\['input'\] is {form}, not a dense tensor"):
            parallelize(batch={**BATCH, "input": value})
    with pytest.raises(BatchError, match=r"batch\['input'\] is sparse_coo"):
        parallelize().step({**BATCH, "input": sparse})
    model = make_model()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(CaptureError, match="edges is sparse_coo; parameters and buffers must be dense tensors"):
        parallelize(model)


def test_a_model_that_torch_divides_already_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the model is a DataParallel, which already divides the work[\s\S]*model.module"):
        parallelize(nn.DataParallel(make_model()))


class Given(nn.Module):
    """Returns what it was given beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.scale = nn.Linear(4, 3), nn.Linear(3, 1), nn.Parameter(torch.ones(2))

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return self.last(self.first(input)) * self.scale.sum(), input, self.scale, self.last.bias


def test_what_a_model_returns_as_it_was_given_is_predicted_too() -> None:
    model = Given()
    engine = parallelize(model, loss=lambda output, batch: loss(output[0], batch) + output[2].square().sum())
    for found, expected in zip(engine.predict(BATCH), model(BATCH["input"]), strict=True):
        torch.testing.assert_close(found, expected)


@dataclasses.dataclass(frozen=True)
class Result:
    """An output as a class of the user's."""

    value: Tensor
    parts: list[Any]


@dataclasses.dataclass(slots=True)
class Inner:
    """Without a dictionary of its own."""

    mean: Tensor
    name: str = "mean"


class Returning(nn.Module):
    """Returns its result in objects."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(4, 1), make

    def forward(self, input: Tensor) -> Any:
        return self.make(self.layer(input), input)


def test_an_output_may_be_an_object_of_the_users() -> None:
    model = Returning(lambda h, x: Result(h, [Inner(x.mean(1)), None, types.SimpleNamespace(h=h.sin())]))
    engine = parallelize(model, loss=lambda output, batch: loss(output.value, batch))
    found, expected = engine.predict(BATCH), model(BATCH["input"])
    assert type(found) is Result and type(found.parts[0]) is Inner and found.parts[0].name == "mean" and found.parts[1] is None
    for a, b in (
        (found.value, expected.value),
        (found.parts[0].mean, expected.parts[0].mean),
        (found.parts[2].h, expected.parts[2].h),
    ):
        torch.testing.assert_close(a, b)


def test_an_output_that_holds_the_number_of_rows_is_not_predicted() -> None:
    model = Returning(lambda h, x: torch.distributions.Normal(h, 1.0, validate_args=False))
    engine = parallelize(model, loss=lambda output, batch: -output.log_prob(batch["target"]).mean())
    engine.step(BATCH)
    with pytest.raises(CaptureError, match=r"(?s)output has a number that depends on the batch.*test_guards\.py:\d+"):
        engine.predict(BATCH)


def test_a_state_dict_is_loaded_as_a_module_does() -> None:
    engine = parallelize()
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    engine.load_state_dict(other.state_dict())
    assert same(other.state_dict(), weights(engine))
    assert torch.allclose(engine.predict({"input": BATCH["input"]}), other(BATCH["input"]))
    wrong = {
        "0.weight": torch.zeros(4, 3),
        **{name: value for name, value in other.state_dict().items() if name not in ("0.weight", "2.bias")},
        "x": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as caught:
        engine.load_state_dict(wrong)
    said = str(caught.value)
    assert "lacks 2.bias" in said and "has x, which" in said and "0.weight of the state dict has shape [4, 3], [3, 4] in the model" in said
    assert same(other.state_dict(), weights(engine))
    sound = other.state_dict()
    for added in ("module.", "module._orig_mod."):
        with pytest.raises(CheckpointError, match=f"4 keys of the state dict have '{added}' in them") as caught:
            engine.load_state_dict({added + key: value for key, value in sound.items()})
        assert caught.value.hint is not None and f"key.replace('{added}', '', 1)" in caught.value.hint
    with pytest.raises(CheckpointError, match=r"2 keys of the state dict have '_orig_mod\.' in them"):
        engine.load_state_dict({key.replace("2.", "2._orig_mod."): value for key, value in sound.items()})
    with pytest.raises(CheckpointError, match=r"0\.weight of the state dict is a numpy\.ndarray, not a tensor\n.*torch\.from_numpy"):
        engine.load_state_dict({**sound, "0.weight": sound["0.weight"].numpy()})
    assert same(sound, weights(engine))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh())
        return out


@pytest.mark.parametrize("left_out", ["first.weight", "second.weight"])
def test_of_a_tied_weight_one_name_is_enough_and_two_must_agree(left_out: str) -> None:
    engine = whale.parallelize(Tied(), loss=lambda output, _: output.sum(), optimizer=partial(SGD, lr=0.1), batch=torch.zeros(2, 4))
    state, before = Tied().state_dict(), engine.state_dict()
    with pytest.raises(CheckpointError, match=r"first\.weight and second\.weight are one tensor .* \(0\.25 and 0\.5 at \[1, 2\]\)"):
        state["first.weight"][1, 2] = 0.25
        wrong = state["first.weight"].clone()
        wrong[1, 2] = 0.5
        engine.load_state_dict({**state, "second.weight": wrong})
    assert same(before or {}, engine.state_dict() or {})
    engine.load_state_dict({key: value for key, value in state.items() if key != left_out})
    assert same(state, engine.state_dict() or {})
    engine.load_state_dict({**state, "second.weight": state["second.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"lacks first\.weight"):
        engine.load_state_dict({key: value for key, value in state.items() if "weight" not in key})


class Words(nn.Module):
    """Tells one of three classes for each of ten words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, word: Tensor) -> Tensor:
        output: Tensor = self.head(self.table(word))
        return output


def words(rows: int = 8) -> dict[str, Tensor]:
    return {"word": torch.arange(rows) % 10, "label": torch.arange(rows) % 3}


def classes(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["label"])


@pytest.mark.parametrize(("part", "said"), [("word", "aten.embedding.default"), ("label", "aten.cross_entropy_loss.default")])
@pytest.mark.parametrize("policy", ["none", slow("full")])
def test_a_value_out_of_range_is_told_by_the_users_line(part: str, said: str, policy: str) -> None:
    torch.manual_seed(0)
    model = Words()
    engine = parallelize(model, loss=classes, batch=words(), config={"recompute.policy": policy, "pipeline.num_micro_batch": 2})
    bad = words()
    bad[part] = bad[part] + torch.tensor([0] * 7 + [90])
    with pytest.raises(OpFault) as caught:
        engine.step(bad)
    assert caught.value.message.startswith("%") and ") failed on rows " in caught.value.message
    assert f" ({said}) failed on rows 4 to 7" in caught.value.message
    assert "IndexError: " in caught.value.message and str(caught.value.where).rpartition(":")[0].endswith("test_guards.py")
    expected = float(classes(model(words()["word"]), words()).detach())
    assert float(engine.step(words())) == pytest.approx(expected), "nothing has changed"


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 3)

    def forward(self, word: Tensor, offset: Tensor) -> Tensor:
        output: Tensor = self.table(word, offset)
        return output


def test_an_op_that_fails_on_some_rows_says_how_to_gather_them() -> None:
    batch = {"word": torch.arange(16) % 10, "offset": torch.arange(0, 16, 2), "label": torch.arange(8) % 3}
    with pytest.warns(UserWarning, match="embedding_bag"):
        engine = parallelize(Bags(), loss=classes, batch=batch, config={"pipeline.num_micro_batch": 2})
    with pytest.raises(OpFault, match=r"(?s)aten.embedding_bag.*offsets\[0\] has to be 0.*pipeline.num_micro_batch: 1 gathers them"):
        engine.step(batch)


@pytest.mark.slow
def test_weights_of_classes_that_are_as_many_as_the_rows() -> None:
    def weighted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, batch["label"], weight=batch["weight"])

    def batch(rows: int) -> dict[str, Tensor]:
        return {"word": torch.arange(rows), "label": torch.arange(rows) % 3, "weight": torch.ones(3)}

    given: dict[str, Any] = {"loss": weighted, "batch": batch(3)}
    with pytest.raises(BatchError, match=r"(?s)\['weight'\]: 3.*give batch_dims={'weights': None}"):
        parallelize(Words(), **given).step(batch(6))
    with pytest.raises(CaptureError, match=r"(?s)cannot be captured for 1 rows, a device's share of 3: .*give batch_dims="):
        parallelize(Words(), **given, config={"pipeline.num_micro_batch": 3})
    engine = parallelize(Words(), **given, batch_dims={"weight": None}, config={"pipeline.num_micro_batch": 3})
    engine.step(batch(6))


def test_statistics_may_average_over_all_batches() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1, momentum=None))
    plain, engine = copy.deepcopy(model), parallelize(model)
    optimizer = SGD(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss(plain(BATCH["input"]), BATCH).backward()
        optimizer.step()
        engine.step(BATCH)
    found = weights(engine)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)
    assert model[1].momentum is None


def test_a_run_that_resumes_is_recorded_from_where_it_does(tmp_path: Path) -> None:
    first = parallelize()
    for _ in range(5):
        first.step(BATCH)
    first.save(tmp_path / "saved")
    resumed = parallelize(config={"trace.directory": str(tmp_path / "trace"), "trace.first_step": 1, "trace.num_steps": 1})
    resumed.load(tmp_path / "saved")
    for recorded in (False, True):
        with pytest.raises(BatchError):  # a step that fails is none
            resumed.step({name: value.double() for name, value in BATCH.items()})
        resumed.step(BATCH)
        assert (tmp_path / "trace" / "trace.json").exists() == recorded
    assert "step 7" in (tmp_path / "trace" / "report.html").read_text(), "steps are numbered from 1, also those before"


@pytest.mark.parametrize("rank", [1, -1])
def test_weights_are_gathered_on_a_rank_that_there_is(rank: int) -> None:
    with pytest.raises(RuntimeFault, match=rf"there is no rank {rank}; ranks are 0 to 0"):
        parallelize().state_dict(rank=rank)


def samples(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [{"input": torch.randn(4, generator=generator), "target": torch.randn(1, generator=generator)} for _ in range(number)]


def losses_of(engine: whale.Engine, loader: Any, steps: int | None = None) -> list[float]:
    return [float(engine.step(batch)) for _, batch in zip(range(steps or len(loader)), loader, strict=False)]


@pytest.mark.parametrize("made_first", ["training", "validation"])
def test_a_run_resumes_where_the_loader_of_its_steps_was(made_first: str, tmp_path: Path) -> None:
    whole = parallelize()
    expected = losses_of(whole, whole.loader(samples(40), global_batch_size=8))
    engine = parallelize()
    loader, validation = (engine.loader(samples(number), global_batch_size=8) for number in (40, 16))
    losses_of(engine, loader, 2)
    for batch in validation:
        engine.evaluate(batch)
    engine.save(tmp_path / "c")

    resumed = parallelize()
    resumed.load(tmp_path / "c")
    sizes = (40, 16) if made_first == "training" else (16, 40)
    loaders = {size: resumed.loader(samples(size), global_batch_size=8) for size in sizes}
    for batch in loaders[16]:
        resumed.evaluate(batch)
    assert losses_of(resumed, loaders[40]) == pytest.approx(expected[2:])


def test_a_batch_that_no_step_took_is_read_again(tmp_path: Path) -> None:
    whole = parallelize()
    expected = losses_of(whole, whole.loader(samples(40), global_batch_size=8))
    engine = parallelize()
    found = []
    for batch in engine.loader(samples(40), global_batch_size=8):
        if engine.step_number == 2:
            break
        found.append(float(engine.step(batch)))
    engine.save(tmp_path / "c")

    resumed = parallelize()
    loader = resumed.loader(samples(40), global_batch_size=8)
    batches = iter(loader)
    resumed.step(next(batches))
    resumed.load(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"checkpoint: epoch 0, row 16; the batch: epoch 0, row 8"):
        resumed.step(next(batches))
    assert found + losses_of(resumed, loader) == pytest.approx(expected)


def test_training_on_from_another_loader_than_the_checkpoints_is_told_before_the_step(tmp_path: Path) -> None:
    engine = parallelize()
    losses_of(engine, engine.loader(samples(40), global_batch_size=8), 2)
    engine.save(tmp_path / "c")

    resumed = parallelize()
    resumed.load(tmp_path / "c")
    other = resumed.loader(samples(24), global_batch_size=8)
    before = weights(resumed)
    with pytest.raises(CheckpointError, match="samples there: 40, here: 24"):
        resumed.step(next(iter(other)))
    twin, loader = (resumed.loader(samples(40), global_batch_size=8) for _ in range(2))
    with pytest.raises(CheckpointError, match="another loader than the one that continues from the checkpoint's data position"):
        resumed.step(next(iter(loader)))
    assert same(weights(resumed), before) and resumed.step_number == 2
    resumed.save(tmp_path / "d")  # the position is still the one that was read
    losses_of(resumed, twin, 1)
    other.set_epoch(0)
    assert len(losses_of(resumed, other)) == 3
    with pytest.raises(CheckpointError, match="samples there: 40, here: 24"):
        resumed.load(tmp_path / "d")
    assert resumed.step_number == 6


@pytest.mark.parametrize("kind", [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.RMSprop, lr=0.1)])
def test_another_kind_of_optimizer_does_not_go_on(kind: Any, tmp_path: Path) -> None:
    engine = parallelize(optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2))
    engine.step(BATCH)
    engine.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=rf"the state of another optimizer .SGD, here: {kind.func.__name__}"):
        parallelize(optimizer=kind).load(tmp_path / "c")
    other = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with pytest.raises(CheckpointError, match=r"the state of another scheduler .StepLR, here: ExponentialLR"):
        parallelize(optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=other).load(tmp_path / "c")


def test_a_checkpoint_of_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    def over_the_last(owned: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for name, value in owned if name.startswith("2.")], lr=0.1)

    engine = parallelize(optimizer=over_the_last)
    engine.step(BATCH)
    engine.save(tmp_path / "c")
    other = parallelize()
    before = weights(other)
    with pytest.raises(CheckpointError, match="are not in the saved one"):
        other.load(tmp_path / "c")
    assert same(weights(other), before) and other.step_number == 0


class Counted(nn.Module):
    """Running statistics, a counter, and a mean that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * input.detach().mean(0))
        return self.last(self.norm(input))


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_that_does_not_count_leaves_buffers_as_they_were(skips: bool) -> None:
    engine = parallelize(Counted(), config={"gradient.skip_nonfinite": True} if skips else {})
    engine.step(BATCH)
    before = weights(engine)
    assert before["norm.num_batches_tracked"] == 1
    infinite = {**BATCH, "input": BATCH["input"].clone().fill_(float("inf"))}
    with pytest.warns(UserWarning, match="is skipped") if skips else pytest.raises(RuntimeFault, match="the loss is nan"):
        engine.step(infinite)
    assert same(before, weights(engine))
    engine.step(BATCH)
    assert weights(engine)["norm.num_batches_tracked"] == 2 and weights(engine)["norm.running_mean"].isfinite().all()
