"""One graph for devices of all half-precision types, whichever of them captured it; each program in its own type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whale.capture import capture
from whale.capture.program import CapturedProgram
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.ir.precision import HALF, Precision
from whale.ir.profile import model_fingerprint

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(self.norm(x))))
        return result


def captured_in(dtype: str, model: nn.Module, read_as: Any = None) -> tuple[ModelGraph, CapturedProgram]:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().square().mean()

    precision = Precision(dtype, by_device=True)
    return capture(model, {"x": torch.zeros(4, 4)}, loss, device="cpu", precision=precision, read_as=read_as)


def test_the_graph_is_one_and_each_program_has_its_own_type() -> None:
    found = {dtype: captured_in(dtype, Model()) for dtype in TYPES}
    (one, _), (other, _) = found.values()
    assert one == other and one.half_by_device and "half types by device" in str(one)
    assert {spec.dtype for op in one.ops for spec in op.outputs} == {"float32", HALF} and set(one.read_as.values()) == {HALF}
    for dtype, (_, program) in found.items():
        made = {value.dtype for node in program.graph.nodes if isinstance(value := node.meta.get("val"), Tensor)}
        assert made == {torch.float32, TYPES[dtype]}
    plain = capture(Model(), {"x": torch.zeros(4, 4)}, lambda output, batch: output.float().square().mean(), device="cpu")[0]
    assert not plain.half_by_device and plain.fingerprint != one.fingerprint


def test_a_later_capture_reads_weights_as_the_first() -> None:
    model = Model()
    for dtype in TYPES:
        graph, _ = captured_in(dtype, model)
        assert captured_in(dtype, model, read_as=graph.read_as)[0] == graph


@pytest.mark.parametrize("limit", ["min", "max", "eps", "tiny"])
def test_limits_of_the_types_are_one_number(limit: str) -> None:
    def masked(x: Tensor) -> Tensor:
        return torch.where(x < 0, x * getattr(torch.finfo(x.dtype), limit), x)

    graphs = [captured_in(dtype, Model(masked))[0] for dtype in TYPES]
    assert graphs[0] != graphs[1] and graphs[0].fingerprint == graphs[1].fingerprint
    assert model_fingerprint(graphs[0]) == model_fingerprint(graphs[1])  # of plans that are written, and of measured times
    other = captured_in("float16", Model(lambda x: torch.where(x < 0, x * 3.0, x)))[0]
    assert other.fingerprint != graphs[0].fingerprint and model_fingerprint(other) != model_fingerprint(graphs[0])


def test_numbers_that_are_no_limits_stay_apart() -> None:
    def scaled(x: Tensor, *, by: float, reads: bool) -> Tensor:
        return x * by + (torch.finfo(x.dtype).tiny if reads else 0.0)

    for reads in (False, True):
        one, other = (captured_in("float16", Model(partial(scaled, by=by, reads=reads)))[0] for by in (1 / 128, 1 / 1024))
        assert one.fingerprint != other.fingerprint and model_fingerprint(one) != model_fingerprint(other)


def test_a_number_that_ends_as_a_limit_is_none() -> None:
    one, other = (captured_in("float16", Model(partial(torch.mul, other=factor)))[0] for factor in (10.0009765625, 10.0078125))
    assert one.fingerprint != other.fingerprint and model_fingerprint(one) != model_fingerprint(other)


@pytest.mark.parametrize(("own", "stated"), [("bfloat16", torch.float16), ("float16", torch.bfloat16)])
def test_a_type_that_the_model_names_is_refused_with_its_line(own: str, stated: torch.dtype) -> None:
    model = Model(lambda x: x.to(stated).relu().float())
    with pytest.raises(
        CaptureError, match=rf"each device choose .* {own} here, but %to\w* .* is {TYPES_BY_VALUE[stated]} everywhere"
    ) as caught:
        captured_in(own, model)
    assert caught.value.where is not None and "precision.dtype to bf16 or fp16" in str(caught.value.hint)


def test_weights_in_half_precision_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"but parameter first.weight is bfloat16"):
        captured_in("float16", Model().bfloat16())


TYPES_BY_VALUE = {value: name for name, value in TYPES.items()}
