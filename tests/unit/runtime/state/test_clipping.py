"""Clipping: one norm over all elements, worked out for what a rank answers for."""

from __future__ import annotations

import torch
from torch import nn

from whale.ir.graph import ModelGraph
from whale.ir.plan import Pipeline, Plan, Replica, Stage, VirtualDevice
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.scaling import Clipping, scale


def holdings_of(*names: str) -> Holdings:
    """Two replicas of one device each that hold the same parameters whole."""
    stages = [Stage(0, ("t",), (), VirtualDevice((f"d{index}",)), (1,), names) for index in range(2)]
    replicas = tuple(Replica(index, 1, Pipeline("1f1b", 1, (0,)), (stage,), ()) for index, stage in enumerate(stages))
    return Holdings.of(Plan("m", "c", ("d0", "d1"), (), (), replicas, (), 8), ModelGraph((), (), 8), None)


def parameters_of(*gradients: torch.Tensor | None) -> dict[str, nn.Parameter]:
    found = {}
    for index, gradient in enumerate(gradients):
        found[f"p{index}"] = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        found[f"p{index}"].grad = gradient
    return found


def clipping(parameters: dict[str, nn.Parameter], rank: int | None, limit: float) -> Clipping:
    holdings = holdings_of(*(f"p{index}" for index in range(4)))
    return Clipping(holdings, rank, parameters, limit, lambda total, what: None, torch.device("cpu"))


def test_clips_as_torch_does_with_parameters_of_several_types_and_without_gradient() -> None:
    def gradients() -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        return parameters_of(torch.randn(5), None, torch.randn(2, 3, dtype=torch.float64), torch.randn(7, dtype=torch.complex64))

    for limit in (0.1, 100.0):
        ours, expected = gradients(), gradients()
        clipping(ours, 0, limit).clip()
        nn.utils.clip_grad_norm_(expected.values(), limit)
        for name, parameter in ours.items():
            if parameter.grad is None:
                assert expected[name].grad is None
            else:
                torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_what_is_multiplied_later_is_clipped_as_torch_clips_the_product() -> None:
    summed = torch.tensor([3.0, -4.0], dtype=torch.float64)
    ours, expected = parameters_of(summed.clone()), parameters_of(summed / 4)
    norm = clipping(ours, 0, 0.1).clip(factor=1 / 4)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.values(), 0.1), rtol=1e-14, atol=0)
    torch.testing.assert_close(ours["p0"].grad / 4, expected["p0"].grad, rtol=1e-14, atol=0)


def test_a_rank_counts_only_what_it_is_the_lowest_owner_of() -> None:
    assert clipping(parameters_of(torch.ones(4)), 0, 1.0).norm() == 2
    assert clipping(parameters_of(torch.ones(4)), 1, 1.0).norm() == 0
    assert clipping({}, None, 1.0).norm() == 0


def test_what_a_rank_answers_for_is_worked_out_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    calls: list[str] = []
    real = Holdings.answered_for
    monkeypatch.setattr(Holdings, "answered_for", lambda self, name, rank: calls.append(name) or real(self, name, rank))
    clipped = clipping(parameters_of(torch.ones(4), torch.ones(2)), 0, 1.0)
    for _ in range(3):
        clipped.clip()
    assert calls == ["p0", "p1"]


def test_scaling_by_a_tensor_keeps_types() -> None:
    parameters = parameters_of(torch.ones(4), torch.ones(2, dtype=torch.bfloat16), None)
    scale(torch.tensor(0.5, dtype=torch.float64), parameters.values())
    assert [p.grad is None or (p.grad == 0.5).all().item() for p in parameters.values()] == [True, True, True]
    assert [None if p.grad is None else p.grad.dtype for p in parameters.values()] == [torch.float32, torch.bfloat16, None]
