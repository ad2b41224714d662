"""The mixture of experts of the examples: its routes, its load, its balance; and which forms of a mixture can be captured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.unit.planning.graphs import cluster
from whale.axes import discover
from whale.capture import capture
from whale.cli import main
from whale.config import Config
from whale.planning import make_plan
from whale.planning.explain.mixing import terms_apart

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import moe

torch.set_num_threads(1)
ROWS, LENGTH, WIDTH, EXPERTS, CHOICES = 5, 12, 8, 4, 2


def routes(capacity_factor: float, x: Tensor | None = None) -> moe.Routes:
    torch.manual_seed(0)
    gate = moe.Gate(WIDTH, EXPERTS, CHOICES, capacity_factor).double()
    return gate(torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64) if x is None else x)


@pytest.mark.parametrize("capacity_factor", [0.0, 0.5, 1.0, 4.0])
def test_a_place_has_one_token_and_a_token_its_weights(capacity_factor: float) -> None:
    found = routes(capacity_factor)
    places = moe.capacity(LENGTH, EXPERTS, CHOICES, capacity_factor)
    assert found.dispatch.shape == found.combine.shape == (ROWS, LENGTH, EXPERTS, places)
    assert found.dispatch.sum(1).max() <= 1
    assert torch.equal(found.load.sum(-1), torch.full((ROWS,), float(LENGTH * CHOICES), dtype=torch.float64))
    assert torch.equal(found.dispatch.sum((1, 3)), found.load.clamp(max=places)), "an expert takes what it has places for"
    weights = found.combine.sum((2, 3))
    if capacity_factor in (0.0, 4.0):
        torch.testing.assert_close(weights, torch.ones_like(weights))
    else:
        assert (weights < 0.999).any() and (found.load > places).any()


def test_samples_do_not_compete() -> None:
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = routes(0.5, x)
    for part, alone in zip(routes(0.5, x[1:3]), whole, strict=True):
        assert torch.equal(part, alone[1:3])


def test_first_choices_come_before_second_ones() -> None:
    gate = moe.Gate(EXPERTS, EXPERTS, CHOICES, 0.5)
    gate.experts.data = torch.eye(EXPERTS)
    first, second = torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0])
    dispatch = gate(torch.stack([first, first, second, second]).unsqueeze(0)).dispatch  # one place for each expert
    assert torch.equal(dispatch[0, :, :2, 0], torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))


def test_an_even_gate_is_in_balance() -> None:
    gate = moe.Gate(EXPERTS, EXPERTS, 1, 0.0)
    gate.experts.data = 50 * torch.eye(EXPERTS)
    even, odd = torch.eye(EXPERTS), torch.eye(EXPERTS)[:1].expand(EXPERTS, -1)
    torch.testing.assert_close(gate(torch.stack([even, odd])).balance, torch.tensor([1.0, float(EXPERTS)]))


@pytest.mark.slow
def test_the_loss_is_exact_and_the_experts_are_one_axis() -> None:
    graph, _ = capture(*moe.build(layers=1, width=16, context=8))
    assert not graph.warnings and all(term.exact and term.weight_from_inputs for term in graph.loss)
    axes = discover(graph)
    assert axes.parameters["blocks.0.experts.up"][0] == axes.parameters["blocks.0.experts.down"][0] == ("blocks.0.gate.experts:0",)


@pytest.mark.slow
def test_a_balance_over_the_whole_batch_is_not_exact() -> None:
    model, batch, _ = moe.build(layers=1, width=16, context=8)

    def of_all(output: tuple[Tensor, Tensor, Tensor], batch: object) -> Tensor:
        return output[0].square().mean() + (output[1].mean() * output[2].mean((0, 1))).sum()

    graph, _ = capture(model, batch, of_all)
    there = cluster((1e9,))
    together, apart = (make_plan(graph, there, Config({"pipeline.num_micro_batch": number}), rows=4) for number in (1, 2))
    assert not graph.warnings and not list(terms_apart(together, graph))
    assert all("weighted by rows" in warning for warning in terms_apart(apart, graph)) and list(terms_apart(apart, graph))


class Loop(nn.Module):
    """A mixture as a loop over expert modules, each on the tokens that chose it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if self.form == "nonzero":
                (at,) = torch.where(mask)
                result = result.index_add(0, at, expert(tokens[at]) * weight[at, None])
            elif self.form == "mask":
                result[mask] = expert(tokens[mask]) * weight[mask, None]
            elif self.form == "list":
                counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
                result = result + torch.cat([expert(part) for part in tokens.split(counts)])
            elif self.form == "all" or mask.any():
                result = result + expert(tokens) * (weight * mask)[:, None]
        return result.view_as(x)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nonzero", "mask", "all"])
def test_loops_over_all_experts_are_captured(form: str) -> None:
    graph, _ = capture(Loop(form), {"x": torch.randn(ROWS, LENGTH, WIDTH)}, lambda output, batch: output.square().mean())
    assert graph.dynamic and not graph.warnings and graph.loss[0].exact


@pytest.mark.parametrize("form", ["if", "list"])
def test_sizes_and_branches_that_depend_on_values_are_not(form: str) -> None:
    with pytest.raises(whale.CaptureError, match=r"(?s)depends on values in tensors.*test_mixture_of_experts.py:\d+.*masks"):
        capture(Loop(form), {"x": torch.randn(ROWS, LENGTH, WIDTH)}, lambda output, batch: output.square().mean())


@pytest.mark.slow
def test_the_page_shows_the_plan_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "mixture_of_experts.md").read_text()
    assert main(["plan", f"{root}/examples/moe.py:build", "--explain", "--cluster", f"{root}/strategies/clusters/v100_t4.yaml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    figures = [*re.findall(r"%einsum_\d.*?(forward all-to-all \S+ MiB, backward all-to-all \S+ MiB)", page)]
    figures += re.findall(r"\S+ MiB per device and micro-batch|(?<=`)cut batch [^`]+(?=`)", page)
    assert len(figures) == 3
    for figure in (*figures, *re.findall(r"stage \d -> stage \d: .*? \(\S+ MiB\)", page)):
        assert figure in shown, figure
