"""Plain modules: skips, ties, several inputs and outputs, buffers, frozen parameters, dropout, inner regions, fixed rows."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import slow
from tests.unit.capture.running import assert_same, loss_of
from whale.capture import capture
from whale.ir.graph import ModelGraph, Op

torch.set_num_threads(1)


def squares(output: Any, batch: Any) -> Tensor:
    return output.square().mean()


def eager(loss: Callable[[Any, Any], Any] = squares) -> Callable[[nn.Module, Any], Tensor]:
    def run(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model(batch), batch)
        return value[0] / value[1] if isinstance(value, tuple) else value

    return run


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def call(graph: ModelGraph, target: str) -> Op:
    return next(op for op in graph.ops if op.target == target)


class Net(nn.Module):
    """A module whose forward is a function of the module and its input."""

    def __init__(self, function: Callable[..., Any], **held: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        for name, module in held.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def check(model: nn.Module, loss: Callable[[Any, Any], Any] = squares, sizes: tuple[int, ...] = (4, 7)) -> ModelGraph:
    graph, program = capture(model, rows(4, 4), loss)
    for count in sizes:
        assert_same(model, graph, program, rows(count, 4), eager(loss))
    return graph


def test_skip_connection() -> None:
    graph = check(Net(lambda m, x: x + m.second(F.relu(m.first(x)))))
    assert graph.dynamic
    linear = call(graph, "aten.linear.default")
    assert str(linear.outputs[0]) == "float32[b, 6]" and linear.forward_flops == 2 * 4 * 4 * 6
    assert "pointwise" in call(graph, "aten.relu.default").tags
    assert linear.where is not None and linear.where.file.endswith("test_capture.py")


def test_ties_are_one_parameter_under_its_first_name() -> None:
    model = Net(lambda m, x: m.third(m.second(m.first(x))), third=nn.Linear(4, 6))
    model.third.weight = model.first.weight
    graph = check(model)
    parameter = graph.parameter_by_name["third.weight"]
    assert parameter.name == "first.weight" and parameter.ties == ("third.weight",)
    assert [op.target for op in graph.ops if op.kind == "parameter"].count("first.weight") == 1
    assert [p.name for p in graph.parameters] == ["first.weight", "first.bias", "second.weight", "second.bias", "third.bias"]


def test_shared_module_keeps_both_names() -> None:
    model = Net(lambda m, x: m.again(m.second(m.first(x))))
    model.again = model.first
    graph = check(model)
    assert graph.parameter_by_name["again.bias"].name == "first.bias"


def test_frozen_parameters_get_no_gradient() -> None:
    model = Net(lambda m, x: m.second(m.first(x)))
    model.first.requires_grad_(False)
    graph = check(model)
    assert not graph.parameter_by_name["first.weight"].trainable
    assert [op.requires_grad for op in graph.ops if op.target == "aten.linear.default"] == [False, True]


def test_batch_norm_updates_the_running_statistics_and_frozen_ones_stay() -> None:
    model = Net(lambda m, x: m.frozen(m.norm(m.first(x))), norm=nn.BatchNorm1d(6), frozen=nn.BatchNorm1d(6))
    model.frozen.eval()
    graph = check(model)
    assert [op.args[5] for op in graph.ops if op.target == "aten.batch_norm.default"] == [True, False]
    assert model.training and model.norm.training and not model.frozen.training
    assert sum("in_place" in op.tags for op in graph.ops) == 1  # num_batches_tracked of the one in training


def test_eval_mode_is_captured_and_flags_are_restored() -> None:
    model = Net(lambda m, x: m.drop(m.first(x)), drop=nn.Dropout(0.5))
    graph, program = capture(model, rows(4, 4), squares, mode="eval")
    assert model.training and not any("random" in op.tags for op in graph.ops)
    loss = loss_of(graph, program.module()(*program.values(rows(5, 4)).values()))
    torch.testing.assert_close(loss, squares(copy.deepcopy(model).eval()(rows(5, 4)), None))


def test_dropout_is_random_only_where_it_drops() -> None:
    model = Net(lambda m, x: m.none(m.drop(m.first(x))), drop=nn.Dropout(0.5), none=nn.Dropout(0.0))
    graph, _ = capture(model, rows(4, 4), squares)
    assert ["random" in op.tags for op in graph.ops if op.target == "aten.dropout.default"] == [True, False]


def test_buffers_written_without_gradients() -> None:
    def average(m: Net, x: Tensor) -> Tensor:
        y = m.first(x)
        with torch.no_grad():
            m.seen.mul_(0.5).add_(y.mean(0))
        return m.second(y) * m.scale

    model = Net(average)
    model.register_buffer("seen", torch.zeros(6))
    model.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
    model.register_buffer("unused", torch.zeros(3), persistent=False)
    graph = check(model)
    assert {p.name for p in graph.parameters if p.kind == "buffer"} == {"seen", "scale", "unused"}
    assert {op.requires_grad for op in graph.ops if "in_place" in op.tags} == {False}


def test_no_grad_region_cuts_the_gradient() -> None:
    def target(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = m.first(x)
        return m.first(x) - 2 * goal

    check(Net(target))


def test_in_place_ops_keep_their_order() -> None:
    def shift(m: Net, x: Tensor) -> Tensor:
        y = m.first(x)
        shifted = torch.zeros_like(y)
        shifted[:, 1:] = y[:, :-1]
        shifted[:, 0] = 1.0
        return m.second(shifted)

    graph = check(Net(shift))
    assert sum("in_place" in op.tags for op in graph.ops) == 2


def test_inner_autocast_is_written_out_as_casts() -> None:
    def mixed(m: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.second(m.norm(m.first(x)).softmax(-1))
        return y.float()

    model = Net(mixed, norm=nn.BatchNorm1d(6))
    graph, program = capture(model, rows(4, 4), squares)
    for count in (4, 5):
        assert_same(model, graph, program, rows(count, 4), eager(), tolerance=1e-2)


def test_recurrent_module_and_constants() -> None:
    def recurrent(m: Net, x: Tensor) -> Tensor:
        output, (last, _) = m.lstm(x.unsqueeze(1))
        return output * torch.tensor([1.0, 2.0, 3.0]) * table + last.transpose(0, 1)

    table = torch.tensor([0.5, 1.0, 2.0])
    graph = check(Net(recurrent, lstm=nn.LSTM(4, 3, batch_first=True)))
    assert sum(op.kind == "constant" for op in graph.ops) == 2


def test_meta_model_with_a_recurrent_module() -> None:
    with torch.device("meta"):
        model = Net(lambda m, x: m.lstm(x.unsqueeze(1))[0], lstm=nn.LSTM(4, 3, batch_first=True))
    before = dict(model.named_parameters())
    graph, _ = capture(model, rows(4, 4), squares)
    assert graph.dynamic and all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(weight.device.type == "meta" for weight in model.lstm._flat_weights)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(5, 2)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": self.left(a) + self.right(b) * scale, "left": self.left(a)}


def test_mapping_batch_with_a_key_for_the_loss_alone() -> None:
    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return ((output["sum"] - output["left"]).square().sum(-1) * batch["weight"]).sum(), batch["weight"].sum()

    def batch(count: int) -> dict[str, Any]:
        return {"a": rows(count, 3), "b": rows(count, 5), "scale": 0.5, "weight": rows(count).abs()}

    model = TwoInputs()
    graph, program = capture(model, batch(4), loss)

    def run(m: nn.Module, b: Any) -> Tensor:
        total, weight = loss(m(b["a"], b["b"], b["scale"]), b)
        return total / weight

    for count in (4, 3):
        assert_same(model, graph, program, batch(count), run)
    assert [op.name for op in graph.ops if op.kind == "input"] == ["a", "b", "weight"]
    assert graph.loss[0].weight_from_inputs


def test_tuple_batch_goes_by_position_and_the_rest_to_the_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 3))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])

    graph, program = capture(model, (rows(4, 4), torch.tensor([0, 1, 2, 0])), loss)
    assert [op.name for op in graph.ops if op.kind == "input"] == ["input_0", "input_1"]
    assert_same(model, graph, program, (rows(3, 4), torch.tensor([2, 1, 0])), lambda m, b: loss(m(b[0]), b))


class Clashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_1 = nn.Linear(4, 4)
        self.layer = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, input: Tensor, id: Tensor) -> Tensor:
        output: Tensor = self.layer[1](self.layer_1(self.layer[0](input))) + id
        return output


def test_names_that_python_or_other_tensors_have() -> None:
    model = Clashing()
    batch = {name: torch.randn(4, 4) for name in ("input", "id", "def", "p_layer_1_weight", "größe")}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return sum(((output - value).square().mean() for value in batch.values()), torch.zeros(()))

    graph, program = capture(model, batch, loss)
    assert set(program.batch.leaves(batch)) == {op.name for op in graph.ops if op.kind == "input"} - {"num_rows"}
    assert {op.target for op in graph.ops if op.kind == "parameter"} == set(dict(model.named_parameters()))
    assert_same(model, graph, program, batch, lambda model, batch: loss(model(batch["input"], batch["id"]), batch))


def test_predict_rebuilds_the_output() -> None:
    model = TwoInputs()
    batch = {"a": rows(4, 3), "b": rows(4, 5)}
    graph, program = capture(model, batch, mode="predict")
    assert program.outputs is not None and len(graph.outputs) == 2
    output = program.outputs.rebuild(program.module()(*program.values(batch).values()))
    torch.testing.assert_close(output, model(**batch))


def test_sum_over_a_constant_count_is_a_plain_sum() -> None:
    graph = check(Net(lambda m, x: m.first(x)), lambda output, batch: (output.square().sum(), 8))
    assert (graph.loss[0].coefficient, graph.loss[0].weight) == (0.125, None)


def test_weight_that_counts_rows() -> None:
    graph = check(Net(lambda m, x: m.first(x)), lambda output, batch: (output.square().sum(), output.shape[0] * 3))
    assert graph.dynamic and graph.loss[0].weight is not None and "reads_rows" in graph.by_name[graph.loss[0].weight].tags


def test_sizes_are_read_from_the_number_of_rows() -> None:
    graph = check(Net(lambda m, x: m.first(x).reshape(x.shape[0] * 2, 3) + torch.zeros(2 * x.shape[0], 3)))
    assert graph.dynamic
    assert str(call(graph, "aten.reshape.default").outputs[0]) == "float32[2b, 3]"
    assert not any("sym_size" in op.target for op in graph.ops)


def test_code_that_needs_a_number_of_rows_is_captured_for_that_number() -> None:
    model = Net(lambda m, x: m.first(x).view(2, -1, 6).sum(0))
    graph = check(model, sizes=(4,))
    assert not graph.dynamic and "captured again" in graph.warnings[0]
    assert graph.by_name["num_rows"].kind == "input" if "num_rows" in graph.by_name else True
    assert call(graph, "aten.linear.default").outputs[0].row_factors == (1, 0)
    again, program = capture(model, rows(2, 4), squares, static=True)
    assert_same(model, again, program, rows(2, 4), eager())
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]


@pytest.mark.parametrize(
    ("loss", "coefficient", "count"),
    [
        slow(lambda output, batch: output.square().sum() / len(output), 1.0, "num_rows"),
        (lambda output, batch: (output.square().sum(), 2 * len(output)), 1.0, "operator.mul(%num_rows, 2)"),
        slow(lambda output, batch: output.square().sum() / 8, 0.125, None),
        (lambda output, batch: (output.square().sum(), 4), 0.25, None),
    ],
)
def test_constants_of_a_loss_where_rows_are_a_number(loss: Any, coefficient: float, count: str | None) -> None:
    graph, _ = capture(Net(lambda m, x: m.first(x).view(len(x), 6)[: len(x)]), rows(4, 4), loss)
    assert not graph.dynamic and len(graph.warnings) == 1
    assert graph.loss[0].exact and graph.loss[0].coefficient == coefficient
    weight = None if graph.loss[0].weight is None else str(graph.by_name[graph.loss[0].weight])
    assert weight is None if count is None else weight is not None and count in weight
    assert ("aten.view.default(%linear, [%num_rows, 6])" in str(graph)) and "reads_rows" in graph.by_name["num_rows"].tags


def test_loop_over_the_rows() -> None:
    graph = check(Net(lambda m, x: torch.stack([m.first(row) for row in x])), sizes=(4,))
    assert not graph.dynamic
    assert graph.by_name["input_0"].outputs[0].row_factors == (1, 0)
    assert call(graph, "aten.linear.default").outputs[0].row_factors == (-1,)


def test_single_row_where_asked_for() -> None:
    model = Net(lambda m, x: m.first(x))
    graph, program = capture(model, rows(1, 4), squares, static=True)
    assert_same(model, graph, program, rows(1, 4), eager())


def test_equal_captures_are_equal_graphs() -> None:
    model = Net(lambda m, x: m.second(m.first(x)))
    first, second = (capture(model, rows(4, 4), squares)[0] for _ in range(2))
    assert first == second and first.fingerprint == second.fingerprint


def test_the_model_is_not_modified() -> None:
    model = Net(lambda m, x: m.norm(m.first(x)), norm=nn.BatchNorm1d(6))
    before = {name: (id(value), value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    capture(model, rows(4, 4), squares)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert id(value) == before[name][0] and torch.equal(value, before[name][1]), name
        assert value.grad is None


@pytest.mark.parametrize("count", [slow(2), 5])
def test_selection_by_a_mask(count: int) -> None:
    def selected(m: Net, x: Tensor) -> Tensor:
        return m.first(x)[x[:, 0] > -10]

    graph, program = capture(Net(selected), rows(4, 4), lambda output, batch: output.square().sum())
    chosen = call(graph, "aten.index.Tensor").outputs[0]
    assert chosen.shape == (4, 6) and chosen.row_factors == (-1, 0)
    program.module()(*program.values(rows(count, 4)).values())


def test_no_garbage_is_collected_during_a_capture() -> None:
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), {"input": torch.randn(4, 4)}, lambda output, _: output.square().mean())
    finally:
        gc.callbacks.remove(note)
    assert len(phases) <= 2 and gc.isenabled()  # one collection may come when it is over
