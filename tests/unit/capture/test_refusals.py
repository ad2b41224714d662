"""What cannot be captured is one clear error with the user's line, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.examples import slow
from whale.capture import capture
from whale.errors import BatchError, CaptureError

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear, x)


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 7


def own_function(linear: nn.Linear, x: Tensor) -> Tensor:
    return Written.apply(linear(x))


def branch(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) if x.sum() > 0 else x


def counted(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)[: int(x.sum())].expand(int(x.max()), 4)


def hooked(linear: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = linear(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def numpy(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * float(x.numpy().sum())


def penalty(linear: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = linear(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient


def backward(linear: nn.Linear, x: Tensor) -> Tensor:
    linear(x).sum().backward()
    return linear(x)


def vectorised(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: linear.weight @ row)(x)


def of_a_function(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.grad(lambda rows: linear(rows).sum())(x)


def converted(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear.to(torch.float64)(x.double())


def packed(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(linear(x)[None], torch.tensor([4]), batch_first=True).data


def drawn(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) * (1, 2)[int(torch.rand(1).item())]


def mistaken(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x[:, :3])


def chosen(linear: nn.Linear, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (linear(x),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branch, "depends on values in tensors"),
        (hooked, "a gradient hook in forward"),
        (numpy, "numpy"),
        (penalty, r"computes gradients itself \(torch.autograd.grad, backward\)"),
        (backward, "computes gradients itself"),
        (vectorised, r"calls a transform of torch.func \(vmap, grad, jvp\)"),
        (of_a_function, "calls a transform of torch.func"),
        (converted, r"forward converts .* by .to\(\), from torch.float32 to torch.float64"),
        (packed, "packed sequences"),
        (drawn, "a number that is"),
        (mistaken, "cannot be captured: its code fails .RuntimeError: a and b must have same reduction dim"),
        slow(chosen, "higher-order operator"),
    ],
)
def test_what_would_be_lost_is_an_error_with_the_line(
    function: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net(function)
    model.eval()
    apply = torch.autograd.Function.apply
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, torch.randn(4, 4), lambda output, batch: output.mean())
    assert caught.value.where is not None
    file, line = str(caught.value.where).rsplit(":", 1)
    start = function.__code__.co_firstlineno
    assert file.endswith("test_refusals.py") and start < int(line) <= start + 3
    assert not model.training and not isinstance(model.linear.weight.data, torch._subclasses.FakeTensor)
    assert torch.autograd.Function.apply == apply
    assert capsys.readouterr() == ("", "")


def test_a_module_that_is_like_that_already_is_left() -> None:
    graph, _ = capture(Net(lambda linear, x: linear.to(torch.float32)(x)), torch.randn(4, 4), lambda output, batch: output.mean())
    first = next(op for op in graph.ops if op.kind == "call")
    assert first.target == "aten.linear.default" and first.requires_grad


def test_a_function_that_writes_to_what_it_is_given() -> None:
    with pytest.raises(CaptureError, match="calls mark_dirty: writing to its arguments is not supported") as caught:
        capture(Net(own_function), torch.randn(4, 4), lambda output, batch: output.mean())
    line = Written.forward.__code__.co_firstlineno + 2
    assert str(caught.value.where).endswith(f"test_refusals.py:{line}")


def test_own_function_without_gradients_is_harmless() -> None:
    def frozen(linear: nn.Linear, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = Written.apply(x.clone())
        return linear(x) + y

    capture(Net(frozen), torch.randn(4, 4), lambda output, batch: output.mean())


@pytest.mark.slow
def test_module_and_parameter_hooks() -> None:
    model = Net(lambda linear, x: linear(x))
    handle = model.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="a gradient hook in forward"):
        capture(model, torch.randn(4, 4), lambda output, batch: output.mean())
    handle.remove()
    model.linear.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(CaptureError, match=r"linear\.weight has a gradient hook"):
        capture(model, torch.randn(4, 4), lambda output, batch: output.mean())


def test_lazy_parameters() -> None:
    with pytest.raises(CaptureError, match="is lazy"):
        capture(nn.LazyLinear(3), torch.randn(4, 4), lambda output, batch: output.mean())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: output, r"float32 of shape \[rows, 4\]"),
        (lambda output, batch: (output.sum(), output), r"\(float32 of shape \[\], float32 of shape"),
        (lambda output, batch: None, "the loss is NoneType, not"),
        (lambda output, batch: output.argmax(), "int64 of shape"),
        (lambda output, batch: output.detach().mean(), "requires a gradient"),
    ],
)
def test_a_loss_is_a_scalar_or_a_pair(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Net(lambda linear, x: linear(x)), torch.randn(4, 4), loss)
    if "gradient" not in message:
        assert str(caught.value.where).endswith(f"test_refusals.py:{loss.__code__.co_firstlineno}")


def test_missing_loss() -> None:
    with pytest.raises(CaptureError, match=r"there is no loss: .* output .float32 of shape \[rows, \d+\]. has none") as caught:
        capture(nn.Linear(4, 4), torch.randn(4, 4))
    assert "loss=" in str(caught.value)


def test_loss_with_parameters_of_its_own() -> None:
    head = nn.Linear(4, 1)
    with pytest.raises(CaptureError, match=r"\[1, 4\] requires a gradient, but is not a parameter") as caught:
        capture(nn.Linear(4, 4), torch.randn(4, 4), lambda output, batch: head(output).mean())
    assert "test_refusals.py" in str(caught.value)


def test_loss_that_reads_the_models_parameters() -> None:
    model = nn.Linear(4, 4)
    graph, _ = capture(model, torch.randn(4, 4), lambda output, batch: output.square().mean() + model.weight.square().sum())
    assert len(graph.loss) == 2 and all(term.exact for term in graph.loss)


def test_frozen_model() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match="requires a gradient"):
        capture(model, torch.randn(4, 4), lambda output, batch: output.mean())
    capture(model, torch.randn(4, 4), lambda output, batch: output.mean(), mode="eval")


def test_loss_lines_are_the_users() -> None:
    graph, _ = capture(nn.Linear(4, 4), (torch.randn(4, 4), torch.randint(0, 4, (4,))), lambda o, b: F.cross_entropy(o, b[1]))
    where = graph.loss[0].where
    assert where is not None and where.file.endswith("test_refusals.py")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.randn(1, 4), "at least 2 rows"),
        ({"x": 3}, "no tensor whose dimension 0"),
        ({"x": torch.randn(2, 4), "y": object()}, r"batch\['y'\] is object"),
        ({"y": torch.randn(2, 4)}, "lacks x"),
        ((), "no tensor whose dimension 0"),
    ],
)
def test_bad_examples(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        capture(Net(lambda linear, x: linear(x)), batch, lambda output, batch: output.mean())


@pytest.mark.parametrize("loss", [lambda output: output.mean(), lambda: None, lambda output, batch, scale: output.mean() * scale])
def test_a_loss_takes_the_output_and_the_batch(loss: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"loss= is called as loss\(output, batch\), but takes \(") as caught:
        capture(Net(lambda linear, x: linear(x)), torch.randn(4, 4), loss)
    assert str(caught.value.where).endswith(f"test_refusals.py:{loss.__code__.co_firstlineno}")


class Table(nn.Module):
    """Rows of a table that is trained beside its reader, or not."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor], *, is_trained: bool = True) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(8, 4), requires_grad=is_trained), nn.Linear(4, 1)
        self.look_up = look_up

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.linear(self.look_up(self.table, ids))
        return result


