"""Every change of a value near a model is seen, whatever holds it; what only looks like one is none."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import nn

from whale.capture.exporting.near_values import NearValues, Seen


class Slotted:
    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = [1]


class Part(nn.Module):
    kind = "plain"
    sizes = [1, 2]  # noqa: RUF012

    def __init__(self, weight: Callable[[], float]) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.scale, self.undefined, self.weight = 1.0, math.nan, weight
        self.items, self.nested, self.rates = [1.0, 2.0], [[1.0], (2.0, [3.0])], {"first": 1.0, "last": [2.0]}
        self.recent, self.names, self.ordered = deque([1, 2]), {"a"}, OrderedDict(first=1, last=2)
        self.many = list(range(65))
        self.bound, self.table, self.number = partial(max, 1.0, key=abs), np.ones(3), np.float64(1.0)
        self.tables = [np.ones(2)]
        self.slotted = Slotted()

    @property
    def double(self) -> float:
        return 2 * self.scale

    def forward(self, x: Any, power: float = 2.0, *, offset: float = 0.0) -> Any:
        return self.inner(x) ** power + offset


def part() -> Any:
    weight = 1.0
    return Part(lambda: weight)


def before(made: Any) -> Seen:
    return NearValues(made, None).seen(())


def changes(seen: Seen, made: Any, *, trains: bool = True) -> list[str]:
    return seen.changed(READ, trains=trains)


class _Everything(frozenset[str]):
    def __contains__(self, _: object) -> bool:
        return True


READ = _Everything()
Undo = Callable[[], object]


def attribute(made: Any) -> Undo:
    made.scale = 2.0
    return lambda: setattr(made, "scale", 1.0)


def deleted(made: Any) -> Undo:
    del made.scale
    return lambda: setattr(made, "scale", 1.0)


def new_in_the_way_of_the_class(made: Any) -> Undo:
    made.kind = "other"
    return lambda: delattr(made, "kind")


def of_a_library_module(made: Any) -> Undo:
    made.inner.p = 0.0
    return lambda: setattr(made.inner, "p", 0.5)


def of_the_class(_: Any) -> Undo:
    Part.kind = "other"
    return lambda: setattr(Part, "kind", "plain")


def list_of_the_class(_: Any) -> Undo:
    Part.sizes.append(3)
    return Part.sizes.pop


def method(_: Any) -> Undo:
    own = Part.forward
    Part.forward = lambda self, x: x
    return lambda: setattr(Part, "forward", own)


def property_of_the_class(_: Any) -> Undo:
    own = vars(Part)["double"]
    Part.double = property(lambda self: 3 * self.scale)
    return lambda: setattr(Part, "double", own)


def forward_of_an_object(made: Any) -> Undo:
    made.inner.forward = lambda x: x
    return lambda: delattr(made.inner, "forward")


def hook(made: Any) -> Undo:
    return made.inner.register_forward_hook(lambda *_: None).remove


def training_flag(made: Any) -> Undo:
    made.inner.eval()
    return made.inner.train


def closure(made: Any) -> Undo:
    made.weight.__closure__[0].cell_contents = 2.0
    return lambda: setattr(made.weight.__closure__[0], "cell_contents", 1.0)


def empty_closure(made: Any) -> Undo:
    del made.weight.__closure__[0].cell_contents
    return lambda: setattr(made.weight.__closure__[0], "cell_contents", 1.0)


def default(_: Any) -> Undo:
    Part.forward.__defaults__ = (3.0,)
    return lambda: setattr(Part.forward, "__defaults__", (2.0,))


def keyword_default(_: Any) -> Undo:
    Part.forward.__kwdefaults__["offset"] = 1.0
    return lambda: Part.forward.__kwdefaults__.update(offset=0.0)


def item(made: Any) -> Undo:
    made.items[1] = 3.0
    return lambda: made.items.__setitem__(1, 2.0)


def more_items(made: Any) -> Undo:
    made.items.append(1.0)
    return made.items.pop


def other_list(made: Any) -> Undo:
    made.items = [1.0, 3.0]
    return lambda: setattr(made, "items", [1.0, 2.0])


def item_of_an_item(made: Any) -> Undo:
    made.nested[1][1][0] = 4.0
    return lambda: made.nested[1][1].__setitem__(0, 3.0)


def value_of_a_dict(made: Any) -> Undo:
    made.rates["first"] = 2.0
    return lambda: made.rates.update(first=1.0)


def item_in_a_dict(made: Any) -> Undo:
    made.rates["last"].append(1.0)
    return made.rates["last"].pop


def order_of_a_dict(made: Any) -> Undo:
    made.ordered.move_to_end("first")
    return lambda: made.ordered.move_to_end("last")


def of_a_deque(made: Any) -> Undo:
    made.recent.append(3)
    return made.recent.pop


def of_a_set(made: Any) -> Undo:
    made.names.add("b")
    return lambda: made.names.remove("b")


def few_of_many_items(made: Any) -> Undo:
    made.many.pop()
    return lambda: made.many.append(64)


def of_a_partial(made: Any) -> Undo:
    made.bound.keywords["key"] = float
    return lambda: made.bound.keywords.update(key=abs)


def of_an_array(made: Any) -> Undo:
    made.table[0] = 2.0
    return lambda: made.table.__setitem__(0, 1.0)


def of_an_array_in_a_list(made: Any) -> Undo:
    made.tables[0][0] = 2.0
    return lambda: made.tables[0].__setitem__(0, 1.0)


def number_of_numpy(made: Any) -> Undo:
    made.number = np.float64(2.0)
    return lambda: setattr(made, "number", np.float64(1.0))


def slot(made: Any) -> Undo:
    made.slotted.width = [2]
    return lambda: setattr(made.slotted, "width", [1])


def item_in_a_slot(made: Any) -> Undo:
    made.slotted.width[0] = 2
    return lambda: made.slotted.width.__setitem__(0, 1)


CHANGES = (
    attribute, deleted, new_in_the_way_of_the_class, of_a_library_module, of_the_class, list_of_the_class, method, property_of_the_class,
    forward_of_an_object, hook, training_flag, closure, empty_closure, default, keyword_default, item, more_items, other_list,
    item_of_an_item, value_of_a_dict, item_in_a_dict, order_of_a_dict, of_a_deque, of_a_set, few_of_many_items, of_a_partial, of_an_array,
    of_an_array_in_a_list, number_of_numpy, slot, item_in_a_slot,
)  # fmt: skip


@pytest.mark.parametrize("was_looked_at", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen_until_it_is_undone(change: Callable[[Any], Undo], was_looked_at: bool) -> None:
    made = part()
    seen = before(made)
    if was_looked_at:
        assert changes(seen, made) == []
    undo = change(made)
    try:
        assert len(changes(seen, made)) >= 1
        assert changes(before(made), made) == []
    finally:
        undo()
    assert changes(seen, made) == []


def test_equal_values_are_no_change() -> None:
    made = part()
    seen = before(made)
    made.scale, made.items, made.table = float("1"), [1.0, float("2")], np.ones(3)
    made.undefined = made.undefined
    made.rates = {"first": 1.0, "last": [2.0]}
    assert changes(seen, made) == []


def test_training_flags_count_in_training_alone() -> None:
    made = part()
    seen = before(made)
    made.inner.eval()
    assert changes(seen, made) == ["inner.training: True, now False"]
    assert changes(seen, made, trains=False) == []
    made.eval()
    assert changes(seen, made) == []


def test_changes_are_told_in_the_order_of_the_walk() -> None:
    made = part()
    seen = before(made)
    made.inner.register_forward_hook(lambda *_: None)
    made.items.append(3.0)
    made.scale = 2.0
    assert [text.partition(":")[0] for text in changes(seen, made)] == ["Part.scale", "Part.items", "Dropout"]
