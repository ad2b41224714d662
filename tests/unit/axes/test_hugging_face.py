"""Axes of unmodified Hugging Face models, captured: the batch from inputs to loss, heads, columns, vocabularies, channels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests import hf_models
from tests.hf_models import BUILDERS, LENGTH, VOCABULARY
from whale.axes import Axes, Axis, batch_axes, discover
from whale.axes.operators import operator_of
from whale.axes.values import Concatenation
from whale.ir.graph import ModelGraph

torch.set_num_threads(1)
pytestmark = pytest.mark.slow


@cache
def captured(family: str) -> tuple[ModelGraph, Axes]:
    *_, graph, _ = hf_models.captured(family)
    return graph, discover(graph)


def holders(axes: Axes, parameter: str, dim: int) -> list[Axis]:
    """The axes of one dimension of a parameter."""
    return [axes.by_name[factor] for factor in axes.parameters[parameter][dim] if not isinstance(factor, Concatenation)]


def free(axes: Axes, parameter: str, dim: int) -> list[int]:
    """Sizes of the axes of one dimension that may be cut."""
    return [axis.size for axis in holders(axes, parameter, dim) if axis.may_be_cut]


@pytest.mark.parametrize("family", BUILDERS)
def test_the_batch_is_found_from_the_inputs_to_the_loss(family: str) -> None:
    graph, axes = captured(family)
    found = batch_axes(graph, axes)
    for op in graph.ops:
        if len(op.outputs) == 1:
            assert (op.name in found) == op.outputs[0].has_rows, str(op)
        if op.name in found:
            place, spec = found[op.name], op.outputs[0]
            assert spec.shape[place.dim] == place.outer * graph.num_rows * place.inner
    training = {graph.by_name[mixing.op].target for mixing in axes.mixing}
    assert training == ({"aten.batch_norm.default"} if family == "resnet" else set())


def test_every_operator_of_the_models_has_an_entry() -> None:
    calls = [
        op for family in BUILDERS for op in captured(family)[0].ops if op.kind == "call" and op.target.startswith("aten.") and op.outputs
    ]
    assert sorted({op.target for op in calls if operator_of(op).axes is None}) == []


@pytest.mark.parametrize("family", BUILDERS)
def test_every_op_has_a_rule_that_fits(family: str) -> None:
    graph, axes = captured(family)
    for op in graph.ops:
        for role in axes.ops[op.name].roles.values() if op.name in axes.ops else ():
            assert "rule" not in role.reason and "factors" not in role.reason, str(op)


def test_gpt2(golden: Callable[[str, str], None]) -> None:
    graph, axes = captured("gpt2")
    for block in range(2):
        name = f"transformer.h.{block}"
        parts, heads, size = holders(axes, f"{name}.attn.c_attn.weight", 1)
        assert [parts.size, heads.size, size.size] == [3, 4, 8]
        assert heads.name == f"{name}.attn.heads" and heads.may_be_cut
        assert not parts.may_be_cut and not size.may_be_cut
        assert holders(axes, f"{name}.attn.c_proj.weight", 0) == [heads, size]
        assert holders(axes, f"{name}.mlp.c_fc.weight", 1) == holders(axes, f"{name}.mlp.c_proj.weight", 0)
        assert free(axes, f"{name}.mlp.c_fc.weight", 1) == [128]
    assert free(axes, "transformer.wte.weight", 0) == [VOCABULARY]
    (entropy,) = (axes.ops[op.name] for op in graph.ops if op.target == "aten.cross_entropy_loss.default")
    assert entropy.roles["transformer.wte.vocabulary"].combine == "softmax"
    golden("axes/gpt2.txt", re.sub(r"(?<=  whole: ).*", in_order, re.sub(r" \(%[^)]*\)", "", str(axes))))


def in_order(reasons: re.Match[str]) -> str:
    """Sorted: versions of the library compose masks in different orders."""
    return "; ".join(sorted(reasons.group().split("; ")))


def test_bert() -> None:
    _, axes = captured("bert")
    name = "bert.encoder.layer.1"
    heads, _ = holders(axes, f"{name}.attention.self.query.weight", 0)
    assert heads.size == 4 and heads.may_be_cut
    assert holders(axes, f"{name}.attention.output.dense.weight", 1)[0] == heads
    assert free(axes, f"{name}.intermediate.dense.weight", 0) == [64]
    assert free(axes, "cls.predictions.bias", 0) == free(axes, "bert.embeddings.word_embeddings.weight", 0) == [VOCABULARY]


def test_t5() -> None:
    _, axes = captured("t5")
    heads = {holders(axes, f"encoder.block.{block}.layer.0.SelfAttention.q.weight", 0)[0] for block in range(2)}
    assert [axis.size for axis in heads] == [4], "the relative bias ties all the encoder's heads"
    assert heads.pop().may_be_cut
    assert free(axes, "decoder.block.0.layer.2.DenseReluDense.wi.weight", 0) == [64]
    assert free(axes, "shared.weight", 0) == [VOCABULARY]


def test_vit() -> None:
    _, axes = captured("vit")
    heads = next(axis for axis in axes.axes if axis.name.endswith("layers.0.attention.heads"))
    assert heads.size == 4 and heads.may_be_cut
    classes = axes.by_name["classes"]
    assert classes.size == 7 and classes.may_be_cut


def test_resnet_channels() -> None:
    _, axes = captured("resnet")
    channels = [axis for axis in axes.axes if "channels" in axis.name]
    assert len(channels) >= 6
    assert all(axis.may_be_cut for axis in channels)
    assert axes.by_name["batch"].may_be_cut, "batch normalisation adds up the sums of its parts"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_grouped_query_attention(family: str) -> None:
    _, axes = captured(family)
    name = "model.layers.0.self_attn"
    heads, group = holders(axes, f"{name}.q_proj.weight", 0)[:2]
    assert [heads.size, group.size] == [2, 2]
    assert heads.may_be_cut and group.may_be_cut
    assert holders(axes, f"{name}.k_proj.weight", 0)[0] == holders(axes, f"{name}.v_proj.weight", 0)[0] == heads
    assert holders(axes, f"{name}.o_proj.weight", 1)[:2] == [heads, group]


def test_llama() -> None:
    _, axes = captured("llama")
    assert free(axes, "model.layers.1.mlp.gate_proj.weight", 0) == free(axes, "model.layers.1.mlp.down_proj.weight", 1) == [48]
    assert free(axes, "model.embed_tokens.weight", 0) == free(axes, "lm_head.weight", 0) == [VOCABULARY]
    assert holders(axes, "model.embed_tokens.weight", 0) != holders(axes, "lm_head.weight", 0), "not tied"
    assert free(axes, "model.embed_tokens.weight", 1) == [32], "the mean of its norm is over a cut axis"


def test_mixtral_experts() -> None:
    _, axes = captured("mixtral")
    name = "model.layers.0.mlp.experts"
    assert free(axes, f"{name}.gate_up_proj", 0) == free(axes, f"{name}.down_proj", 0) == [4]
    parts, columns = holders(axes, f"{name}.gate_up_proj", 1)
    assert parts.size == 2 and not parts.may_be_cut
    assert holders(axes, f"{name}.down_proj", 2) == [columns] and columns.may_be_cut


def test_sequence_is_whole_where_a_loss_shifts_it() -> None:
    _, axes = captured("gpt2")
    sequence = next(axis for axis in axes.axes if axis.name.endswith("sequence"))
    assert sequence.size == LENGTH
    assert not sequence.may_be_cut
    assert axes.ops["input_ids"].outputs[0] == (("batch",), (sequence.name,))
