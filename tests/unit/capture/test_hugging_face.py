"""Seven unmodified Hugging Face families: the captured program computes what the model computes, at any number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hf_models import BUILDERS, captured
from tests.unit.capture.running import assert_same
from whale.capture import capture
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.ir.serialization import from_json, to_json

torch.set_num_threads(1)
pytestmark = pytest.mark.slow


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch).loss
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("family", BUILDERS)
def test_loss_and_gradients_equal_the_models(family: str) -> None:
    model, batch, graph, program = captured(family)
    _, other = BUILDERS[family](rows=3, seed=1)
    assert graph.dynamic and not graph.warnings
    assert all(term.exact and term.weight_from_inputs for term in graph.loss)
    assert from_json(ModelGraph, to_json(graph)) == graph
    for sample in (batch, other):
        assert_same(model, graph, program, sample, own_loss)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_meta_model_is_captured_as_on_the_cpu(family: str) -> None:
    _, batch, graph, _ = captured(family)
    with torch.device("meta"):
        empty, _ = BUILDERS[family]()
    meta_graph, meta_program = capture(empty, batch)
    assert meta_graph == graph
    assert all(parameter.device.type == "meta" for parameter in empty.parameters())
    assert all(meta_program.tensors[name] is parameter for name, parameter in empty.named_parameters())


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_other_implementations_of_experts(experts: str) -> None:
    model, batch = BUILDERS["mixtral"](experts_implementation=experts)
    if experts == "eager":  # loops over the experts that were hit
        with pytest.raises(CaptureError, match=r"depends? on values"):
            capture(model, batch)
        return
    graph, program = capture(model, batch)
    assert_same(model, graph, program, batch, own_loss)


def test_dropout_draws_the_same_numbers() -> None:
    model, batch = BUILDERS["gpt2"](dropout=0.1)
    graph, program = capture(model, batch)
    assert_same(model, graph, program, batch, own_loss)


def test_predict_returns_the_models_output() -> None:
    model, batch = BUILDERS["gpt2"]()
    inputs = {"input_ids": batch["input_ids"]}
    graph, program = capture(model, inputs, mode="predict")
    assert program.outputs is not None and graph.mode == "predict" and not graph.loss
    output = program.outputs.rebuild(program.module()(*program.values(inputs).values()))
    with torch.no_grad():
        expected = model.eval()(**inputs)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.logits, expected.logits)


def test_stacks_trace_to_the_models_own_file() -> None:
    *_, graph, _ = captured("gpt2")
    where = next(op.where for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default")
    assert where is not None and "transformers" in where.file
    assert {op.module for op in graph.ops} >= {"transformer.wte", "transformer.h.0.ln_1", "transformer.h.1.mlp.c_fc", "lm_head"}
