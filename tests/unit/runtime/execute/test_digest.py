"""Digests tell other rows and another order, whatever the type, the size and the memory format."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.execute.batch import BITS, SAMPLE, combined, digests


@pytest.mark.parametrize("shape", [(8,), (64, 3), (128, 28, 28), (SAMPLE * 2 + 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_another_order_of_the_rows_is_another_digest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = (
        (torch.rand(shape, generator=generator) * 100).to(dtype)
        if dtype is not torch.bool
        else torch.rand(shape, generator=generator) > 0.5
    )
    order = torch.randperm(shape[0], generator=generator)
    assert digests({"x": batch}) == digests({"x": batch.clone()})
    assert digests({"x": batch}) != digests({"x": batch[order]})


def test_any_tensor_has_a_digest() -> None:
    image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    leaves = {
        "image": image,
        "number": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
        "wide": torch.ones(1).expand(5),
        "every": image[:, :, ::2],
    }
    found = digests(leaves)
    assert found == digests({name: leaf.clone() for name, leaf in leaves.items()}) and 0 <= combined(found) < 1 << BITS
    assert combined(found) != combined({**found, "number": found["number"] ^ 1})
