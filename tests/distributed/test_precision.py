"""In half precision a training equals eager autocast over the same micro-batches: bit by bit where nothing is split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests.captures import Captured, captured_once
from tests.distributed.test_state_law import assert_as_planned, held_bytes
from tests.distributed.training import make_cluster, three_steps
from tests.distributed.world import World
from tests.examples import at_most
from tests.unit.capture.test_autocast import LAYERS, Layers
from whale.estimate import estimate
from whale.hardware import compute_type
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.AdamW, lr=0.01),
}
NUM_ROWS = 8


class Stack(Layers):
    """Layers without regions of their own."""

    def one(self, name: str, x: Tensor) -> Tensor:
        if name == "attention":  # of tensors of its own: those of one tensor share a cast, which eager autocast makes for each
            return F.scaled_dot_product_attention(x, x.roll(1, -1), x.tanh())
        return super().one(name, x)

    def forward(self, x: Tensor) -> Tensor:
        for name, _ in self.plan:
            x = self.one(name, x)
        logits: Tensor = self.last(x)
        return logits


class Excluding(Stack):
    """The same, with a layer outside of autocast."""

    def __init__(self, names: tuple[str, ...], kept: str) -> None:
        super().__init__(names, ("none",) * len(names))
        self.kept = (kept, "einsum") if kept == "linear" else (kept,)

    def one(self, name: str, x: Tensor) -> Tensor:
        if name not in self.kept:
            return super().one(name, x)
        with torch.autocast("cpu", enabled=False):
            return super().one(name, x.float())


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make_batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(NUM_ROWS, 5, 6, generator=random), "labels": torch.randint(3, (NUM_ROWS, 5), generator=random)}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        names: its layers.
        dtype: ``bf16`` or ``fp16``.
        plan: one of `PLANS`.
        optimizer: one of `OPTIMIZERS`.
        clip: the largest norm of the gradients.
        zero: which forms are shared out among owners.
        keeps: layer whose parameters are read in float32; "" for none.
        offload: what lives on hosts.
        sums: ``own``, or ``bf16`` or ``fed back`` where gradients are rounded to be summed, ``accumulated`` where they are in bf16 at all.
        compiles: whether ops run as graphs of torch.compile.
    """

    names: tuple[str, ...]
    dtype: str
    plan: str
    optimizer: str = "sgd"
    clip: float | None = None
    zero: int = 0
    sums: str = "own"
    keeps: str = ""
    offload: str = "none"
    compiles: bool = False

    @property
    def config(self) -> dict[str, Any]:
        memory = {
            "memory.zero": str(self.zero),
            "memory.offload": self.offload,
            "communication.bucket_bytes": 200,
            "memory.optimizer_states": 1 if self.optimizer == "sgd" else 2,
            "runtime.compile": self.compiles,
        }
        if self.sums == "accumulated":
            memory |= {"gradient.dtype": "bf16"}
        elif self.sums != "own":
            memory |= {"gradient.sum_dtype": "bf16", "gradient.error_feedback": self.sums == "fed back"}
        dtype = {f"{self.keeps}.*": "float32", "*": self.dtype} if self.keeps else self.dtype
        return {"precision.dtype": dtype, **memory, "gradient.clip_norm": self.clip, "planning.search": "off", **PLANS[self.plan]}

    @property
    def is_exact(self) -> bool:
        """Whether every number is that of eager autocast.

        Gradients between stages arrive contiguous, and half-precision kernels round by the layout of what they read. Two uses of a weight
        are summed in the type of the cast that they share; eager autocast shares none inside of an einsum, and W of zero-bubble none.
        """
        used = ["linear" if name == "einsum" else name for name in self.names]
        is_whole = "pipeline.num_stages" not in PLANS[self.plan] or set(self.names) <= {"linear", "softmax"}
        is_once = all(used.count(name) < 2 for name in ("linear", "convolution", "norm"))
        return self.plan != "split" and self.clip is None and is_whole and is_once


PLANS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "micro-batches": {"pipeline.num_micro_batch": 2},
    "1f1b": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4},
    "zb_h1": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "pipeline.schedule": "zb_h1"},
    "recomputed": {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "recompute.policy": "full"},
    "split": {},
}


def build(names: tuple[str, ...], is_split: bool) -> tuple[nn.Module, Any, Any]:
    with whale.split(2) if is_split else whale.replicate(1):
        model = Stack(names, ("none",) * len(names))
    return model if is_split else Stack(names, ("none",) * len(names)), make_batch(0), loss


def captured(case: Case) -> Captured:
    prepare(case)
    return captured_once(build, case.names, case.plan == "split")


def prepare(case: Case) -> ModelGraph:
    made = captured_once(build, case.names, case.plan == "split")
    return made.capture(precision=compute_type(whale.Config(case.config), make_cluster((1.0,))))[0]


def train(rank: int, num_ranks: int, case: Case, path: str) -> tuple[list[float], dict[str, Tensor], Plan, Any]:
    """Three steps, the last after a checkpoint was saved and loaded; the plan, and the bytes of what lives from step to step."""
    made, optimizer = captured(case), OPTIMIZERS[case.optimizer]
    engine = whale.parallelize(
        made.model, loss=loss, optimizer=optimizer, batch=made.batch, config=case.config, cluster=make_cluster((1.0,) * num_ranks)
    )
    losses, state = three_steps(engine, make_batch, path)
    found = losses, state, engine.plan, held_bytes(engine)
    engine.close()
    return found


