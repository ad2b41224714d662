"""Scopes around construction, in forward, as decorators, nested, by default: which op carries which path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whale.capture import capture, replicate, set_default_strategy, split, tag
from whale.capture.tagging import tag_of
from whale.errors import AnnotationError
from whale.ir.scope import ScopePath

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def bare_init() -> Iterator[Any]:
    before = nn.Module.__init__
    yield before
    set_default_strategy(None)
    assert nn.Module.__init__ is before


def scopes(model: nn.Module) -> list[ScopePath]:
    """Paths of the linear ops, in order."""
    graph, _ = capture(model, torch.randn(4, 4), lambda output, batch: output.square().mean())
    return [op.scope for op in graph.ops if op.target == "aten.linear.default"]


def names(model: nn.Module) -> list[str]:
    return ["/".join(scope.key for scope in path) for path in scopes(model)]


class MoreOutputs(nn.Module):
    """Has parameters that the loss does not read, under scopes and under none."""

    def __init__(self) -> None:
        super().__init__()
        with replicate(1, name="front"):
            self.front, self.side = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
            self.scale = nn.Parameter(torch.ones(4))
        self.free = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        front = self.front(x)
        return front, self.side(front) * self.scale, self.free(front)


def test_parameters_that_only_outputs_read_know_their_scopes() -> None:
    graph, _ = capture(MoreOutputs(), torch.randn(4, 4), lambda output, batch: output[0].square().mean())
    found = {each.name: each.scope for each in graph.parameters if each.scope}
    assert found == dict.fromkeys(("side.0.weight", "side.0.bias", "scale"), graph.by_name["linear"].scope)


class Two(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        with first:
            self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        with second:
            self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_around_construction() -> None:
    front, back = scopes(Two(replicate(1, name="front"), replicate(2)))
    assert (front[0].kind, front[0].device_count, front[0].name) == ("replicate", 1, "front")
    assert front[0].where is not None and front[0].where.file.endswith("test_scopes.py")
    assert back[0].key == "replicate#1" and str(back[0]) == "replicate(2)"


def test_tags_survive_deepcopy() -> None:
    assert names(copy.deepcopy(Two(replicate(name="a"), replicate(name="b")))) == ["a", "b"]


def test_entries_are_numbered_alike_however_much_was_entered_before() -> None:
    first, second = Two(replicate(1), replicate(1)), Two(replicate(1), replicate(1))
    assert [path[0].entry for path in scopes(first)] == [path[0].entry for path in scopes(second)] == [0, 1]
    assert [path[0].entry for path in scopes(second)] == [0, 1]


def test_nested_scopes_keep_the_whole_path() -> None:
    with replicate(2, name="outer"):
        model = Two(split(2, name="inner"), replicate(1, name="other"))
    assert names(model) == ["outer/inner", "outer/other"]


@pytest.mark.parametrize("inner", [replicate, split])
def test_only_replicate_encloses(inner: Any) -> None:
    with pytest.raises(AnnotationError, match="only replicate may enclose") as caught, split(2), inner(2):
        pass
    assert "test_scopes.py" in str(caught.value)


class Forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with replicate(name="built"):
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with replicate(name="run"):
            x = self.second(x)
            with split(2, name="deep"):
                x = self.third(x)
            return self.second(x)


def test_forward_scopes_win_over_the_modules() -> None:
    assert names(Forward()) == ["built", "run", "run/deep", "run"]


def test_forward_scopes_do_nothing_outside_a_capture() -> None:
    Forward()(torch.randn(2, 4))
    assert "custom" not in torch.fx.traceback.current_meta


@replicate(name="block")
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @replicate(1)
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@replicate(2)
def twice(module: Any, x: Tensor) -> Tensor:
    return module(module(x))


class Uses(nn.Module):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_decorated_class_tags_its_instances() -> None:
    assert names(Uses(Block(), nn.Linear(4, 4))) == ["block", ""]


def test_decorated_forward_is_one_task_graph_per_module() -> None:
    shared = Decorated()
    assert names(Uses(shared, Decorated(), shared)) == ["replicate#0", "replicate#1", "replicate#0"]


def test_decorated_init() -> None:
    class Net(nn.Module):
        @replicate(name="all")
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert names(Net()) == ["all"]


def test_each_entry_is_a_new_task_graph() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                with replicate(1):
                    x = self.inner(x)
            return x

    assert names(Net()) == names(Net()) == ["replicate#0", "replicate#1"]


def test_repeated_calls_of_a_tagged_module_are_one() -> None:
    with replicate(1):
        shared = nn.Linear(4, 4)
    assert names(Uses(shared, nn.Linear(4, 4), shared)) == ["replicate#0", "", "replicate#0"]


def test_tag_reaches_every_submodule_and_keeps_inner_scopes() -> None:
    model = Uses(nn.Linear(4, 4), Block())
    assert tag(model, replicate(2, name="outer")) is model
    assert names(model) == ["outer", "outer/block"]


class Bare(nn.Module):
    """Two products with parameters of its own, one of them transposed first."""

    def __init__(self, scope: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        with scope:
            self.up = nn.Parameter(torch.randn(6, 4))
            self.down = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).relu() @ self.up.t(), self.down)


def paths(model: nn.Module) -> dict[str, str]:
    graph, _ = capture(model, torch.randn(4, 4), lambda output, batch: output.square().mean())
    return {op.target.split(".")[1] + op.module: "/".join(scope.key for scope in op.scope) for op in graph.ops if op.kind == "call"}


def test_bare_parameters_bring_the_ops_that_read_them() -> None:
    found = paths(Bare(split(2, name="own")))
    assert {name: found[name] for name in ("linearfirst", "relu", "t", "matmul", "linear")} == {
        "linearfirst": "", "relu": "", "t": "own", "matmul": "own", "linear": "own",
    }  # fmt: skip
    with replicate(2, name="outer"):
        model = Bare(split(2, name="own"))
    assert paths(copy.deepcopy(model))["matmul"] == "outer/own" and paths(model)["linearfirst"] == "outer"
    assert paths(tag(Bare(split(2, name="own")), replicate(2, name="late")))["linear"] == "late/own"


def test_bare_parameters_under_a_default_strategy() -> None:
    set_default_strategy(replicate(name="rest"))
    model = Bare(split(2, name="own"))
    set_default_strategy(None)
    found = paths(model)
    assert (found["linearfirst"], found["matmul"], found["linear"]) == ("rest", "rest/own", "rest/own")
    assert found["relu"] == "", "what the module does itself joins its neighbours"


def test_modules_built_elsewhere_are_not_tagged() -> None:
    elsewhere = nn.Linear(4, 4)
    with replicate(name="late"):
        model = Uses(elsewhere, nn.Linear(4, 4))
    assert tag_of(elsewhere) is None
    assert names(model) == ["late", "late"]  # run by a module that is


def test_default_strategy_starts_a_task_graph_each_time(bare_init: Any) -> None:
    set_default_strategy(replicate(1))
    first = nn.Linear(4, 4)
    with split(2, name="head"):
        head = nn.Linear(4, 4)
    set_default_strategy(replicate(1))
    second = nn.Linear(4, 4)
    model = Uses(first, head, second)  # made under the second default itself, but holds parts of others
    set_default_strategy(None)
    a, b, c = scopes(model)
    assert [[scope.key for scope in path] for path in (a, b, c)] == [["replicate#0"], ["replicate#0", "head"], ["replicate#2"]]
    assert [[scope.is_default for scope in path] for path in (a, b, c)] == [[True], [True, False], [True]]
    assert nn.Module.__init__ is bare_init


def test_default_strategy_in_forward() -> None:
    class Net(Forward):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            set_default_strategy(replicate(1, name="one"))
            x = x * 3
            with replicate(name="scoped"):
                x = x * 4
            x = x * 5
            set_default_strategy(None)
            return self.first(x * 6)

    graph, _ = capture(Net(), torch.randn(4, 4), lambda output, batch: output.sum())
    products = {op.args[1]: [scope.key for scope in op.scope] for op in graph.ops if op.target == "aten.mul.Tensor"}
    assert products == {2: [], 3: ["one"], 4: ["scoped"], 5: ["one"], 6: []}


def test_a_split_in_forward_keeps_the_default_strategy_of_its_module() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with split(2):
                return nn.functional.linear(x, self.weight)

    set_default_strategy(replicate(2, name="one"))
    first = Layer()
    set_default_strategy(replicate(2, name="two"))
    second = Layer()
    set_default_strategy(None)
    model = Uses(first, second, tag(nn.Linear(4, 4), split(2, name="last")))
    assert names(model) == ["one/split#3", "two/split#4", "last"]
    set_default_strategy(replicate(2, name="all"))
    assert names(Uses(tag(nn.Linear(4, 4), split(2, name="last")))) == ["all/last"]
    set_default_strategy(None)


def test_default_strategy_of_a_model_built_before() -> None:
    model = Uses(nn.Linear(4, 4))
    set_default_strategy(replicate(4))
    ((only,),) = scopes(model)
    assert only.is_default and only.device_count == 4


def test_an_exception_restores_everything(bare_init: Any) -> None:
    with pytest.raises(KeyError), replicate(1), replicate(2):
        raise KeyError
    assert nn.Module.__init__ is bare_init
    assert tag_of(nn.Linear(1, 1)) is None


def test_an_exception_in_a_forward_scope_restores_everything() -> None:
    class Fails(Forward):
        def forward(self, x: Tensor) -> Tensor:
            with replicate(1):
                raise KeyError("broken")

    with pytest.raises(Exception, match="broken"):
        scopes(Fails())
    assert "custom" not in torch.fx.traceback.current_meta
    assert names(Two(replicate(name="a"), replicate(name="b"))) == ["a", "b"]


@pytest.mark.parametrize("count", [0, -1, True, "two", 1.5])
@pytest.mark.parametrize("scope", [replicate, split])
def test_device_count_must_be_a_positive_integer(scope: Any, count: Any) -> None:
    with pytest.raises(AnnotationError, match=r"device_count=.* of .* is not a positive integer") as caught:
        scope(count)
    assert repr(count) in str(caught.value) and "test_scopes.py" in str(caught.value)


def test_other_bad_arguments() -> None:
    with pytest.raises(AnnotationError, match="is not a non-empty string"):
        replicate(name="")
    with pytest.raises(AnnotationError, match="axis"):
        split(axis=3)
    with pytest.raises(AnnotationError, match="set_default_strategy takes a scope or None"):
        set_default_strategy("replicate")
    with pytest.raises(AnnotationError, match=r"whale\.tag"):
        replicate(1)(nn.Linear(1, 1))
    with pytest.raises(AnnotationError, match=r"replicate\(\) to decorate"):
        replicate(twice)


def test_one_scope_may_be_entered_twice_and_inside_itself() -> None:
    scope = replicate(1)
    with scope:
        outer = nn.Linear(1, 1)
        with scope:
            inner = nn.Linear(1, 1)
    paths = [tag_of(outer), tag_of(inner)]
    assert [None if path is None else len(path) for path in paths] == [1, 2]


def test_a_library_that_wraps_modules_meanwhile(bare_init: Any) -> None:
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    with replicate(1):
        ours = nn.Module.__init__
        nn.Module.__init__ = wrapped
    assert nn.Module.__init__ is wrapped and tag_of(nn.Linear(1, 1)) is None
    with replicate(1):
        assert tag_of(nn.Linear(1, 1)) is not None
    assert nn.Module.__init__ is wrapped
    nn.Module.__init__ = bare_init
