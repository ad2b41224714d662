"""A captured model computes as torch does under the autocast regions of its code: bit by bit, on the kind of device that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import whale
from tests.examples import at_most, further
from whale.capture import capture
from whale.capture.flat.autocast import Autocast
from whale.capture.flat.sizes import hint_of
from whale.deferred import defer_weights, rule_of
from whale.errors import CaptureError
from whale.ir.precision import Precision

aten = torch.ops.aten
WIDTH = 6


class Layers(nn.Module):
    """Each layer is inside of a region, outside, or inside of one that is off in one that is on.

    Args:
        names: of layers.
        regions: as many of ``on``, ``off`` and ``none``.
        kind: of device.
    """

    def __init__(self, names: tuple[str, ...], regions: tuple[str, ...], kind: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan, self.kind = tuple(zip(names, regions, strict=True)), kind
        self.linear, self.convolution = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False)

    def one(self, name: str, x: Tensor) -> Tensor:
        return LAYERS[name](self, x)

    def forward(self, x: Tensor) -> Tensor:
        for name, region in self.plan:
            if region == "none":
                x = self.one(name, x.float())
                continue
            with torch.autocast(self.kind, torch.bfloat16):
                if region == "on":
                    x = self.one(name, self.one("linear", x))
                else:
                    with torch.autocast(self.kind, enabled=False):
                        x = self.one(name, x.float())
                    x = torch.cat([x, self.one("linear", x)], 1)[:, : x.shape[1]]
        with torch.autocast(self.kind, torch.bfloat16):
            logits: Tensor = self.last(x)
        return logits


LAYERS: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(x),
    "convolution": lambda m, x: m.convolution(x.mT).mT,
    "norm": lambda m, x: m.norm(x),
    "softmax": lambda m, x: x.softmax(-1) * x,
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "einsum": lambda m, x: torch.einsum("bij,kj->bik", x, m.linear.weight),
    "product": lambda m, x: (x @ x.mT) @ x,
    "distance": lambda m, x: x + F.mse_loss(x, torch.zeros_like(x)),
}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


def make_batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, 5, WIDTH, generator=random), "labels": torch.randint(3, (4, 5), generator=random)}


@at_most(8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.sampled_from(["on", "off", "none"])), min_size=1, max_size=3))
def test_a_model_trains_as_under_its_own_autocast(plan: list[tuple[str, str]]) -> None:
    names, regions = zip(*plan, strict=True)
    plain, batch = Layers(names, regions), make_batch()
    expected = loss(plain(batch["x"]), batch)
    expected.backward()
    engine = whale.parallelize(Layers(names, regions), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch)
    found = engine.step(batch)
    assert float(found) == pytest.approx(expected.item(), rel=1e-6)
    gradients = engine.gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-2, atol=2e-3 * float(parameter.grad.abs().max()))
    engine.close()


def types(model: nn.Module, device: str | None) -> list[tuple[str, str]]:
    graph, _ = capture(model, make_batch(), loss, device=device)
    return [(op.target.split(".")[1], op.outputs[0].dtype) for op in graph.ops if op.target.startswith("aten.") and op.requires_grad]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_model_on_meta_has_the_casts_of_a_gpu(device: str | None) -> None:
    with torch.device("meta"):
        model = Layers(("convolution", "norm", "attention"), ("on",) * 3, "cuda")
    found = dict(types(model, device))
    low = {"conv1d", "linear", "scaled_dot_product_attention"}
    assert {name: found[name] for name in low} == dict.fromkeys(low, "bfloat16")
    assert found["layer_norm"] == "float32", "on a GPU torch computes it in float32, on a CPU in bfloat16"


def test_autocast_for_another_kind_of_device_does_nothing_and_is_told() -> None:
    model = Layers(("convolution",), ("on",), "cuda")
    assert {dtype for _, dtype in types(model, "cpu")} == {"float32"}
    with pytest.warns(UserWarning, match=r'torch.autocast\("cuda"\) has no effect: the model is trained on cpu'):
        whale.parallelize(model, loss=loss, batch=make_batch()).close()


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dtype": lambda x, low: x.to(low.dtype) * low,
    "to": lambda x, low: x.to(low) * low,
    "type": lambda x, low: x.type(low.type()) * low,
    "limit": lambda x, low: low.masked_fill(x > 0, torch.finfo(low.dtype).min),
}


class Reading(Layers):
    """Asks for the type of what autocast has made, or of what it leaves as it is."""

    def __init__(self, read: str, kind: str, of_result: bool) -> None:
        super().__init__((), (), kind)
        self.read, self.of_result = READS[read], of_result

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.kind, torch.bfloat16):
            made = self.linear(x)
            x = self.read(x, made if self.of_result else x * 2) + made
        return super().forward(x)


@pytest.mark.parametrize("read", READS)
def test_a_type_that_is_another_where_the_model_runs_is_refused_with_its_line(read: str) -> None:
    with pytest.raises(
        CaptureError, match="is float32 on the device that the model was built on, but bfloat16 on the device type"
    ) as caught:
        capture(Reading(read, "cuda", True), make_batch(), loss, device="cuda")
    assert str(caught.value.where).partition(":")[0] in __file__ and caught.value.where
    for model, device in (Reading(read, "cuda", False), "cuda"), (Reading(read, "cuda", True), "cpu"), (Reading(read, "cpu", True), "cpu"):
        capture(model, make_batch(), loss, device=device)


def test_what_is_cast_inside_of_an_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale.capture.flat.flatten.casts_of", lambda node, autocast: None)
    with pytest.raises(CaptureError, match="casts values inside the op") as caught:
        capture(Layers(("linear",), ("on",)), make_batch(), loss)
    assert __file__.endswith(str(caught.value.where).partition(":")[0])


def test_weight_gradients_wait_behind_casts() -> None:
    graph, program = capture(Layers(("convolution",), ("on",)), make_batch(), loss)
    parameters = {op.name for op in graph.ops if op.kind == "parameter"}
    with_rule = [node for node in program.graph.nodes if node.op == "call_function" and rule_of(node.target)]
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        queue = program.graph.placeholder("queue")
    assert defer_weights(program.graph, parameters, queue, lambda node: node.meta["val"].dim()) == len(with_rule) == 3


class Frozen(Layers):
    """A target without gradients, made under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                goal = self.linear(x)
            return super().forward(x + goal)