def eager(case: Case, pieces: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same with autocast and a scaled loss in a plain loop."""
    model, losses, scale = Excluding(case.names, case.keeps), [], 2.0**16 if case.dtype == "fp16" else 1.0
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    accumulated = torch.bfloat16 if case.sums == "accumulated" else torch.float32
    lost: dict[tuple[int, str], Tensor] = {}
    for step in range(3):
        batch, total = make_batch(step), 0.0
        if step == 2:  # after a checkpoint
            lost.clear()
        summed: dict[str, Tensor] = {}
        for place, start, stop, is_last in (
            (place, *rows, rows == replica[-1]) for place, replica in enumerate(pieces) for rows in replica
        ):
            for parameter in model.parameters():
                parameter.grad_dtype = accumulated
            with torch.autocast("cpu", DTYPES[case.dtype]):
                logits = model(batch["x"][start:stop])
                each = F.cross_entropy(logits.flatten(0, 1), batch["labels"][start:stop].flatten(), reduction="none").float().sum()
            total += float(each) / (NUM_ROWS * 5)
            each.backward(torch.tensor(scale / (NUM_ROWS * 5)))
            for name, parameter in model.named_parameters() if is_last else ():  # replicas sum what each has accumulated
                if parameter.grad is not None:
                    own = parameter.grad
                    if case.sums in ("bf16", "fed back") and len(pieces) > 1:
                        whole = own + lost.get((place, name), 0.0)
                        own = whole.bfloat16()
                        if case.sums == "fed back":
                            lost[place, name] = whole - own
                    summed[name] = own if name not in summed else summed[name] + own
                    parameter.grad = None
        for name, parameter in model.named_parameters():
            parameter.grad_dtype = torch.float32
            parameter.grad = summed[name].float() / scale if name in summed else None
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


cases = st.builds(
    Case,
    st.lists(st.sampled_from(sorted(LAYERS.keys() - {"distance", "product"})), min_size=1, max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([None, 0.5]),
    st.integers(0, 3),
    st.sampled_from(["own", "own", "bf16", "fed back", "accumulated"]),
    st.sampled_from(["", "", "norm", "linear"]),
    st.sampled_from(["none", "none", "optimizer", "optimizer+parameters"]),
)


@at_most(8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases)
@example(Case(("linear", "norm"), "bf16", "1f1b", "adam", sums="accumulated"))
@example(Case(("einsum", "convolution", "convolution"), "bf16", "micro-batches", "adam", zero=3))  # views of weights, the first by far
def test_half_precision(world: World, tmp_path: Path, case: Case) -> None:
    check(world, tmp_path, case)


def check(world: World, folder: Path, case: Case) -> None:
    world.prepare(prepare, case)
    ranks = world.run(train, case, str(folder / "checkpoint"), num_ranks=2)
    losses, weights = eager(case, ranks[0][2].all_micro_batch_rows(NUM_ROWS))
    for found, state, _, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-6 if case.is_exact else 2e-2)
        for name, expected in weights.items():
            assert state[name].dtype == torch.float32
            if case.is_exact:
                assert torch.equal(state[name], expected), name
            elif case.optimizer == "sgd":  # Adam's first steps follow the signs of gradients, however small
                torch.testing.assert_close(state[name], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer+parameters"])
def test_memory_is_the_plans_to_the_byte(world: World, tmp_path: Path, zero: int, offload: str) -> None:
    """What every reader casts is there in half precision, beside the weights that are stepped; the rest is in float32 once."""
    case = Case(("linear", "convolution", "norm"), "bf16", "replicas", "adam", zero=zero, offload=offload)
    graph = world.prepare(prepare, case)
    assert set(graph.read_as) == {"linear.weight", "linear.bias", "convolution.weight", "last.weight"}
    for _, _, plan, (device, *held) in world.run(train, case, str(tmp_path / "checkpoint"), num_ranks=2):
        assert_as_planned(estimate(plan, graph, make_cluster((1.0,) * 2)).of(device), *held)


def test_a_step_whose_gradients_overflow_is_left_out_and_halves_the_scale() -> None:
    def steep(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return loss(logits, batch) * batch["slope"].mean()

    model, batch = build(("linear",), False)[0], make_batch(0) | {"slope": torch.ones(NUM_ROWS)}
    engine = whale.parallelize(model, loss=steep, optimizer=OPTIMIZERS["adam"], batch=batch, config={"precision.dtype": "fp16"})
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.step(batch | {"slope": torch.full((NUM_ROWS,), 1e4)})
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and engine.loss_scale == 2.0**15
    engine.step(batch)
    assert engine.loss_scale == 2.0**15 and not torch.equal(engine.state_dict()["last.weight"], before["last.weight"])
    # the same over two batches of one update, of which the first overflows
    engine.forward_backward(batch | {"slope": torch.full((NUM_ROWS,), 1e4)})
    engine.forward_backward(batch)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.update()
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and engine.loss_scale == 2.0**14
    with pytest.raises(whale.RuntimeFault, match=r"not finite at step .* with a loss scale of 1"):
        for _ in range(20):
            engine.step(batch | {"slope": torch.full((NUM_ROWS,), torch.inf)})
    engine.close()


def test_the_settings_of_the_loss_scale_are_followed() -> None:
    settings = {"precision.loss_scale": 1024, "precision.loss_scale_growth_steps": 1, "precision.loss_scale_hysteresis": 2}
    model, batch = build(("linear",), False)[0], make_batch(0)
    engine = whale.parallelize(model, loss=loss, optimizer=OPTIMIZERS["adam"], batch=batch, config={"precision.dtype": "fp16", **settings})
    found = [engine.loss_scale]
    for factor in (1.0, torch.inf, torch.inf, 1.0):
        engine.step({name: value * factor if value.is_floating_point() else value for name, value in batch.items()})
        found.append(engine.loss_scale)
    engine.close()
    assert found == [1024.0, 2048.0, 2048.0, 1024.0, 2048.0]
