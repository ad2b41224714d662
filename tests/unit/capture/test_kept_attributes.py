"""Attributes that forward makes for its next call: refused where a step would need those of the last, kept where they are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.capture import capture
from whale.errors import CaptureError


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        self.keep(hidden)
        return hidden - self.kept

    def keep(self, hidden: Tensor) -> None:
        if not hasattr(self, "kept"):
            self.kept = hidden.detach().mean()


class Cache(Average):
    def keep(self, hidden: Tensor) -> None:
        try:
            hidden = hidden + self.kept
        except AttributeError:
            hidden = hidden + 0
        self.kept = hidden.detach()


class Pair(Average):
    def keep(self, hidden: Tensor) -> None:
        before = getattr(self, "both", None)
        self.both = (hidden.detach(), 1)
        self.kept = hidden if before is None else before[0]


class Table(Average):
    def keep(self, hidden: Tensor) -> None:
        if not hasattr(self, "kept"):
            self.kept = torch.arange(4.0).sqrt()


class ForOthers(Average):
    def keep(self, hidden: Tensor) -> None:
        self.kept = hidden.detach()
        self.last = self.kept.mean()


class Counter(Average):
    def keep(self, hidden: Tensor) -> None:
        self.number = getattr(self, "number", 0) + 1
        self.kept = torch.zeros(())


class CountedInto(Average):
    def keep(self, hidden: Tensor) -> None:
        self.number = getattr(self, "number", 0) + 1
        self.kept = hidden.detach().mean() / self.number


class Dicts(Average):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[object, Any] = {}


class Item(Dicts):
    def keep(self, hidden: Tensor) -> None:
        self.kept = self.cache["last"] if "last" in self.cache else torch.zeros(4)
        self.cache["last"] = hidden.detach().mean(0)


class CountedItem(Dicts):
    def keep(self, hidden: Tensor) -> None:
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        self.kept = torch.zeros(())


class CountedInside(Average):
    """A number in a dict that is in another."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"seen": {"calls": 0}}

    def keep(self, hidden: Tensor) -> None:
        self.state["seen"]["calls"] += 1
        self.kept = torch.zeros(())


class ReadInside(CountedInside):
    def keep(self, hidden: Tensor) -> None:
        super().keep(hidden)
        self.kept = hidden.detach().mean() / self.state["seen"]["calls"]


class BesideATable(Dicts):
    def keep(self, hidden: Tensor) -> None:
        if not hasattr(self, "table"):
            self.table = torch.arange(4.0).sqrt()
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        self.kept = self.table / self.cache["calls"]


class BesideAnItem(Dicts):
    def keep(self, hidden: Tensor) -> None:
        if "table" not in self.cache:
            self.cache["table"] = torch.arange(4.0).sqrt()
        self.number = getattr(self, "number", 0) + 1
        self.kept = self.cache["table"] / self.number


class CountedBesideATable(BesideATable):
    def keep(self, hidden: Tensor) -> None:
        super().keep(hidden)
        self.kept = self.table


class LengthOfATable(Average):
    def keep(self, hidden: Tensor) -> None:
        if getattr(self, "length", 0) < hidden.shape[1]:
            self.length = hidden.shape[1]
            self.table = torch.arange(float(self.length)).sqrt()
        self.kept = self.table[: hidden.shape[1]]


class Named(Average):
    def keep(self, hidden: Tensor) -> None:
        self.kept = getattr(self, "state_" + "0", hidden.detach().mean())
        setattr(self, "state_" + "0", hidden.detach().mean())


class TablesByLength(Dicts):
    def keep(self, hidden: Tensor) -> None:
        if hidden.shape[1] not in self.cache:
            self.cache[hidden.shape[1]] = torch.arange(float(hidden.shape[1])).sqrt()
            setattr(self, "num_" + "tables", len(self.cache))
        self.kept = self.cache[hidden.shape[1]]


class NumberMadeOnce(Average):
    def keep(self, hidden: Tensor) -> None:
        if not hasattr(self, "scale"):
            self.scale = 1 / hidden.shape[1] ** 0.5
        self.kept = torch.full((), self.scale)


class ItemsForOthers(Dicts):
    def keep(self, hidden: Tensor) -> None:
        self.cache["last"] = self.kept = hidden.detach().mean()
        self.layer.last_input = hidden.detach()
        setattr(self, "attention_" + "0", hidden.detach())


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(("kind", "name"), [(Average, "kept"), (Cache, "kept"), (Pair, "both")])
@pytest.mark.parametrize("is_inside", [False, True])
def test_what_the_next_call_would_read_is_refused_with_its_line(kind: type[Average], name: str, is_inside: bool) -> None:
    model = nn.Sequential(kind()) if is_inside else kind()
    with pytest.raises(CaptureError, match=rf"forward looks for \w+\.{name} of its last call, makes it where it is missing") as caught:
        capture(model, torch.randn(6, 4), loss)
    assert "test_kept_attributes.py" in str(caught.value.where)
    assert "register" in (caught.value.hint or "")
    assert not hasattr(model[0] if isinstance(model, nn.Sequential) else model, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CountedInto, "number"),
        (Item, r"cache\['last'\]"),
        (Named, "state_0"),
        (ReadInside, r"state\['seen'\]\['calls'\]"),
        (BesideATable, r"cache\['calls'\]"),
        (BesideAnItem, "number"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_what_the_next_call_reads_of_this_one_is_refused(kind: type[Average], name: str) -> None:
    model = nn.Sequential(kind())
    before = set(vars(model[0]))
    with pytest.raises(CaptureError, match=rf"forward leaves \w+\.{name} for its next call, which computes something else then"):
        capture(model, torch.randn(6, 4), loss)
    assert set(vars(model[0])) == before and not getattr(model[0], "cache", None)
    assert getattr(model[0], "state", {"seen": {"calls": 0}}) == {"seen": {"calls": 0}}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counter, "number"),
        (CountedItem, "cache['calls']"),
        (CountedInside, "state['seen']['calls']"),
        (CountedBesideATable, "cache['calls']"),
    ],
)
def test_what_is_only_counted_is_told_of(kind: type[Average], name: str) -> None:
    graph, _ = capture(kind(), torch.randn(6, 4), loss)
    (told,) = graph.warnings
    assert f"written only during capture: each step starts from the values at capture ({kind.__name__}.{name})" in told


@pytest.mark.parametrize("kind", [Table, ForOthers, TablesByLength, LengthOfATable, NumberMadeOnce, ItemsForOthers])
def test_nothing_is_said_of_what_is_exact(kind: type[Average]) -> None:
    assert capture(kind(), torch.randn(6, 4), loss)[0].warnings == ()


@pytest.mark.parametrize("kind", [Table, ForOthers, TablesByLength, LengthOfATable, NumberMadeOnce, ItemsForOthers])
def test_what_is_the_same_or_written_first_is_exact(kind: type[Average]) -> None:
    torch.manual_seed(0)
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    engine = whale.parallelize(model, loss=loss, batch=torch.randn(6, 4))
    for _ in range(3):
        batch = torch.randn(6, 4)
        assert float(engine.evaluate(batch)) == pytest.approx(loss(plain(batch), batch).item(), rel=1e-6)
    engine.close()
