"""`as_strided` gives the same values however its operand lies in memory."""

from __future__ import annotations

import pytest
import torch

from whale.capture.flat.strided import strided
from whale.errors import OpFault


@pytest.mark.parametrize("offset", [0, 2])
def test_an_operand_that_lies_otherwise_is_laid_as_it_was(offset: int) -> None:
    x = torch.arange(24.0).view(4, 6).t().requires_grad_()  # strides (1, 6)
    expected = x.as_strided((3, 4), (6, 1), offset)
    other = x.detach().contiguous().requires_grad_()
    for operand in (x, other):
        torch.testing.assert_close(strided(operand, (1, 6), (3, 4), (6, 1), offset), expected)
    strided(other, (1, 6), (3, 4), (6, 1), offset).square().sum().backward()  # type: ignore[no-untyped-call]
    (found,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(other.grad, found)


def test_what_lies_beside_the_elements_is_not_copied() -> None:
    x = torch.arange(24.0).view(4, 6)[:, :3]
    torch.testing.assert_close(strided(x, (6, 1), (4, 6), (6, 1), 0), torch.arange(24.0).view(4, 6))
    with pytest.raises(OpFault, match="reads elements of its tensor only"):
        strided(x.contiguous(), (6, 1), (4, 6), (6, 1), 0)