def test_no_grad_under_autocast_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"uses no_grad\(\) inside torch.autocast"):
        capture(Frozen(("linear",), ("on",)), make_batch(), loss)


class ReadsTypes(Layers):
    """Code that asks for the type of an activation, inside of no_grad too, as rotary embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            with torch.autocast("cpu", enabled=False):
                angles = self.linear(x.float()).cos()
            angles = angles.to(x.dtype)
        logits: Tensor = self.last(x * angles + torch.finfo(x.dtype).tiny)
        return logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precision_is_autocast_around_the_model(dtype: torch.dtype) -> None:
    model, batch = ReadsTypes((), ()), make_batch()
    _, program = capture(model, batch, loss, device="cpu", precision=Precision(str(dtype).removeprefix("torch.")))
    total, weight = program.module()(*program.values(batch).values())
    found = torch.autograd.grad(total / weight, list(model.parameters()), allow_unused=True)
    with torch.autocast("cpu", dtype):
        logits = model(batch["x"])
    expected = torch.autograd.grad(loss(logits, batch), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


class Excluding(Layers):
    """Layers of which one computes in float32, whatever is around it."""

    def __init__(self, kept: str) -> None:
        super().__init__(("linear", "softmax", "norm", "convolution"), ("none",) * 4)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        for name, _ in self.plan:
            if name == self.kept:
                with torch.autocast("cpu", enabled=False):
                    x = self.one(name, x.float())
            else:
                x = self.one(name, x)
        logits: Tensor = self.last(x)
        return logits


class Included(Excluding):
    """The same, which leaves it to the setting."""

    def forward(self, x: Tensor) -> Tensor:
        for name, _ in self.plan:
            x = self.one(name, x)
        logits: Tensor = self.last(x)
        return logits


@pytest.mark.parametrize("kept", ["norm", "linear", "convolution"])
def test_ops_of_parameters_that_are_kept_in_float32_are_as_if_excluded_from_autocast(kept: str) -> None:
    model, batch = Included(kept), make_batch()
    graph, program = capture(model, batch, loss, device="cpu", precision=Precision("bfloat16", ((f"{kept}.*", True), ("*", False))))
    assert not any(name.startswith(f"{kept}.") for name in graph.read_as) and "last.weight" in graph.read_as
    total, weight = program.module()(*program.values(batch).values())
    found = torch.autograd.grad(total / weight, list(model.parameters()), allow_unused=True)
    alone = Excluding(kept)
    with torch.autocast("cpu", torch.bfloat16):
        logits = alone(batch["x"])
    expected = torch.autograd.grad(loss(logits, batch), list(alone.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_pattern_that_matches_no_parameter_is_told() -> None:
    with pytest.raises(CaptureError, match=r"no parameters are left for 'norms.\*' of precision.dtype") as caught:
        capture(Layers((), ()), make_batch(), loss, device="cpu", precision=Precision("bfloat16", (("norms.*", True), ("*", False))))
    assert "linear.weight" in (caught.value.hint or "")


class Coarse(Layers):
    """Computes in half precision in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
            logits: Tensor = self.last(x)
        return logits


