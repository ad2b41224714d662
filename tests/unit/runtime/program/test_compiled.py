"""Which ops of a stage torch.compile gets, and what becomes of those that it cannot have."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import whale
from tests.captures import alike, at_hand, captured_once
from tests.examples import slow
from tests.unit.runtime.program.test_segments import graph_of
from whale.errors import OpFault
from whale.runtime.program import compiled
from whale.runtime.program.compiled import Compilation, CompiledRun, compile_runs

EAGER = "aot_eager_decomp_partition"
CLASSES = 5


@pytest.fixture(autouse=True)
def without_compiler() -> Iterator[None]:
    """Graphs and their backward passes as torch.compile cuts them, without code for them."""
    torch._dynamo.reset()
    with mock.patch.object(compiled, "BACKEND", EAGER):
        yield


class Chain(nn.Module):
    """Blocks of equal shape; a normalisation, a tensor written in place."""

    def __init__(self, drop: float = 0.0, cut: bool = False, dropout: Callable[..., Tensor] = F.dropout) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens, self.drop, self.cut = nn.Embedding(CLASSES, 4), drop, cut
        self.layers, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.tokens(x)).relu_()
        for layer in self.layers:
            h = h + self.dropout(layer(h).tanh() * 2, self.drop, True)
            if self.cut:
                h = F.relu_(h.add(1)) if layer is self.layers[0] else h.mul_(0.5)
        logits: Tensor = h @ self.tokens.weight.t()
        return logits


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["target"])


def make_batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.arange(rows) % CLASSES, "target": torch.arange(rows) * 2 % CLASSES}


def make_engine(model: nn.Module, **config: object) -> whale.Engine:
    settings = {"planning.search": "off", **{name.replace("__", "."): value for name, value in config.items()}}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return whale.parallelize(model, loss=loss, optimizer=optimizer, batch=make_batch(6), config=settings)


def make_model(drop: float = 0.0, cut: bool = False, dropout: Callable[..., Tensor] = F.dropout) -> nn.Module:
    torch.manual_seed(0)
    return Chain(drop, cut, dropout).double()


def numbers(engine: whale.Engine, rows: tuple[int, ...] = (6, 5)) -> list[Tensor]:
    """Losses and weights of some steps, and an evaluation."""
    losses = [engine.step(make_batch(each)) for each in rows]
    found = [*losses, engine.evaluate(make_batch(6)), *(engine.state_dict() or {}).values()]
    engine.close()
    return found


def compilation(engine: whale.Engine) -> Compilation:
    assert engine.runtime.compilation is not None
    return engine.runtime.compilation


def runs(engine: whale.Engine) -> list[CompiledRun]:
    """Those of the training's program for six rows."""
    program = engine.runtime._workers["train"]._runners[0]._source(6)
    return [each for each in program.module.modules() if isinstance(each, CompiledRun)]


SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "whole": ({}, 0.0),
    "gpipe": ({"pipeline__num_micro_batch": 2, "pipeline__schedule": "gpipe"}, 0.0),
    "recomputed": ({"pipeline__num_micro_batch": 2, "recompute__policy": "full", "pipeline__schedule": "gpipe"}, 0.3),
    "dropout": ({"pipeline__num_micro_batch": 2}, 0.3),
    "dropout in place": ({"pipeline__num_micro_batch": 2}, 0.3),
}


CASES = [("whole", False), slow("whole", True), slow("gpipe", True), slow("recomputed", False), ("recomputed", True), slow("dropout", True)]
CASES += [("dropout in place", True)]


@pytest.mark.parametrize(("name", "cut"), CASES)
def test_the_numbers_are_those_of_eager_ops(name: str, cut: bool) -> None:
    compare(name, cut)


def built(drop: float, cut: bool, dropout: Callable[..., Tensor]) -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    return make_model(drop, cut, dropout), make_batch(6), loss


IN_PLACE = partial(F.dropout, inplace=True)


