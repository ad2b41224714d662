"""The law of mixing: where pieces of a batch do not add up to its loss and gradients, something is said; never the other way in silence."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from tests.examples import at_most, slow
from tests.mixing import LOSSES, MIDDLES, SELECTING, Layers, make_batch, value_of
from tests.unit.capture.test_random_models import pieces_loss
from whale.axes import discover
from whale.capture import capture
from whale.capture.program import CapturedProgram
from whale.ir.graph import ModelGraph

torch.set_num_threads(1)

BAGS = ("bags", "weighted bags", "longest word of a bag")
ALONE = ("nothing", "softmax of columns", "own row", "repeated rows", "halves", *BAGS, *SELECTING)
APART = (*(name for name in MIDDLES if name not in ALONE),)
EXACT_LOSSES = tuple(LOSSES)[: tuple(LOSSES).index("root")]


@cache
def captured(middle: str, loss: str) -> tuple[Layers, ModelGraph, CapturedProgram, tuple[str, ...]]:
    model = Layers(middle)
    graph, program = capture(model, make_batch(6), LOSSES[loss])
    return model, graph, program, tuple(map(str, discover(graph).mixing))


def difference(middle: str, loss: str, sizes: list[int], seed: int) -> float:
    """How far loss and gradients of the pieces are from those of the batch."""
    model, graph, program, _ = captured(middle, loss)
    batch = make_batch(sum(sizes), seed)
    parameters = list(model.parameters())
    found = pieces_loss(graph, program, batch, sizes)
    expected = value_of(LOSSES[loss](model(batch["x"]), batch))
    gradients = [torch.autograd.grad(value, parameters, allow_unused=True) for value in (found, expected)]
    errors = [(found - expected).abs()] + [
        ((0 if a is None else a) - (0 if b is None else b)).abs().max() for a, b in zip(*gradients, strict=True) if a is not b
    ]
    return float(torch.stack([error.detach() for error in errors]).max())


def check(middle: str, loss: str, sizes: list[int], seed: int) -> None:
    _, graph, _, mixing = captured(middle, loss)
    if graph.dynamic and not mixing:  # a capture of so many rows is made anew for each number, and never in pieces of it
        assert difference(middle, loss, sizes, seed) < 1e-10, "silent and different"


@pytest.mark.slow
@at_most(60)
@given(
    st.sampled_from(sorted(MIDDLES)),
    st.sampled_from(sorted(LOSSES)),
    st.lists(st.integers(2, 5), min_size=2, max_size=3),
    st.integers(0, 99),
)
def test_nothing_differs_in_silence(middle: str, loss: str, sizes: list[int], seed: int) -> None:
    note(f"{captured(middle, loss)[1]}")
    check(middle, loss, sizes, seed)


@pytest.mark.parametrize("middle", ["places", *(slow(name) for name in APART if name != "places")])
def test_what_mixes_in_the_model_is_found(middle: str) -> None:
    assert captured(middle, "mean")[3]


@pytest.mark.parametrize("loss", ["two steps, sums", *(slow(name) for name in LOSSES if name != "two steps, sums")])
def test_what_mixes_in_the_loss_is_found_and_nothing_else(loss: str) -> None:
    mixing = captured("nothing", loss)[3]
    assert bool(mixing) == (loss not in EXACT_LOSSES), mixing
    check("nothing", loss, [4, 2, 3], 1)


@pytest.mark.parametrize("middle", ["own row", *BAGS, *SELECTING, slow("softmax of columns")])
def test_what_does_not_mix_is_not_said_to(middle: str) -> None:
    assert captured(middle, "mean")[3] == ()
    check(middle, "mean", [4, 2, 3], 1)
