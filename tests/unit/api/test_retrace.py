"""Whatever the code of a model reads, a change of it is noticed: by the watch, or where the model is traced again."""

from __future__ import annotations

import collections
import contextvars
import itertools
import os
import random
import types
import warnings
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale
import whale.api.modes
from whale.errors import CaptureError, ConfigError

torch.set_num_threads(1)

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ALWAYS = {"runtime.retrace": "always"}
Loss = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[float], object]

factor = 1.0
options = types.SimpleNamespace(factor=1.0)
queue = collections.deque([1.0])
scalar = np.float32(1.0)
context = contextvars.ContextVar("factor", default=1.0)


class Options:
    factor = 1.0


class Net(nn.Module):
    """Scales its layer by what it is given."""

    scale = 1.0
    parts: ClassVar[Any] = collections.deque([1.0])

    def __init__(self, scaled: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scaled = nn.Linear(4, 2).double(), scaled

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scaled(self.layer(x)) * self.scale * self.parts[0]
        return y


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ((Net, "scale"), (Net, "parts"), (options, "factor"), (Options, "factor")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    monkeypatch.setenv("WHALE_TEST_FACTOR", "1.0")


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def made(model: nn.Module, loss: Loss = square, **settings: Any) -> whale.Engine:
    return whale.parallelize(model, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH, config=settings)


def expected(model: nn.Module, loss: Loss, changes: list[Callable[[], object]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for change in changes:
        change()
        optimizer.zero_grad()
        value = loss(model(BATCH), BATCH)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


# ---- what is near: captured anew ---------------------------------------------------------------------------------


def class_attribute() -> tuple[nn.Module, Loss, Change]:
    return Net(), square, lambda value: setattr(Net, "scale", value)


def deque_of_a_class() -> tuple[nn.Module, Loss, Change]:
    return Net(), square, lambda value: Net.parts.__setitem__(0, value)


def numpy_scalar() -> tuple[nn.Module, Loss, Change]:
    model = Net()
    model.scale = np.float64(1.0)
    return model, square, lambda value: setattr(model, "scale", np.float64(value))


def argument_of_partial() -> tuple[nn.Module, Loss, Change]:
    model = Net(partial(torch.mul, other=1.0))
    return model, square, lambda value: setattr(model, "scaled", partial(torch.mul, other=value))


def default() -> tuple[nn.Module, Loss, Change]:
    def loss(output: Tensor, batch: Tensor, weight: float = 1.0) -> Tensor:
        return weight * square(output, batch)

    return Net(), loss, lambda value: setattr(loss, "__defaults__", (value,))


class Slotted:
    """A loss without a namespace."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Tensor, batch: Tensor) -> Tensor:
        return self.weight * square(output, batch)


def slot() -> tuple[nn.Module, Loss, Change]:
    loss = Slotted()
    return Net(), loss, lambda value: setattr(loss, "weight", value)


def namespace() -> tuple[nn.Module, Loss, Change]:
    kept = types.SimpleNamespace(factor=1.0)
    return Net(lambda x: x * kept.factor), square, lambda value: setattr(kept, "factor", value)


def method_of_a_class() -> tuple[nn.Module, Loss, Change]:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.weigh(super().forward(x))

        def weigh(self, x: Tensor) -> Tensor:
            return x

    return Own(), square, lambda value: setattr(Own, "weigh", lambda self, x: x * value)


def hook() -> tuple[nn.Module, Loss, Change]:
    model, handles = Net(), list[Any]()

    def change(value: float) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [model.layer.register_forward_hook(lambda module, args, output: output * value)]

    return model, square, change


def global_number() -> tuple[nn.Module, Loss, Change]:
    def change(value: float) -> None:
        global factor
        factor = value

    change(1.0)
    return Net(lambda x: x * factor), square, change


def global_numpy_scalar() -> tuple[nn.Module, Loss, Change]:
    def change(value: float) -> None:
        global scalar
        scalar = np.float32(value)

    change(1.0)
    return Net(lambda x: x * float(scalar)), square, change


def attribute_of_a_global() -> tuple[nn.Module, Loss, Change]:
    return Net(lambda x: x * options.factor), square, lambda value: setattr(options, "factor", value)


def attribute_of_a_global_class() -> tuple[nn.Module, Loss, Change]:
    return Net(lambda x: x * Options.factor), square, lambda value: setattr(Options, "factor", value)


def enlarged(x: Tensor) -> Tensor:
    return sum(part for part in [x * Options.factor])  # type: ignore[return-value]


def global_of_a_function_that_a_method_calls() -> tuple[nn.Module, Loss, Change]:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.weighed(super().forward(x))

        def weighed(self, x: Tensor) -> Tensor:
            return enlarged(x)

    return Own(), square, lambda value: setattr(Options, "factor", value)


def environment() -> tuple[nn.Module, Loss, Change]:
    def change(value: float) -> None:
        os.environ["WHALE_TEST_FACTOR"] = str(value)

    return Net(lambda x: x * float(os.environ["WHALE_TEST_FACTOR"])), square, change


NEAR = (
    environment,
    class_attribute,
    deque_of_a_class,
    numpy_scalar,
    argument_of_partial,
    default,
    slot,
    namespace,
    method_of_a_class,
    hook,
    global_number,
    global_numpy_scalar,
    attribute_of_a_global,
    attribute_of_a_global_class,
    global_of_a_function_that_a_method_calls,
)


@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.__name__)
def test_what_is_near_is_captured_anew(case: Callable[[], tuple[nn.Module, Loss, Change]]) -> None:
    losses = []
    for trained in (expected, by_engine):
        model, loss, change = case()
        losses.append(trained(model, loss, [lambda: None, partial(change, 2.0), partial(change, 0.5)]))
        if case is not hook:
            change(1.0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def by_engine(model: nn.Module, loss: Loss, changes: list[Callable[[], object]]) -> list[float]:
    engine, losses = made(model, loss), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for change in changes:
            change()
            losses.append(float(engine.step(BATCH)))
    assert any("plain values that the model or its loss reads changed since the capture (" in str(each.message) for each in said)
    return losses


# ---- what is far: found where the model is traced again -----------------------------------------------------------


def of_a_global_deque() -> tuple[nn.Module, Change]:
    queue[0] = 1.0
    return Net(lambda x: x * queue[0]), lambda value: queue.__setitem__(0, value)


def item_of_a_closure_tensor() -> tuple[nn.Module, Change]:
    kept = torch.ones(())
    return Net(lambda x: x * kept.item()), kept.fill_


def context_variable() -> tuple[nn.Module, Change]:
    context.set(1.0)
    return Net(lambda x: x * context.get()), context.set


def other_ops() -> tuple[nn.Module, Change]:
    kept = torch.zeros(())
    return Net(lambda x: x.sin() if kept.item() else x.cos()), kept.fill_


FAR = (
    of_a_global_deque,
    item_of_a_closure_tensor,
    context_variable,
    other_ops,
)


@pytest.mark.parametrize("case", FAR, ids=lambda case: case.__name__)
def test_what_is_far_is_an_error_where_the_model_is_traced_again(case: Callable[[], tuple[nn.Module, Change]]) -> None:
    model, change = case()
    engine = made(model, **ALWAYS)
    engine.step(BATCH)
    engine.step(BATCH)
    before = {name: value.clone() for name, value in engine.tensors.items()}
    change(2.0)
    with pytest.raises(CaptureError) as caught:
        engine.step(BATCH)
    line = case.__code__.co_firstlineno
    assert "(traced again before step 3: %" in caught.value.message and "captured: " in caught.value.message
    if case is not other_ops:
        assert ": 2.0, captured: 1.0)" in caught.value.message
    file, number = str(caught.value.where).rsplit(":", 1)
    assert file.endswith("test_retrace.py") and line < int(number) < line + 10
    assert all(torch.equal(value, engine.tensors[name]) for name, value in before.items()) and engine.step_number == 2
    change(0.0 if case is other_ops else 1.0)
    engine.step(BATCH)  # as it was captured


def test_an_iterator_that_forward_moves_is_found_before_the_second_step() -> None:
    numbers = itertools.count(1.0)
    engine = made(Net(lambda x: x * next(numbers)), **ALWAYS)
    engine.step(BATCH)
    with pytest.raises(CaptureError, match=r"traced again before step 2: %mul[_0-9]*, aten.mul.Tensor: [0-9.]+, captured: [0-9.]+\)"):
        engine.step(BATCH)


def test_a_term_of_the_loss_and_an_output_are_compared_too() -> None:
    kept = torch.ones(())
    engine = made(Net(), lambda output, batch: square(output, batch) * kept.item(), **ALWAYS)
    engine.step(BATCH)
    kept.fill_(2.0)
    with pytest.raises(CaptureError, match=r"step 2: .*2\.0.*, captured: .*1\.0"):
        engine.step(BATCH)

    class Telling(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), kept.item()

    engine = made(Telling(), lambda output, batch: square(output[0], batch), **ALWAYS)
    assert engine.predict(BATCH)[1] == 2.0
    kept.fill_(3.0)
    with pytest.raises(CaptureError, match=r"before predict 2: a constant of the output: 3.0, captured: 2.0"):
        engine.predict(BATCH)


@pytest.mark.parametrize(("when", "steps"), [("always", [*range(2, 11)]), ("off", [])])
def test_when_the_model_is_traced_again(when: str, steps: list[int]) -> None:
    calls, found = itertools.count(), []
    engine = made(Net(lambda x: (x, next(calls))[0]), **{"runtime.retrace": when})
    for step in range(1, 11):
        before = next(calls)
        engine.step(BATCH)
        if next(calls) > before + 1:
            found.append(step)
    assert found == steps


class Clock:
    """Seconds that pass in traces, and where a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_of_trace: float) -> None:
        self._told, self._seconds = array("d", [1000.0, 0.0]), seconds_of_trace  # an array is not restored after a trace
        monkeypatch.setattr(whale.api.modes, "time", types.SimpleNamespace(monotonic=lambda: self._told[0]))

    def traced(self, x: Tensor) -> Tensor:
        self.wait(self._seconds)
        self._told[1] += 1
        return x

    def wait(self, seconds: float) -> None:
        self._told[0] += seconds

    def steps_with_traces(self, calls: Iterator[Callable[[], object]], seconds: float) -> list[int]:
        """Numbers of the calls before which the model was traced, with pauses between them."""
        found = []
        for number, call in enumerate(calls, start=1):
            before = self._told[1]
            call()
            self.wait(seconds)
            found += [number] if self._told[1] > before else []
        return found


def test_traces_take_a_hundredth_of_the_run_at_most_and_none_of_its_first_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds_of_trace=0.69)
    engine = made(Net(clock.traced))
    steps = clock.steps_with_traces((partial(engine.step, BATCH) for _ in range(32)), seconds=10.0)
    assert steps == [9, 16, 23, 30], "0.69 s are a hundredth of 69 s; the next step but one"
    clock = Clock(monkeypatch, seconds_of_trace=0.01)
    engine = made(Net(clock.traced))
    assert clock.steps_with_traces((partial(engine.step, BATCH) for _ in range(9)), seconds=10.0) == [8, 9], "a minute has passed"
    clock = Clock(monkeypatch, seconds_of_trace=6.9)
    engine = made(Net(clock.traced), **{"runtime.retrace_share": 0.1})
    assert clock.steps_with_traces((partial(engine.step, BATCH) for _ in range(10)), seconds=10.0) == [9]


def test_a_mode_that_is_seldom_called_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds_of_trace=0.69)
    engine = made(Net(clock.traced))
    engine.evaluate(BATCH)

    def calls() -> Iterator[Callable[[], object]]:
        for number in range(1, 31):
            yield partial(engine.evaluate if number % 10 == 0 else engine.step, BATCH)

    assert clock.steps_with_traces(calls(), seconds=10.0) == [9, 20, 23, 30]


def test_a_trace_again_without_memory_says_nothing_of_the_model() -> None:
    failing = array("d", [0.0])

    def short_of_memory(x: Tensor) -> Tensor:
        if failing[0] == 1:  # the first attempt of a trace; the next one, for fixed rows, would be another graph
            failing[0] = 2
            raise MemoryError("none left")
        return x

    engine = made(Net(short_of_memory), **ALWAYS)
    engine.step(BATCH)
    failing[0] = 1
    with pytest.warns(UserWarning, match=r"could not be traced again before step 2, .*training goes on.*too little memory \(none left\)"):
        engine.step(BATCH)


@pytest.mark.parametrize("share", [0, 1.5, "much", -0.01])
def test_a_budget_that_is_no_share_is_an_error(share: object) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.retrace_share"):
        made(Net(), **{"runtime.retrace_share": share})


def test_a_model_that_cannot_be_traced_again_is_said_once_and_trained_on() -> None:
    calls = array("d", [0.0])  # not restored after a trace

    def once(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("no more")
        return x

    engine = made(Net(once), **ALWAYS)
    first = float(engine.step(BATCH))
    with pytest.warns(UserWarning, match=r"could not be traced again before step 2, .*training goes on.*no more") as said:
        losses = [float(engine.step(BATCH)) for _ in range(3)]
    assert len(said) == 1 and "test_retrace.py:" in str(said[0].message)
    assert first > losses[0] > losses[-1]


def test_after_a_difference_each_step_is_checked_until_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept = Clock(monkeypatch, seconds_of_trace=0.69), torch.ones(())
    engine = made(Net(lambda x: clock.traced(x) * kept.item()))
    engine.step(BATCH)
    clock.wait(100)
    engine.step(BATCH)
    kept.fill_(2.0)
    for _ in range(3):
        with pytest.raises(CaptureError, match="before step 3"):
            engine.step(BATCH)
    kept.fill_(1.0)
    engine.step(BATCH)
    assert engine.step_number == 3


def of_its_own(x: Tensor, factor: float) -> Tensor:
    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * ctx.factor, None

    found: Tensor = Scaling.apply(x, factor)
    return found


def test_custom_functions_are_compared_by_their_names_and_arguments() -> None:
    kept = torch.ones(())
    engine = made(Net(lambda x: of_its_own(x, kept.item())), **ALWAYS)
    engine.step(BATCH)
    engine.step(BATCH)
    kept.fill_(2.0)
    with pytest.raises(CaptureError, match=r"before step 3: %.*Scaling\(\.\.\., 2.0\), captured: .*Scaling\(\.\.\., 1.0\)\)"):
        engine.step(BATCH)


class Lower(Net):
    """Computes its layer in a lower precision on GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x)


def test_a_model_is_traced_again_for_the_device_that_it_runs_on() -> None:
    engine = made(Lower(), **ALWAYS)
    assert float(engine.step(BATCH)) > float(engine.step(BATCH))


class Busy(Net):
    """Draws, counts and logs in its forward, and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.calls, self.log = np.random.default_rng(0), 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1.0)
        torch.rand(3)
        y: Tensor = super().forward(x) * (random.random() + np.random.rand() + self.rng.random())
        return y


def test_tracing_again_leaves_all_state_as_it_was() -> None:
    def states() -> Iterator[object]:
        yield random.getstate()
        yield np.random.get_state()[1].tolist()
        yield torch.get_rng_state().tolist()
        yield model.rng.bit_generator.state
        yield model.calls, list(model.log)

    model = Busy()
    before = list(states())
    with pytest.warns(UserWarning, match="random numbers of Python and NumPy are drawn"):
        engine = made(model, **ALWAYS)
    assert list(states()) == before
    for _ in range(3):
        random.random(), np.random.rand()  # the script draws, too
        engine.step(BATCH)
    random.setstate(before[0])
    assert list(states())[2:] == before[2:]


def test_many_sizes_are_traced_again_where_their_turn_comes() -> None:
    kept = torch.ones(())
    engine = made(Net(lambda x: x * kept.item()).train(), **ALWAYS)
    sizes = [nn.functional.pad(BATCH, (0, 0, 0, 2 * number)) for number in range(3)]
    for batch in sizes:
        engine.step(batch)
    kept.fill_(2.0)
    with pytest.raises(CaptureError, match="before step 4"):
        engine.step(sizes[2])
