"""Random numbers in a split group: equal where tensors are whole, different where they are cut, whatever other ops draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from tests.gpu.gpu import gpu_or_stand_in
from tests.standin import put
from whale.runtime.program.marks import OP
from whale.runtime.program.randomness import dropout, dropout_, seed_of, uniform
from whale.runtime.program.shard.draws import WHOLE, WHOLE_EVERYWHERE, draw, draw_by_place, number_draws

aten = torch.ops.aten
DROPOUT = aten.dropout.default


def drawn(position: int, seed: int = 5, *, num_others: int = 0) -> list[Tensor]:
    """A whole dropout, two on parts, and a whole one again, at one position; `num_others` numbers are taken between, as GPUs do."""
    torch.manual_seed(seed)
    ones, found = torch.ones(1000), []
    for number, where in enumerate((WHOLE, position, position, WHOLE)):
        found.append(draw(number, where, DROPOUT, ones, 0.5, True))
        torch.rand(num_others)
    return found


def test_positions_agree_on_whole_tensors_only() -> None:
    here, there = drawn(0), drawn(1)
    assert torch.equal(here[0], there[0]) and torch.equal(here[3], there[3])
    assert not torch.equal(here[1], there[1]) and not torch.equal(here[2], there[2])


def test_every_draw_is_new_and_can_be_repeated() -> None:
    values = drawn(0)
    assert len({tuple(value.tolist()) for value in values}) == 4
    assert all(torch.equal(a, b) for a, b in zip(values, drawn(0), strict=True))
    assert all(400 < int(value.count_nonzero()) < 600 for value in values)


@pytest.mark.parametrize("num_others", [1, 5, 1000])
def test_a_device_that_takes_more_numbers_draws_the_same(num_others: int) -> None:
    assert all(torch.equal(a, b) for a, b in zip(drawn(0), drawn(0, num_others=num_others), strict=True))


def test_masks_by_place_are_even_and_independent() -> None:
    seed, other_seed = seed_of(7), seed_of(8)
    numbers = uniform((1000, 100), seed, torch.device("cpu"))
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert bool((counts - 5000).abs().max() < 400)
    other = uniform((1000, 100), other_seed, torch.device("cpu"))
    pairs = torch.stack([numbers.flatten(), other.flatten(), numbers.flatten().roll(1), numbers.T.flatten()])
    assert float((torch.corrcoef(pairs) - torch.eye(4)).abs().max()) < 0.02
    assert torch.equal(numbers, uniform((1000, 100), torch.tensor(seed), torch.device("cpu")))
    assert torch.equal(uniform((9,), (1 << 63) - 1, torch.device("cpu")), uniform((9,), (1 << 63) - 1, torch.device("cpu")))


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_dropout_in_place_is_the_same(rate: float) -> None:
    value = torch.randn(64, requires_grad=True)
    copied = value.detach().clone().requires_grad_()
    apart, inside = dropout(value * 2, rate, 7), dropout_(copied * 2, rate, 7)
    assert torch.equal(apart, inside)
    assert torch.equal(*(torch.autograd.grad(made.sum(), source)[0] for made, source in ((apart, value), (inside, copied))))


@pytest.mark.parametrize("target", [torch.ops.aten.dropout_.default, torch.ops.aten.alpha_dropout_.default])
def test_what_unlike_devices_draw_in_place_is_in_place(target: torch._ops.OpOverload) -> None:
    """What reads the memory by its first name reads what was drawn."""
    with gpu_or_stand_in() as gpu:
        value = torch.ones(64).to(gpu.device) if gpu.stand_in is None else put(torch.ones(64))
        made = draw(0, WHOLE_EVERYWHERE, target, value, 0.5, True)
        numbers = gpu.on_host({"made": made, "value": value})
    assert torch.equal(numbers["made"], numbers["value"]) and 1 < len(numbers["value"].unique()) < 4


def test_dropout_by_place_keeps_the_mean_and_its_gradient() -> None:
    value = torch.ones(100, 100, requires_grad=True)
    dropped = dropout(value, 0.25, 3)
    dropped.sum().backward()
    assert value.grad is not None and torch.equal(value.grad, dropped.detach())
    assert dropped.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(dropped.detach().mean()) == pytest.approx(1, abs=0.02)
    assert float(dropout(value, 1.0, 3).detach().abs().max()) == 0.0


def compiled_draws(position: int) -> list[Tensor]:
    """What a stage's program draws where it is compiled: two dropouts of a whole tensor, one of a part, and one in evaluation."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = [graph.call_function(DROPOUT, (x, 0.5, True)) for _ in range(2)]
    part = graph.call_function(draw, (0, position, DROPOUT, x, 0.5, True))
    idle = graph.call_function(DROPOUT, (x, 0.5, False))
    graph.output((*whole, part, idle))
    for node in (*whole, part, idle):
        node.meta[OP] = node.name
    names = {node.name for node in (*whole, part, idle)}
    number_draws(graph, names, is_alike=True)
    assert draw_by_place(graph, names, torch.device("cpu")) == names - {idle.name}
    torch.manual_seed(5)
    found: list[Tensor] = fx.GraphModule(nn.Module(), graph)(torch.ones(1000))
    return found


def test_compiled_draws_agree_on_whole_tensors_only() -> None:
    here, there = compiled_draws(0), compiled_draws(1)
    assert [torch.equal(a, b) for a, b in zip(here, there, strict=True)] == [True, True, False, True]
    assert len({tuple(value.tolist()) for value in here}) == 4
    assert all(400 < int(value.count_nonzero()) < 600 for value in here[:3])
