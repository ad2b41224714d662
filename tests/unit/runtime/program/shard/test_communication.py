"""Bridges: each followed by its inverse is the identity, each backward is the adjoint, and none moves more than is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import at_most
from tests.unit.sharding.test_bridge_bytes import Index, coordinates, held, world
from tests.wire import Device, on_devices
from whale.axes import Concatenation, Dimension
from whale.ir.plan import Shard
from whale.runtime.program.shard.communication import collect, enter, exchange, gather, leave, part, scatter
from whale.runtime.program.shard.group import Group
from whale.runtime.program.shard.layout import ShardLayout
from whale.runtime.program.shard.slots import Slots
from whale.sharding.bridges import Bridge, bridge_bytes

TENSORS: tuple[tuple[Dimension, ...], ...] = (
    (("batch",), ("a",), ("b",)),
    (("b",), ("c", "a"), ("batch",)),
    (("batch",), ("a", "b")),
    (("b", "c", "a"), ("batch",)),
    (("batch", "a"), ("b", "c")),
    (("a", "batch"), ("c", "b")),
    (("batch", "a", "b"), ("c",)),
    (("a", "c", "b", "batch"),),
    (("a", "batch", "b"), ("c",)),
    (("c",), ("b", "batch", "c", "a")),
    (("batch",), ("a",), (Concatenation((("b",), ("c", "b"), ("b", "c"))),)),
    (("batch",), ("a", Concatenation((("b",), ("c", "b"))))),
    (("batch", Concatenation((("b",), ("c", "b")))), ("a",)),
)


@dataclass(frozen=True)
class Case:
    """A tensor, and how a group cuts it along two axes, of which the first may be the batch.

    Attributes:
        dimensions: of the tensor.
        sizes: of the axes.
        shards: along the first axis and the second.
        order: per rank of the process group, the position of its device.
        is_gloo: whether the group does what Gloo needs.
    """

    dimensions: tuple[Dimension, ...]
    sizes: dict[str, int]
    shards: tuple[Shard, ...]
    order: tuple[int, ...]
    is_gloo: bool

    @property
    def width(self) -> int:
        return len(self.order)

    def layout(self, position: int) -> ShardLayout:
        graph, axes = world(self.dimensions, self.sizes)
        return ShardLayout(graph, axes, self.shards, position, ("x",), self.sizes["batch"])

    @property
    def whole(self) -> Tensor:
        shape = [len(coordinates(dimension, self.sizes)) for dimension in self.dimensions]
        return torch.arange(1.0, prod(shape) + 1, dtype=torch.float64).reshape(shape)

    def has(self, form: str, position: int) -> set[Index]:
        """The elements that a device has, one by one."""
        shard = {"first": self.shards[0], "second": self.shards[1]}.get(form)
        return held(self.dimensions, self.sizes, shard, position)

    def on_devices(self, action: Callable[[Device, ShardLayout], Tensor]) -> list[Tensor]:
        return on_devices(lambda device: action(device, self.layout(device.position)), self.order, self.is_gloo)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(st.integers(2, 4))
    parts = st.one_of(st.lists(st.integers(1, 3), min_size=width, max_size=width).map(tuple), st.just((2,) * width))
    a, b, rows = Shard("a", draw(parts)), Shard("b", draw(parts)), Shard("batch", draw(parts))
    shards = draw(st.sampled_from([(a, b), (b, a), (rows, b), (a, rows)]))
    num_rows = sum(rows.sizes) if rows in shards else draw(st.integers(1, 3))
    sizes = {"batch": num_rows, "a": sum(a.sizes), "b": sum(b.sizes), "c": 2}
    order = draw(st.sampled_from(list(permutations(range(width)))))
    return Case(draw(st.sampled_from(TENSORS)), sizes, shards, order, draw(st.booleans()))


def elements(whole: Tensor, places: set[Index]) -> Tensor:
    """Those at the places, flat."""
    return torch.stack([whole[place] for place in sorted(places)])


def slots(layout: ShardLayout, form: str) -> Slots:
    return layout.slots("x", layout.shards[form == "second"].axis)


def swapped(x: Tensor, layout: ShardLayout, group: Group, source: str = "first", target: str = "second") -> Tensor:
    first, second = (layout.shards[form == "second"].axis for form in (source, target))
    return exchange(x, *layout.exchange("x", first, second), group)


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small integers, so that sums are exact."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


@at_most(30)
@given(cases())
def test_a_part_is_what_its_axis_says_and_a_gather_brings_the_parts_back(case: Case) -> None:
    def there_and_back(device: Device, layout: ShardLayout) -> Tensor:
        own = part(case.whole, slots(layout, "second"), device)
        assert torch.equal(own.flatten(), elements(case.whole, case.has("second", device.position)))
        return gather(own, slots(layout, "second"), device)

    assert all(torch.equal(made, case.whole) for made in case.on_devices(there_and_back))


@at_most(50)
@given(cases())
def test_an_exchange_and_its_inverse(case: Case) -> None:
    def there_and_back(device: Device, layout: ShardLayout) -> Tensor:
        own = slots(layout, "first").own(case.whole)
        moved = swapped(own, layout, device)
        assert torch.equal(moved.flatten(), elements(case.whole, case.has("second", device.position)))
        assert torch.equal(swapped(moved, layout, device, "second", "first"), own)
        return moved

    case.on_devices(there_and_back)


@at_most(20)
@given(cases())
def test_a_scattered_sum_gathered_is_the_sum(case: Case) -> None:
    shape = tuple(case.whole.shape)
    total = torch.stack([numbers(shape, position) for position in range(case.width)]).sum(0)

    def sums(device: Device, layout: ShardLayout) -> Tensor:
        own, places = numbers(shape, device.position), slots(layout, "first")
        assert torch.equal(leave(own, device), total)
        return gather(scatter(own, places, device), places, device)

    assert all(torch.equal(made, total) for made in case.on_devices(sums))


Step = Callable[[Tensor, ShardLayout, Group], Tensor]
STEPS: dict[str, tuple[str, str, Step]] = {
    "enter": ("whole", "each", lambda x, layout, group: enter(x, group)),
    "part": ("whole", "second", lambda x, layout, group: part(x, slots(layout, "second"), group)),
    "gather": ("first", "whole", lambda x, layout, group: gather(x, slots(layout, "first"), group)),
    "collect": ("first", "each", lambda x, layout, group: collect(x, slots(layout, "first"), group)),
    "exchange": ("first", "second", swapped),
    "leave": ("each", "whole", lambda x, layout, group: leave(x, group)),
    "scatter": ("each", "second", lambda x, layout, group: scatter(x, slots(layout, "second"), group)),
}
"""Per step, how its operand and its result lie: whole (equal on all), each (whole, unlike), or cut along an axis."""


def bridge(name: str, case: Case) -> Bridge:
    """What the plan calls a step."""
    source, target, _ = STEPS[name]
    first, second = (shard.axis for shard in case.shards)
    is_sum = source == "each"
    return Bridge("x", first if source == "first" else None, second if target == "second" else None, target == "each", is_sum)


def value(case: Case, form: str, layout: ShardLayout, seed: int) -> Tensor:
    shape = tuple(case.whole.shape)
    if form == "each":
        return numbers(shape, seed + layout.position)
    whole = numbers(shape, seed)
    return whole if form == "whole" else slots(layout, form).own(whole).contiguous()


def together(form: str, products: list[float]) -> float:
    """An inner product over the group: what is equal on all devices counts once."""
    assert form != "whole" or len(set(products)) == 1
    return products[0] if form == "whole" else sum(products)


@pytest.mark.parametrize("name", STEPS)
@at_most(8)
@given(case=cases())
def test_backward_is_the_adjoint(name: str, case: Case) -> None:
    source, target, step = STEPS[name]

    def products(device: Device, layout: ShardLayout) -> Tensor:
        x = value(case, source, layout, 100).requires_grad_()
        y = value(case, target, layout, 200)
        made = step(x, layout, device)
        made.backward(y)
        assert x.grad is not None
        return torch.stack([(made.detach() * y).sum(), (x.detach() * x.grad).sum()])

    there, back = zip(*(found.tolist() for found in case.on_devices(products)), strict=True)
    assert together(target, list(there)) == together(source, list(back))


@pytest.mark.parametrize("name", STEPS)
@at_most(8)
@given(case=cases())
def test_no_more_is_received_than_is_missing(name: str, case: Case) -> None:
    """What the plan counts is what arrives; and what arrives is the new part without what was there."""
    source, target, step = STEPS[name]
    graph, axes = world(case.dimensions, case.sizes)

    def received(device: Device, layout: ShardLayout) -> Tensor:
        x = value(case, source, layout, 0).float().requires_grad_()
        made = step(x, layout, device)
        device.enter_phase("backward")
        made.backward(torch.ones_like(made))
        moved = {phase: sum(m.received for m in device.messages if m.phase == phase) for phase in ("forward", "backward")}
        planned = bridge_bytes(bridge(name, case), graph, axes, case.shards, case.sizes["batch"])[device.position]
        assert planned == pytest.approx(tuple(moved.values()), abs=1)  # an all-reduce in pieces that are no whole bytes
        before, after = (case.has(form, device.position) for form in (source, target))
        if source != "each":
            assert moved["forward"] == 4 * len(after - before)
        if target != "each":
            assert moved["backward"] == 4 * len(before - after)
        return made.detach()

    case.on_devices(received)