@at_hand()
def compare(name: str, cut: bool, rows: tuple[int, ...] = (6, 5)) -> None:
    config, drop = SETTINGS[name]
    kind = drop, cut, IN_PLACE if name.endswith("in place") else F.dropout
    made = captured_once(built, *kind)
    with mock.patch.object(compiled, "compile_runs", lambda *_, **__: None):  # all is eager, but dropout draws as in a run
        expected = numbers(make_engine(alike(made, make_model(*kind)), runtime__compile=True, **config), rows)
    if drop == 0:
        for value, wanted in zip(numbers(make_engine(alike(made, make_model(*kind)), **config), rows), expected, strict=True):
            assert torch.equal(value, wanted)
    engine = make_engine(alike(made, make_model(*kind)), runtime__compile=True, **config)
    for value, wanted in zip(numbers(engine, rows), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)
    assert compilation(engine).num_graphs and not {"dropout", "dropout_"} & compilation(engine).eager.keys()


INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor makes C++ on the CPU")


@pytest.mark.slow
@INDUCTOR
def test_the_numbers_of_the_code_that_inductor_makes() -> None:
    with mock.patch.object(compiled, "BACKEND", "inductor"):
        compare("recomputed", True, (6,))  # 6 rows are micro-batches of 3, which fill no vector


def test_the_mode_reaches_the_compiler() -> None:
    patches = []

    def compile_graph(module: fx.GraphModule, inputs: list[Tensor], config_patches: dict[str, Any]) -> Any:
        patches.append(config_patches)
        return torch._dynamo.lookup_backend(EAGER)(module, inputs)

    with mock.patch.object(compiled, "BACKEND", compile_graph):
        engine = make_engine(make_model(), runtime__compile=True, runtime__compile_mode="max-autotune-no-cudagraphs")
        engine.step(make_batch(6))
        engine.close()
    assert patches and all(each == {"max_autotune": True, "coordinate_descent_tuning": True} for each in patches)


@pytest.mark.slow
@INDUCTOR
def test_compiled_bf16_is_about_as_near_to_float32_as_eager_bf16() -> None:
    def gradients(dtype: str, compiles: bool) -> Tensor:
        with mock.patch.object(compiled, "BACKEND", "inductor"):
            engine = make_engine(make_model().float(), precision__dtype=dtype, runtime__compile=compiles)
            engine.step(make_batch(6))
        found = torch.cat([value.flatten() for value in engine.gradients().values()])
        engine.close()
        return found

    exact = gradients("float32", False)
    assert (gradients("bf16", True) - exact).norm() <= 2 * (gradients("bf16", False) - exact).norm()


def test_a_stage_is_one_graph_with_its_dropout_and_its_loss(capfd: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(make_model(drop=0.3), runtime__compile=True)
    (run,) = runs(engine)
    assert run.ops[0] == "embedding" and not compilation(engine).eager
    engine.step(make_batch(6))
    told = capfd.readouterr().err
    assert "whale: torch.compile made 1 graph in " in told and "cache (" in told and ": 1 run of " in told
    engine.step(make_batch(6))
    assert "torch.compile" not in capfd.readouterr().err
    engine.close()


def test_runs_that_are_alike_share_a_graph() -> None:
    engine = make_engine(make_model(0.3, False, F.alpha_dropout), runtime__compile=True)
    engine.step(make_batch(6))
    assert compilation(engine).eager == {"alpha_dropout": 3}
    assert len(runs(engine)) == 4  # before each random op, and behind the last; the two in the middle are alike
    assert compilation(engine).num_graphs == 3
    engine.close()


def test_each_number_of_rows_keeps_its_graph() -> None:
    engine = make_engine(make_model(), runtime__compile=True)
    counts = []
    for rows in (6, 5, 4, 6, 3):
        engine.step(make_batch(rows))
        counts.append(compilation(engine).num_graphs)
    assert counts == [1, 2, 2, 2, 2]
    engine.close()


def test_a_graph_is_made_where_gradients_of_another_type_are_there() -> None:
    """Of the second, unequal micro-batch the graph is made when the first has left gradients, which are then added to."""
    engine = make_engine(make_model().float(), precision__dtype="bf16", pipeline__num_micro_batch=2, runtime__compile=True)
    expected = make_engine(make_model().float(), precision__dtype="bf16", pipeline__num_micro_batch=2)
    for each in (engine, expected):
        each.step(make_batch(5))
    for name, gradient in expected.gradients().items():
        torch.testing.assert_close(engine.gradients()[name], gradient, rtol=2e-2, atol=1e-3)
    assert compilation(engine).num_graphs == 2
    for each in (engine, expected):
        each.close()


def test_ops_whose_weight_gradients_wait_stay_eager() -> None:
    found = Compilation()
    graph = graph_of(queue=True)
    compile_runs(graph, nn.Module(), {"dropped"}, compilation=found, is_dynamic=False)
    assert found.eager == {"linear (weight gradient deferred)": 2, "dropout": 1, "add": 1} and not found.compiled
    assert [node.name for node in graph.find_nodes(op="call_module")] == ["compiled0"]


@pytest.mark.parametrize("training", [True, False])
def test_a_normalisation_writes_statistics_in_training(training: bool) -> None:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "xwbmv"]
    node = graph.call_function(torch.ops.aten.batch_norm.default, (*given, training, 0.1, 1e-5, False))
    assert compiled._written(node) == (given[3:] if training else [])