def sparse_rows(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table, sparse=True)


def sparse_bags(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, sparse=True)


def sparse_gather(table: Tensor, ids: Tensor) -> Tensor:
    return torch.gather(table, 0, ids, sparse_grad=True)


def sparse_rows_of_another(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table * 2, sparse=True)


def sparse_and_dense(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table, sparse=True) * table.mean()


@pytest.mark.parametrize(
    ("look_up", "message"),
    [
        (sparse_gather, r"has sparse_grad=True, but its operand is not a parameter that an embedding looks up"),
        (sparse_rows_of_another, r"has sparse=True, but its operand is not a parameter that an embedding looks up"),
        (sparse_and_dense, "the gradient of table cannot be sparse: besides lookups with sparse=True, aten.mean.default reads it"),
    ],
)
def test_a_sparse_gradient_is_refused_with_its_line(look_up: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    batch = {"ids": torch.randint(0, 8, (6, 4))}
    line = look_up.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"{message}\n  at .*test_refusals\.py:{line}"):
        capture(Table(look_up), batch, lambda output, batch: output.mean())
    capture(Table(look_up, is_trained=False), batch, lambda output, batch: output.mean())


@pytest.mark.parametrize("look_up", [sparse_rows, sparse_bags])
def test_a_sparse_gradient_takes_what_is_looked_up(look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = capture(Table(look_up), {"ids": torch.randint(0, 8, (6, 4))}, lambda output, batch: output.mean())[0]
    table = graph.parameter_by_name["table"]
    assert (table.num_lookups, table.gradient_elements) == (24, 24 * (table.spec.shape[1] + 2)), "an index is as long as two elements"


class Sharing(nn.Module):
    """Has what the name says lie in the memory of its weight, or of the sums that it writes."""

    sums: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("sums", torch.zeros(4, 4))
        weight = self.first.weight
        self.kept: Any = torch.zeros(4, 4)
        if what == "data":
            self.second.weight.data = weight.data
        elif what == "view":
            self.part = nn.Parameter(weight.data[:2])
        elif what == "buffer":
            self.register_buffer("copy", weight.data)
        elif what == "frozen":
            self.second.weight = nn.Parameter(weight.detach(), requires_grad=False)
        elif what == "attribute":
            self.kept = weight.detach()
        elif what == "list":
            self.kept = [weight.detach()]
        elif what == "sums":
            self.register_buffer("row", self.sums[0])
        elif what == "row of sums":
            self.kept = self.sums[:1].expand(4, 4)
        elif what == "never written":
            self.register_buffer("ones", torch.ones(4))
            self.register_buffer("one", self.ones[:1])
        elif what == "tied":
            self.second.weight = weight
        elif what == "clone":
            self.kept = weight.detach().clone()
        elif what == "apart":
            flat = torch.randn(32)
            weight.data, self.second.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        if self.training:
            self.sums += kept.mean()
        return self.second(self.first(x)) + x @ kept


PAIRS = {
    "data": ("first.weight", "second.weight"),
    "view": ("first.weight", "part"),
    "buffer": ("first.weight", "copy"),
    "frozen": ("first.weight", "second.weight"),
    "sums": ("sums", "row"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", PAIRS)
def test_shared_memory_is_refused_with_both_names(what: str, device: str) -> None:
    with torch.device(device), pytest.raises(CaptureError) as caught:
        capture(Sharing(what), torch.zeros(4, 4, device="cpu"), lambda output, batch: output.mean())
    said = caught.value.message
    assert "share memory, but are not one tensor" in said and all(name in said for name in PAIRS[what])


@pytest.mark.parametrize(("what", "name"), [("attribute", "first.weight"), ("list", "first.weight"), ("row of sums", "sums")])
def test_a_tensor_in_the_memory_of_a_weight_is_refused_where_it_is_read(what: str, name: str) -> None:
    with pytest.raises(CaptureError, match=f"shares memory with {name}") as caught:
        capture(Sharing(what), torch.randn(4, 4), lambda output, batch: output.mean())
    assert "test_refusals.py:" in str(caught.value.where)


@pytest.mark.parametrize("what", ["tied", "clone", "apart", "never written", "nothing"])
def test_memory_that_is_tied_or_apart_is_captured(what: str) -> None:
    capture(Sharing(what), torch.randn(4, 4), lambda output, batch: output.mean())
