"""Random numbers of a split group: equal where a tensor is whole, different by position where it is cut.

All devices of a group enter a stage with the same seed. Each op draws from a seed of its own, made of that one and the op's
number, so that nothing depends on how many numbers an earlier op took: a GPU takes as many as it has multiprocessors for.

    seed  -->  dropout(whole), number 0: hash(seed, 0)      dropout(part), number 1: hash(seed, 1, position)      ...

From equal seeds unlike GPUs draw different numbers. There a whole tensor's are a hash of the seed and the element, or are
drawn on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from whale.runtime.program.marks import op_of
from whale.runtime.program.randomness import generator_of, seed_of

aten = torch.ops.aten

F = TypeVar("F", bound=Callable[..., Any])

WHOLE, WHOLE_EVERYWHERE = -1, -2
"""In place of a position: a whole tensor in a group of like devices, and of any."""


_NUMBERED: set[Any] = set()
"""Functions whose first argument is the number of a draw."""


def numbered(function: F) -> F:
    """Has `number_draws` give a function its number, as its first argument."""
    _NUMBERED.add(function)
    return function


@numbered
def draw(number: int, position: int, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a random op with numbers of its own, and leaves the generator as it was seeded."""
    device = next((value.device for value in args if isinstance(value, Tensor)), torch.device(kwargs.get("device") or "cpu"))
    generator = generator_of(device)
    seed = generator.initial_seed()
    own = seed_of(seed, number, position)
    if position == WHOLE_EVERYWHERE and device.type != "cpu":
        return _everywhere(own, device, target, args, kwargs)
    generator.manual_seed(own)
    try:
        return target(*args, **kwargs)
    finally:
        generator.manual_seed(seed)


def _everywhere(seed: int, device: torch.device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a random op with numbers that are equal on all devices."""
    if target is aten.dropout.default and not kwargs:
        value, rate, is_training = args
        return dropout(value, rate, seed) if is_training else value
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        here = tree_map_only(Tensor, lambda value: value.cpu(), (args, {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}))
        return tree_map_only(Tensor, lambda value: value.to(device), target(*here[0], **here[1]))


def dropout(value: Tensor, rate: float, seed: int) -> Tensor:
    """Dropout whose mask depends on the seed and the place of each element only."""
    if rate >= 1.0:
        return value * 0.0
    kept = uniform(value.shape, seed, value.device) >= rate
    return value * kept * (1.0 / (1.0 - rate))


def uniform(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) by SplitMix64 (Steele, Lea and Flood, 2014) of the seed and the place of each element."""
    found = (torch.arange(torch.Size(shape).numel(), device=device) + 1) * _GOLDEN + (seed - (seed >> 63 << 64))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        found = (found ^ _shifted(found, shift)) * factor
    return (_shifted(found ^ _shifted(found, 31), 40).to(torch.float32) * 2.0**-24).reshape(shape)


_GOLDEN, _FIRST, _SECOND = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shifted right as an unsigned number."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def number_draws(graph: fx.Graph, random: set[str], *, is_alike: bool) -> None:
    """Gives each random op of a split stage a seed of its own.

    Args:
        graph: of the stage, with everything cut and halved.
        random: the captured ops that draw.
        is_alike: whether equal seeds give equal numbers on all devices of the group.
    """
    number = 0
    for node in graph.nodes:
        if node.op != "call_function" or op_of(node) not in random:
            continue
        if node.target in _NUMBERED:
            node.args = (number, *node.args[1:])
        elif _draws(node.target):
            node.args, node.target = (number, WHOLE if is_alike else WHOLE_EVERYWHERE, node.target, *node.args), draw
        else:
            continue
        number += 1


def _draws(target: Any) -> bool:
    """Whether a call of a random op draws, rather than move values for it."""
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return not getattr(target, "__module__", "").startswith("whale.") and target.__module__ != "_operator"
