"""What forward hands on to its next call in plain attributes is found with its line, and nothing else is."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.capture import capture
from whale.capture.exporting import near_values, side_effects

BATCH = torch.randn(8, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.start()

    def start(self) -> None:
        pass


class Smoothed(Base):
    def start(self) -> None:
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = 0.9 * self.state + x[0].detach()
        return self.layer(x) + self.state


class Counted(Base):
    def start(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1.0 if self.calls < 3 else 0.5)


class Recurrent(Base):
    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(4)
        self.hidden = (self.layer(x).sum(0) + self.hidden).detach()
        return self.layer(x) + self.hidden


class OnceDone(Base):
    def start(self) -> None:
        self.is_done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_done:
            self.is_done = True
            x = x - 1
        return self.layer(x)


class ThroughAMethod(Base):
    def start(self) -> None:
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale
        self.decay()
        return x

    def decay(self) -> None:
        self.scale = 0.5


class Outer(Base):
    def start(self) -> None:
        self.inner = Counted()
        self.inner.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.inner.times += 1
        return self.layer(x)


class Longest(Base):
    """Keeps what may be state for all that anybody can tell."""

    def start(self) -> None:
        self.longest = 1

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
        return self.layer(x)


FOUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a tensor": (Smoothed, "Smoothed.state at tests/unit/capture/test_attribute_access.py:36"),
    "a counter": (Counted, "Counted.calls at tests/unit/capture/test_attribute_access.py:45"),
    "what was nothing": (Recurrent, "Recurrent.hidden at tests/unit/capture/test_attribute_access.py:55"),
    "a flag": (OnceDone, "OnceDone.is_done at tests/unit/capture/test_attribute_access.py:65"),
    "in a method": (ThroughAMethod, "ThroughAMethod.scale at tests/unit/capture/test_attribute_access.py:80"),
    "set from outside": (Outer, "Counted.times at tests/unit/capture/test_attribute_access.py:89"),
    "what is replaced where it is more": (Longest, "Longest.longest at tests/unit/capture/test_attribute_access.py:101"),
}


@pytest.mark.parametrize("name", FOUND)
def test_state_is_found(name: str) -> None:
    make, said = FOUND[name]
    model = make()
    before = dict(vars(model))
    graph, program = capture(model, BATCH, lambda output, batch: output.mean())
    assert program.warnings == (side_effects.warning_of((said,)),)
    assert any(f"starts from the values at capture ({said})" in warning for warning in graph.warnings)
    assert vars(model) == before, "the model is left as it was"


class Harmless(Base):
    """Notes for others, what is kept for the same call, and what is made once."""

    def start(self) -> None:
        self.table: Tensor | None = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        self.length = x.shape[1]
        self._prepare()
        self.last = self.layer(x) + self.table * self.length
        return self.last + self.mask

    def _prepare(self) -> None:
        self.mask = torch.ones(self.length)


def test_what_no_call_reads_of_another_is_not() -> None:
    model = Harmless()
    _, program = capture(model, BATCH, lambda output, batch: output.mean())
    assert program.warnings == ()
    assert not hasattr(model, "last") and not hasattr(model, "mask") and model.table is None
    copy.deepcopy(model)


def _halved_once(model: nn.Module) -> None:
    """Registers a hook at the first call, as libraries do around `forward`, and notes it on the module."""
    if not getattr(model, "has_hooks", False):
        model.layer.register_forward_hook(lambda module, args, output: output * 0.5)
        model.has_hooks = True


class Hooked(Base):
    def forward(self, x: Tensor) -> Tensor:
        _halved_once(self)
        return self.layer(x)


def test_a_note_of_hooks_that_forward_registers_is_no_state_and_each_trace_registers_them_once() -> None:
    model = Hooked()
    captured = [capture(model, BATCH, lambda output, batch: output.mean()) for _ in range(2)]
    assert all(program.warnings == () for _, program in captured)
    assert captured[0][0].ops == captured[1][0].ops
    assert not model.layer._forward_hooks


class Phase(enum.Enum):
    FIRST = 1
    LAST = 2


class Aside:
    """What the model holds and does not read."""

    def __init__(self) -> None:
        self.num_steps = 0


class InAPhase(Base):
    def start(self) -> None:
        self.phase, self.aside = Phase.FIRST, Aside()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.phase.value


def test_nothing_is_left_on_classes_that_an_enum_is_near_and_reads_are_those_of_the_call() -> None:
    model = InAPhase()
    engine = whale.parallelize(model, loss=lambda output, batch: output.mean(), optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)
    assert not [name for kind in (Phase, Aside, InAPhase) for name, member in vars(kind).items() if isinstance(member, near_values.Noted)]
    for number in range(2):
        model.aside.num_steps += 1
        engine.evaluate(BATCH)
        engine.step(BATCH)
        assert len(engine.modes._modes["train"].others) == len(engine.modes._modes["eval"].others) == 0, number
    model.phase = Phase.LAST
    with pytest.warns(UserWarning, match=r"plain values .* changed .*InAPhase.phase"):
        engine.step(BATCH)


def test_a_user_of_parallelize_is_warned() -> None:
    with pytest.warns(UserWarning, match=r"each step starts from the values at capture \(Counted.calls at .*register_buffer") as caught:
        whale.parallelize(Counted(), loss=lambda output, batch: output.mean(), optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)
    assert [each.filename for each in caught if "only during capture" in str(each.message)] == [__file__]
