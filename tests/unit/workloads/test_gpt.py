"""The GPT of published runs: its size, its types, and that deep ones are what their own capture says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest

import whale
from tests.examples import slow
from tests.unit.planning import decoders
from whale.errors import ConfigError
from whale.ir.graph import ModelGraph
from whale.workloads import GPT, decoder

SMALL = {"hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 32}


def num_parameters(graph: ModelGraph) -> int:
    return sum(parameter.spec.num_elements for parameter in graph.parameters)


@pytest.mark.parametrize(("layers", "hidden", "heads", "billions"), [(80, 12288, 96, 145.6), slow(128, 25600, 160, 1008.0)])
def test_it_has_the_published_number_of_parameters(layers: int, hidden: int, heads: int, billions: float) -> None:
    graph = GPT(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=51200, dtype="bfloat16").graph()
    published = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert num_parameters(graph) - 2 * hidden == round(published)  # the last normalisation is not in the formula
    assert round(published / 1e9, 1) == billions


@pytest.mark.slow
def test_its_work_is_the_published_one() -> None:
    layers, hidden, sequence, vocabulary = 24, 2304, 2048, 51200
    graph = GPT(layers=layers, hidden=hidden, heads=24, sequence=sequence, vocabulary=vocabulary, attention="explicit").graph()
    work = sum(op.forward_flops + op.backward_flops for op in graph.ops) / graph.num_rows
    published = 72 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert math.isclose(work, published, rel_tol=0.01)  # beside the products there are sums and normalisations


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "explicit"])
def test_a_deep_one_is_what_its_own_capture_says(form: decoder.Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    made = GPT(layers=3, attention=form, dropout=0.1, **SMALL).graph()
    monkeypatch.setattr(decoder, "NUM_CAPTURED", 3)
    assert made == GPT(layers=3, attention=form, dropout=0.1, **SMALL).graph()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["explicit", "fused"])
def test_what_is_kept_as_text_is_what_is_captured(form: decoder.Attention, golden: Callable[[str, str], None]) -> None:
    golden(decoders.kept(form), decoders.as_text(decoders.captured(form)))


@cache
def in_half_precision(tied: bool) -> ModelGraph:
    return GPT(layers=1, dtype="bfloat16", tied=tied, **SMALL).graph()


def test_the_loss_of_half_precision_is_computed_in_float32() -> None:
    graph = in_half_precision(True)
    assert {parameter.spec.dtype for parameter in graph.parameters} == {"bfloat16"}
    assert graph.by_name[graph.loss[0].sum].outputs[0].dtype == "float32"


def test_tying_saves_the_output_layer() -> None:
    assert num_parameters(in_half_precision(False)) - num_parameters(in_half_precision(True)) == 32 * 16


def test_it_is_at_hand_without_an_import_of_its_own() -> None:
    sizes: dict[str, int] = {"layers": 3, "hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 32}
    assert whale.workloads.gpt(**sizes, dtype="bfloat16") == GPT(**sizes, dtype="bfloat16").graph()
    with pytest.raises(AttributeError, match="'bert'"):
        whale.workloads.bert  # noqa: B018


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        GPT(layers=0, hidden=15, heads=2, sequence=8, vocabulary=32, dtype="int8", dropout=2.0, tied="maybe")
    for text in ("layers of the gpt", "tied of the gpt: 'maybe' is not true or false", "'int8'", "dropout of the gpt"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="of the gpt does not divide"):
        GPT(layers=1, hidden=15, heads=2, sequence=8, vocabulary=32)
