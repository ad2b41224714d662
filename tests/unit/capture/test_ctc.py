"""The CTC loss is captured as a loss of each row, whatever its lengths and its reduction are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import slow
from tests.unit.capture.running import assert_same
from whale.capture import capture

FRAMES, LETTERS = 6, 4


class Speech(nn.Module):
    def __init__(self, reduction: str, in_one: bool) -> None:
        super().__init__()
        self.out, self.reduction, self.in_one = nn.Linear(3, LETTERS), reduction, in_one

    def forward(self, sound: Tensor, said: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(sound).log_softmax(-1).transpose(0, 1)
        frames = torch.full_like(lengths, FRAMES)
        targets = said.masked_select(torch.arange(2) < lengths[:, None]) if self.in_one else said
        loss = F.ctc_loss(scores, targets, frames, lengths, reduction=self.reduction, zero_infinity=True)
        return loss.square().sum() if self.reduction == "none" else loss


def batch(rows: int) -> dict[str, Tensor]:
    said = torch.randint(1, LETTERS, (rows, 2))
    return {"sound": torch.randn(rows, FRAMES, 3), "said": said, "lengths": torch.randint(1, 3, (rows,))}


def own(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.mark.parametrize(
    ("reduction", "in_one"),
    [("mean", False), ("none", True), slow("sum", False), slow("mean", True), slow("sum", True), slow("none", False)],
)
def test_the_loss_is_that_of_the_rows(reduction: str, in_one: bool) -> None:
    torch.manual_seed(0)
    model = Speech(reduction, in_one)
    graph, program = capture(model, batch(4), own)
    assert graph.dynamic
    assert not graph.warnings
    for rows in (2, 5):
        assert_same(model, graph, program, batch(rows), lambda called, given: called(**given))