def test_what_cannot_be_compiled_is_told_and_runs_eagerly(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> Callable[..., Any]:
        raise NotImplementedError("no such kernel")

    expected = numbers(make_engine(make_model()))
    engine = make_engine(make_model(), runtime__compile=True)
    with (
        mock.patch.object(torch._dynamo, "lookup_backend", lambda _: fails),
        pytest.warns(UserWarning, match=r"torch.compile fails on %embedding .. %\w+ \(.*test_compiled.py:\d+\), .* no such kernel"),
    ):
        found = numbers(engine)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    told = capfd.readouterr().err
    assert "torch.compile made 0 graphs and fails on 1 in " in told and ": 0 runs of 0 ops; not compiled: " in told
    assert compilation(engine).eager["linear"] == 3 and not compilation(engine).compiled


def test_how_many_runs_share_a_graph_that_fails() -> None:
    compile_graph = torch._dynamo.lookup_backend(EAGER)

    def fails(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        if "tanh" in module.code and "embedding" not in module.code:
            raise NotImplementedError("no such kernel")
        return compile_graph(module, inputs)

    engine = make_engine(make_model(0.3, False, F.alpha_dropout), runtime__compile=True)
    with (
        mock.patch.object(torch._dynamo, "lookup_backend", lambda _: fails),
        pytest.warns(UserWarning, match=r"which run eagerly \(and 1 equal run\): .*no such kernel"),
    ):
        engine.step(make_batch(6))
    found = compilation(engine)
    assert found.num_graphs == len(found.compiled) == 2
    assert found.eager == {"alpha_dropout": 3, "add": 2, "linear": 2, "tanh": 2, "mul": 2}
    engine.close()


def test_a_value_out_of_range_is_laid_to_its_op() -> None:
    engine = make_engine(make_model(), runtime__compile=True)
    batch = make_batch(6)
    engine.step(batch)
    with pytest.raises(OpFault, match="%embedding"):
        engine.step({**batch, "x": batch["x"] + CLASSES})


def test_a_model_that_was_compiled_is_compiled_in_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    inside = make_model()
    inside.layers[0].compile()
    for model in (torch.compile(make_model()), inside):
        engine = make_engine(model)
        assert runs(engine) and "so its stages are compiled" in capfd.readouterr().err
        state = {key: value + 1 for key, value in make_model().state_dict().items()}
        for prefix in ("_orig_mod.", ""):
            engine.load_state_dict({prefix + key: value for key, value in state.items()})
            found = engine.state_dict() or {}
            assert list(found) == list(state) and all(torch.equal(found[key], state[key]) for key in state)
            state = {key: value + 1 for key, value in state.items()}
        engine.close()
    with pytest.warns(UserWarning, match="runtime.compile is false"):
        engine = make_engine(inside, runtime__compile=False)
    assert engine.runtime.compilation is None
    engine.close()
