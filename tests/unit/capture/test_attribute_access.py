"""What forward hands on to its next call in plain attributes is found with its line, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.capture import capture
from whale.capture.exporting import side_effects

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
    "a tensor": (Smoothed, "Smoothed.state at tests/unit/capture/test_attribute_access.py:35"),
    "a counter": (Counted, "Counted.calls at tests/unit/capture/test_attribute_access.py:44"),
    "what was nothing": (Recurrent, "Recurrent.hidden at tests/unit/capture/test_attribute_access.py:54"),
    "a flag": (OnceDone, "OnceDone.is_done at tests/unit/capture/test_attribute_access.py:64"),
    "in a method": (ThroughAMethod, "ThroughAMethod.scale at tests/unit/capture/test_attribute_access.py:79"),
    "set from outside": (Outer, "Counted.times at tests/unit/capture/test_attribute_access.py:88"),
    "what is replaced where it is more": (Longest, "Longest.longest at tests/unit/capture/test_attribute_access.py:100"),
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
        model.layer.register_forward_hook(lambda module, args, output: output * 0.5)  # type: ignore[union-attr,operator]
        model.has_hooks = True  # type: ignore[assignment]


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


def test_a_user_of_parallelize_is_warned() -> None:
    with pytest.warns(UserWarning, match=r"each step starts from the values at capture \(Counted.calls at .*register_buffer") as caught:
        whale.parallelize(Counted(), loss=lambda output, batch: output.mean(), optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH)
    assert [each.filename for each in caught if "only during capture" in str(each.message)] == [__file__]
