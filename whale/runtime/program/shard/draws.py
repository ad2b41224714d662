"""Random numbers of a split group: equal where a tensor is whole, different by position where it is cut.

All devices of a group enter a stage with the same seed. Each op draws from a seed of its own, made of that one and the op's
number, so that nothing depends on how many numbers an earlier op took: a GPU takes as many as it has multiprocessors for.

    seed  -->  dropout(whole), number 0: hash(seed, 0)      dropout(part), number 1: hash(seed, 1, position)      ...

From equal seeds unlike GPUs draw different numbers. There a whole tensor's are a hash of the seed and the element, or are
drawn on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from whale.runtime.program.marks import op_of
from whale.runtime.program.randomness import dropout, dropout_, generator_of, seed_of

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
    if not kwargs and (by_place := _by_place(target, args)) is not None:
        return by_place(*args[:2], seed)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        here = tree_map_only(Tensor, lambda value: value.cpu(), (args, {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}))
        found = target(*here[0], **here[1])
        for own, there in _written(target, (args, kwargs), here):
            own.copy_(there)
            found = own if found is there else found
        return tree_map_only(Tensor, lambda value: value.to(device), found)


def _written(target: Any, given: Any, here: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors that an op writes, as they were given and as they are on the host."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    written = [each for each in target._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    numbers = {each.name: number for number, each in enumerate(target._schema.arguments)}
    found = list[tuple[Tensor, Tensor]]()
    for each in written:
        number = numbers[each.name]
        values = [own[0][number] if number < len(own[0]) and not each.kwarg_only else own[1].get(each.name) for own in (given, here)]
        if isinstance(values[0], Tensor):
            found.append((values[0], values[1]))
    return found


def draw_by_place(graph: fx.Graph, random: Collection[str], device: torch.device) -> set[str]:
    """Has dropout draw by the place of each element, from seeds made once per micro-batch: then it may be compiled.

        dropout(x)   -->   seeds = place_seeds(places) ... dropout(x, seeds[i])

    Args:
        graph: of the stage, its draws numbered if it is split; changed in place.
        random: the captured ops that draw.
        device: of the stage.

    Returns:
        The ops that no longer draw from the generator.
    """
    drawing = [node for node in graph.nodes if op_of(node) in random]
    calls = [(node.args[2], node.args[3:]) if node.target is draw else (node.target, node.args) for node in drawing]
    pairs = zip(drawing, calls, strict=True)
    found = [(node, *call[1][:2], by_place) for node, call in pairs if (by_place := _by_place(*call)) is not None]
    if not found:
        return set()
    places = [(number, WHOLE) if node.target is not draw else node.args[:2] for number, (node, *_) in enumerate(found)]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        seeds = graph.call_function(place_seeds, (tuple(places), device), name="seeds")
        own = [graph.call_function(operator.getitem, (seeds, index)) for index in range(len(found))]
    for (node, value, rate, by_place), seed in zip(found, own, strict=True):
        node.target, node.args, node.kwargs = by_place, (value, rate, seed), {}
    return {name for node, *_ in found if (name := op_of(node)) is not None}


_BY_PLACE = {aten.dropout.default: dropout, aten.dropout_.default: dropout_}


def _by_place(target: Any, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """What draws by place, with a seed in place of the last argument; None for other calls than of a dropout in training."""
    return _BY_PLACE.get(target) if len(args) == 3 and args[2] is True else None


def place_seeds(places: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
    """A seed for each number of a draw and position, of the one that the stage was entered with; they reach the device in one copy."""
    seed = generator_of(device).initial_seed()
    return torch.tensor([seed_of(seed, *place) for place in places]).to(device, non_blocking=True).unbind()


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
