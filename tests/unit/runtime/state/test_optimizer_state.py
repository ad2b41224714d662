"""Optimizer state by name: what one optimizer kept, another over other parameters takes over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from whale.errors import CheckpointError
from whale.runtime.state.optimizer_state import OptimizerState, read_optimizer, write_optimizer

torch.set_num_threads(1)
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.1}),
]


def parameters(names: str = "abcd") -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.arange(6.0).reshape(2, 3) + ord(name)) for name in names}


def step(optimizer: torch.optim.Optimizer, own: dict[str, nn.Parameter], times: int = 2) -> None:
    for _ in range(times):
        for parameter in own.values():
            parameter.grad = parameter.detach().sin()
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_split_optimizer_goes_on_as_the_whole_one(kind: Any, options: dict[str, Any]) -> None:
    whole = parameters()
    optimizer = kind(list(whole.items()), **options)
    step(optimizer, whole)
    saved = read_optimizer(optimizer, whole)
    halves = []
    for names in ("ca", "bd"):
        half = {name: nn.Parameter(whole[name].detach().clone()) for name in names}
        other = kind([half[name] for name in names], **{**options, "lr": 5.0})  # unnamed, in another order
        write_optimizer(other, half, copy.deepcopy(saved))  # it takes the tensors over
        step(other, half)
        halves.append(half)
    step(optimizer, whole)
    for half in halves:
        for name, parameter in half.items():
            assert torch.equal(parameter, whole[name]), name


def test_kernels_are_those_of_the_optimizer_that_takes_over() -> None:
    own = parameters()
    optimizer = torch.optim.AdamW(list(own.values()), lr=0.1)
    step(optimizer, own)
    fused = torch.optim.AdamW(list(own.values()), lr=5.0, fused=True)
    write_optimizer(fused, own, read_optimizer(optimizer, own))
    assert fused.param_groups[0]["fused"] and fused.param_groups[0]["lr"] == 0.1
    step(fused, own)


def test_groups_keep_their_options() -> None:
    own = parameters()
    groups = [{"params": [own["a"], own["b"]], "lr": 0.5}, {"params": [own["c"], own["d"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    saved = read_optimizer(optimizer, own)
    assert saved.state == {} and saved.options["a"]["lr"] == 0.5 and saved.options["d"]["weight_decay"] == 0.0
    other = parameters("bd")
    target = torch.optim.AdamW([{"params": [("b", other["b"])]}, {"params": [("d", other["d"])]}], lr=9.0)
    write_optimizer(target, other, saved)
    assert [(group["lr"], group["weight_decay"]) for group in target.param_groups] == [(0.5, 0.01), (0.1, 0.0)]
    assert [group["param_names"] for group in target.param_groups] == [["b"], ["d"]]


def test_no_optimizer_keeps_nothing() -> None:
    assert read_optimizer(None, parameters()) == OptimizerState()
    write_optimizer(None, parameters(), OptimizerState())


def test_other_groups_and_other_parameters_are_refused_together() -> None:
    own = parameters()
    saved = read_optimizer(torch.optim.SGD([{"params": [own["a"]], "lr": 1.0}, {"params": [own["b"]], "lr": 2.0}]), own)
    target = torch.optim.SGD([{"params": [own["a"], own["b"]]}, {"params": [own["c"]]}], lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        write_optimizer(target, own, saved)
    text = str(caught.value)
    assert "group 0 were saved with different options (lr: 1.0 for a, 2.0 for b)" in text and "not in the saved one: c" in text
    assert target.param_groups[0]["lr"] == 0.1


def test_state_in_another_type_than_its_parameter_keeps_it() -> None:
    own = {"a": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}
    saved = OptimizerState({"a": {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 1 / 3)}}, {"a": {"lr": 0.1}})
    optimizer = torch.optim.AdamW(own.values())
    write_optimizer(optimizer, own, saved)
    assert optimizer.state[own["a"]]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[own["a"]]["exp_avg"], torch.full((3,), 1 / 3))
