"""What a model reads of tensors that are made from plain numbers alone is known in a capture; all else is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.examples import slow
from whale.capture import capture
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph


class Reading(nn.Module):
    """Goes one of two ways, as some function of its input says."""

    def __init__(self, read: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sin(x) if self.read(x) else torch.cos(x)).sum()


def captured(model: nn.Module) -> ModelGraph:
    return capture(model, {"x": torch.randn(6, 4)}, lambda output, _: output)[0]


def mask() -> Tensor:
    return torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)


def written(value: float | Tensor) -> Tensor:
    table = torch.zeros(3, 4)
    table.view(-1)[:4] = value
    return table


@pytest.mark.parametrize(
    ("read", "way"),
    [
        (lambda x: bool((mask() == nn.Transformer.generate_square_subsequent_mask(4)).all()), "sin"),
        (lambda x: mask()[0, 0] < 0, "cos"),
        (lambda x: written(2.0).sum().item() == 8, "sin"),
        (lambda x: int(torch.arange(x.shape[1]).max()) == 7, "cos"),
        (lambda x: bool(torch.tensor([0.0, 1.0]).chunk(2)[1] > 0.5), "sin"),
    ],
)
def test_what_is_made_from_plain_numbers_is_known(read: Callable[[Tensor], bool], way: str) -> None:
    graph = captured(Reading(read))
    assert graph.dynamic
    assert {op.operator for op in graph.ops} & {"sin", "cos"} == {way}


@pytest.mark.parametrize(
    "read",
    [
        slow(lambda x: x.sum() > 0),
        lambda x: written(x[0]).sum() > 0,
        slow(lambda x: torch.rand(()) > 0.5),
    ],
)
def test_what_inputs_and_chance_decide_is_not(read: Callable[[Tensor], bool]) -> None:
    with pytest.raises(CaptureError, match="control flow or a size depends on values"):
        captured(Reading(read))


def test_what_the_number_of_rows_decides_is_known_for_that_number_alone() -> None:
    assert not captured(Reading(lambda x: torch.arange(x.shape[0]).sum() > 7)).dynamic  # type: ignore[return-value]


@pytest.mark.slow
def test_a_transformer_given_its_mask_is_captured() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(3)).mean()

    graph, _ = capture(Encoder(), {"x": torch.randn(6, 3, 4)}, lambda output, _: output)
    assert graph.dynamic
