"""GPTs of any depth as they were captured once and kept as text, for what is told of a model's graph alone."""

from __future__ import annotations

from functools import cache
from typing import Literal

from tests.conftest import GOLDEN
from whale.ir.graph import ModelGraph
from whale.ir.serialization import from_json, to_json
from whale.workloads import GPT, repeat_blocks

Form = Literal["fused", "explicit"]


def captured(form: Form) -> ModelGraph:
    """Two blocks, captured now; with dropout where attention is explicit."""
    dropout = 0.1 if form == "explicit" else 0.0
    return GPT(layers=2, hidden=64, heads=4, sequence=16, vocabulary=128, attention=form, dropout=dropout).graph()


def as_text(graph: ModelGraph) -> str:
    """One line for each op."""
    return to_json(graph).replace('}, {"name": ', '},\n{"name": ')


def kept(form: Form) -> str:
    """Where the text is, among the golden ones."""
    return f"graphs/gpt_{form}.json"


@cache
def decoder(layers: int, form: Form = "explicit") -> ModelGraph:
    """The graph that was captured once, made deeper."""
    return repeat_blocks(from_json(ModelGraph, (GOLDEN / kept(form)).read_text()), layers)