def test_weights_that_are_cast_once_per_step_are_read_so_in_every_mode() -> None:
    engine = whale.parallelize(Coarse((), ()), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), batch=make_batch())
    assert engine.model_graph.read_as == {"last.weight": "bfloat16"}
    with torch.no_grad():
        engine.parameters["last.weight"].zero_()
    assert float(engine.step(make_batch())) == pytest.approx(1.0986, abs=1e-3), "ops read what a script has written"
    with pytest.raises(CaptureError, match=r"last.weight is read in bfloat16 in training, but in another type by %linear"):
        engine.predict(make_batch())
    engine.close()


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: F.log_softmax(x, -1),
    "sum": lambda x, y: x.sum(),
    "sum over": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean(-1),
    "prod": lambda x, y: x.prod(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "exp": lambda x, y: x.exp(),
    "pow": lambda x, y: x**2,
    "gelu": lambda x, y: F.gelu(x),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x, y: x @ x.new_ones(6, 3),
    "mse_loss": lambda x, y: F.mse_loss(x, x.tanh()),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "cross_entropy, summed": lambda x, y: F.cross_entropy(x, y, reduction="sum", ignore_index=1),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
}


class One(nn.Module):
    """An op of what a matrix product has made."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(6, 6), op

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (OPS | IN_FLOAT32)[self.op](self.linear(x), y)


IN_FLOAT32: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda x, y: F.rms_norm(x, x.shape[-1:]),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, x.tanh()),
    "trapezoid": lambda x, y: torch.trapezoid(x),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
}


FROM_2_12 = pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 leaves it in half precision")


@pytest.mark.parametrize("op", [pytest.param(op, marks=FROM_2_12) if op == "rms_norm" else op for op in IN_FLOAT32])
def test_ops_that_cast_between_their_parts_compute_in_float32(op: str) -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.randint(6, (4,))}
    _, program = capture(One(op), batch, mode="predict", device="cuda", precision=Precision("bfloat16"))
    results = program.graph.output_node().all_input_nodes
    assert torch.float32 in {result.meta["val"].dtype for result in results}, [result.meta["val"] for result in results]


@pytest.mark.parametrize(
    ("op", "dtype"), [*((op, "bfloat16") for op in OPS), ("matmul", "float16"), *further((op, "float16") for op in OPS if op != "matmul")]
)
def test_types_are_those_of_autocast_on_a_gpu(op: str, dtype: str) -> None:
    """Of the result and of what is computed on the way, as far as torch says without a GPU."""
    batch = {"x": torch.randn(4, 6), "y": torch.randint(6, (4,))}
    model = One(op)
    _, program = capture(model, batch, mode="predict", device="cuda", precision=Precision(dtype))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        there = {name: torch.empty_like(value, device="cuda") for name, value in batch.items()}
        parameters = {name: torch.empty(value.shape, device="cuda") for name, value in model.named_parameters()}
        with Autocast.of(Precision(dtype), "cuda").in_force(), Types() as expected:
            torch.func.functional_call(model, parameters, kwargs=there)
        given = [_on_gpu(node.meta["val"]) for node in program.graph.find_nodes(op="placeholder")]
        with Types() as found:
            fx.GraphModule({}, program.graph)(*given)
    assert found.types == expected.types


class Types(TorchDispatchMode):
    """Notes the types of what ops make, casts aside."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not aten._to_copy.default:
            self.types += [
                (str(func), each.dtype) for each in pytree.tree_leaves(made) if isinstance(each, Tensor) and each.is_floating_point()
            ]
        return made


def _on_gpu(value: Any) -> Any:
    return torch.empty([hint_of(size) for size in value.shape], dtype=value.dtype, device="cuda") if isinstance(value, Tensor) else 4
