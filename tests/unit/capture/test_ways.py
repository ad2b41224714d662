"""What a model's code asks of a tensor: checks are kept, of two ways the one that can be captured is taken and held to in every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.examples import slow
from tests.unit.capture import running
from whale.axes import discover
from whale.capture import CapturedProgram, capture
from whale.errors import CaptureError, OpFault
from whale.ir.graph import ModelGraph, Op

Step = Callable[[Tensor, Tensor], Tensor]


class Asking(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x, self.layer(x))


def captured(step: Step) -> tuple[ModelGraph, CapturedProgram]:
    return capture(Asking(step), {"x": torch.rand(6, 4)}, lambda output, _: output)


def checks(graph: ModelGraph) -> list[Op]:
    return [op for op in graph.ops if "checks" in op.tags]


def loss(program: CapturedProgram, x: Tensor) -> Tensor:
    result: Tensor = program.module()(*program.values({"x": x}).values())[0]
    return result


def refusing(x: Tensor, h: Tensor) -> Tensor:
    if x.max() >= 100:
        raise ValueError(f"too large: {x}")
    return h.sum()


def asserting(x: Tensor, h: Tensor) -> Tensor:
    for _ in range(3):
        h = torch.sin(h)
        assert not h.isnan().any(), "not a number"
    return h.sum()


def likely(x: Tensor, h: Tensor) -> Tensor:
    made = torch.distributions.Normal(h, h.exp(), validate_args=True)  # torch.compile turns it off
    return -made.log_prob(x).sum()


def by_keywords(x: Tensor, h: Tensor) -> Tensor:
    if torch.is_nonzero(input=(x >= 100).any()):
        raise ValueError("too large")
    return torch.sub(other=torch.full(size=(4,), fill_value=2.0), input=h).sum()


def of_a_number(x: Tensor, h: Tensor) -> Tensor:
    if (largest := x.max().item()) > 100:
        raise ValueError(f"too large: {largest}")
    return h.sum()


def of_a_number_of_rows(x: Tensor, h: Tensor) -> Tensor:
    if 2 * x.long().sum().item() + 1 > 200 * x.shape[0]:
        raise ValueError("too large")
    return h.sum()


def of_two_numbers(x: Tensor, h: Tensor) -> Tensor:
    smallest, largest = x.min().item(), x.max().item()
    if not -1 < smallest <= largest < 100:
        raise ValueError("out of range")
    return h.sum()


def of_torch(x: Tensor, h: Tensor) -> Tensor:
    torch._check(x.long().max().item() < 100)
    return h.sum()


def inside_torch(x: Tensor, h: Tensor) -> Tensor:
    return nn.functional.gaussian_nll_loss(h, x, 100 - x)


def test_arguments_by_keyword_stay_so() -> None:
    graph, program = captured(by_keywords)
    assert len(checks(graph)) == 1
    x = torch.rand(6, 4)
    torch.testing.assert_close(loss(program, x), by_keywords(x, nn.functional.linear(x, *program.tensors.values())))


@pytest.mark.parametrize(
    ("step", "number", "bad", "text"),
    [
        (refusing, 1, 200.0, "the model refuses this batch \\(ValueError: too large"),
        (asserting, 3, float("nan"), "AssertionError: not a number"),
        slow(likely, 3, float("nan"), "ValueError: Expected parameter loc"),
        slow(of_a_number, 1, 200.0, "the model refuses this batch \\(ValueError: too large: a number\\)"),
        slow(running.asserting, 1, 200.0, "AssertionError: too large"),
        slow(of_a_number_of_rows, 1, 200.0, "ValueError: too large"),
        (of_two_numbers, 3, 200.0, "ValueError: out of range"),
        (inside_torch, 1, 200.0, r"ValueError: var has negative entry/entries"),
        (of_torch, 1, 200.0, "RuntimeError: a check of the model's fails"),
    ],
)
def test_a_check_is_one_in_every_step(step: Step, number: int, bad: float, text: str) -> None:
    graph, program = captured(step)
    assert graph.dynamic
    assert len(checks(graph)) == number
    assert not any("decides" in op.tags for op in checks(graph))
    assert loss(program, torch.rand(3, 4)).isfinite()
    with pytest.raises(OpFault, match=text):
        loss(program, torch.full((3, 4), bad))


def choosing(condition: Callable[[Tensor], Tensor]) -> Step:
    def step(x: Tensor, h: Tensor) -> Tensor:
        if condition(x):
            return h[: int(x.sum())].sum() if int(x.max()) > 3 else h.mean()
        return h.sum()

    return step


def test_the_way_that_can_be_captured_is_held_to() -> None:
    graph, program = captured(choosing(lambda x: (x > 3).any()))
    (check,) = checks(graph)
    assert "decides" in check.tags
    assert check.where is not None
    torch.testing.assert_close(loss(program, x := torch.rand(3, 4)), program.tensors["layer.weight"].matmul(x.T).sum() + 3 * bias(program))
    with pytest.raises(OpFault, match="a condition on a tensor is True in this batch, but the model was captured for False"):
        loss(program, torch.full((3, 4), 5.0))


def bias(program: CapturedProgram) -> Tensor:
    return program.tensors["layer.bias"].sum()


@pytest.mark.parametrize(
    ("condition", "mixes"),
    [
        (lambda x: (x > 3).any(), ""),
        (lambda x: x.amax(0).max() > 3, ""),
        (lambda x: not (x < 3).all(), ""),
        (lambda x: (x.flatten() > 1).any().item(), ""),
        (lambda x: (x.amax(0) > 3).all(), "max"),
        (lambda x: x.sum() > 3, "sum"),
        (lambda x: x.sum().bool(), "sum"),
        slow(lambda x: (x.cumsum(0) > 3).any(), "cumsum"),
        slow(lambda x: (x - x.mean() > 1).any(), "mean"),
    ],
)
def test_what_parts_of_a_batch_cannot_tell_mixes_samples(condition: Callable[[Tensor], Tensor], mixes: str) -> None:
    graph, _ = captured(choosing(condition))
    found = [str(mixing) for mixing in discover(graph).mixing]
    assert [mixes in text for text in found] == ([True] if mixes else [])


def test_of_two_ways_that_go_on_none_is_taken() -> None:
    with pytest.raises(CaptureError, match="depends on values in tensors \\(a condition decides what is computed\\)"):
        captured(lambda x, h: h.sum() if x.sum() > 0 else h.mean())


@pytest.mark.parametrize("read", [int, float])
def test_a_number_that_python_makes_is_refused_with_its_line(read: Callable[[Tensor], float]) -> None:
    with pytest.raises(CaptureError, match=r"it uses a number that is read from a tensor\)\n  at .*test_ways.py:\d+\n  hint: .* x.item"):
        captured(lambda x, h: h.sum() if read(x.max()) > 5 else h.mean())


def test_two_masks_that_must_select_as_many_are_told_to_be_one() -> None:
    with pytest.raises(
        CaptureError, match=r"two sizes that depend on them must be equal\)\n  at .*test_ways.py:\d+\n  hint: select with one mask"
    ):
        captured(lambda x, h: torch.nn.functional.mse_loss(h[x[:, 0] > 0], x[x[:, 0] > 0]))


def test_a_truth_that_is_only_computed_with_decides_nothing() -> None:
    graph, program = captured(lambda x, h: (h * (x > 0.5).any().item()).sum())
    assert not checks(graph)
    assert loss(program, torch.zeros(2, 4)) == 0
