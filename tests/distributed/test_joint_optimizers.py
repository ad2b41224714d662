"""Several optimizers by name pattern: Muon for matrices and AdamW for the rest, wherever the plan puts them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import whale
from tests.distributed.training import make_cluster
from tests.distributed.world import World
from whale.errors import CheckpointError, ConfigError

OPTIMIZER = {"*.weight": partial(torch.optim.Muon, lr=0.05, weight_decay=0.0), "*": partial(torch.optim.AdamW, lr=0.01)}
SCHEDULER = {"*.weight": partial(StepLR, step_size=2)}
BATCH = (torch.linspace(-1, 1, 48).reshape(8, 6),)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return (output - batch[0][:, : output.shape[1]]).square().mean()


def parallelize(num_ranks: int, config: dict[str, Any], **changes: Any) -> whale.Engine:
    arguments = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, **changes}
    batch = (BATCH[0].double(),)
    return whale.parallelize(
        build(), loss=loss, batch=batch, config={"planning.search": "off", **config}, cluster=make_cluster((1.0,) * num_ranks), **arguments
    )


def train(rank: int, num_ranks: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two stages, then two replicas that share out what the optimizers keep, then a checkpoint and a split."""
    batch = (BATCH[0].double(),)
    engine = parallelize(num_ranks, {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2})
    losses = [float(engine.step(batch)) for _ in range(3)]
    optimizer = engine.optimizer
    with pytest.raises(ConfigError, match=r"stepped outside engine\.step"):
        next(iter(optimizer.members.values())).step()
    engine.replan(config={"pipeline.num_stages": 1, "memory.zero": "1"})
    losses += [float(engine.step(batch)) for _ in range(3)]
    engine.save(Path(folder) / "c")
    engine.close()
    engine = parallelize(num_ranks, {"pipeline.num_stages": 1})
    engine.load(Path(folder) / "c")
    losses += [float(engine.step(batch)) for _ in range(2)]
    state = engine.state_dict()
    engine.close()
    with pytest.raises(CheckpointError, match=r"state of another optimizer of 0.weight .Muon, here: AdamW"):
        parallelize(num_ranks, {}, optimizer=OPTIMIZER["*"], scheduler=None).load(Path(folder) / "c")
    renamed = {"?.weight": OPTIMIZER["*.weight"], "*.bias": OPTIMIZER["*"]}
    parallelize(num_ranks, {}, optimizer=renamed, scheduler=None).load(Path(folder) / "c")
    with pytest.raises(CheckpointError, match=r"state of another scheduler of \*\.bias .none, here: StepLR"):
        parallelize(num_ranks, {}, optimizer=renamed, scheduler={"*.bias": SCHEDULER["*.weight"]}).load(Path(folder) / "c")
    assert state is not None
    return losses, {name: own.clone() for name, own in state.items()}


def test_law(world: World, tmp_path: Path) -> None:
    model, batch, losses = build(), (BATCH[0].double(),), []
    muon = OPTIMIZER["*.weight"]([(name, p) for name, p in model.named_parameters() if name.endswith("weight")])
    adam = OPTIMIZER["*"]([(name, p) for name, p in model.named_parameters() if name.endswith("bias")])
    schedule = SCHEDULER["*.weight"](muon)
    for _ in range(8):
        model.zero_grad()
        value = loss(model(batch[0]), batch)
        value.backward()
        losses.append(float(value.detach()))
        muon.step()
        adam.step()
        schedule.step()
    for found, state in world.run(train, str(tmp_path), num_ranks=2):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-6, atol=1e-8)


class Lamb(torch.optim.Optimizer):
    """Adam's direction, as long as a share of the norm of its parameter, as LAMB has it."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                first, second = (state.setdefault(key, torch.zeros_like(parameter)) for key in ("exp_avg", "exp_avg_sq"))
                first.lerp_(parameter.grad, 0.1)
                second.lerp_(parameter.grad.square(), 0.01)
                update = first / (second.sqrt() + 1e-6)
                parameter.sub_(update * (group["lr"] * parameter.norm() / update.norm()))


WHOLE: dict[str, Any] = {"Adafactor": partial(torch.optim.Adafactor, lr=0.05), "Lamb": Lamb, "Muon": OPTIMIZER}


def square() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh()))).double()


def train_whole(rank: int, num_ranks: int, name: str, folder: str) -> tuple[dict[str, Tensor], int]:
    """Steps by keepers of whole parameters: two, a checkpoint, two more, then two where each rank steps all of them."""
    batch = (BATCH[0].double(),)
    settings = {"planning.search": "off", "memory.zero": "2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what an optimizer that is none of torch's may do with several parameters
        engine = whale.parallelize(
            square(), loss=loss, batch=batch, optimizer=WHOLE[name], config=settings, cluster=make_cluster((1.0,) * num_ranks)
        )
    num_kept = len(engine.parameters)
    for number in range(4):
        engine.step(batch)
        if number == 1:
            engine.save(Path(folder) / "c")
            engine.step(batch)
            engine.load(Path(folder) / "c")
    engine.replan(config={**settings, "memory.zero": "0"})
    for _ in range(2):
        engine.step(batch)
    state = engine.state_dict()
    engine.close()
    assert state is not None
    with pytest.raises(ConfigError, match=r"cannot step 0.weight, of which this rank has a part: .* needs an elementwise") as caught:
        whale.parallelize(
            nn.Sequential(nn.Linear(6, 6)).double(),
            loss=loss,
            batch=batch,
            optimizer=WHOLE[name],
            config={**settings, "communication.bucket_bytes": 8},
            cluster=make_cluster((1.0,) * num_ranks),
        )
    assert "memory.zero: 0" in (caught.value.hint or "")
    return {key: own.clone() for key, own in state.items()}, num_kept


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_keepers_of_whole_parameters_step_them_by_any_optimizer(world: World, tmp_path: Path, name: str) -> None:
    model, batch, make = square(), (BATCH[0].double(),), WHOLE[name]
    if isinstance(make, dict):
        named = [*model.named_parameters()]
        both = [make["*.weight"](p for n, p in named if n.endswith("weight")), make["*"](p for n, p in named if n.endswith("bias"))]
    else:
        both = [make(model.parameters())]
    for _ in range(6):
        model.zero_grad()
        loss(model(batch[0]), batch).backward()
        for optimizer in both:
            optimizer.step()
    ranks = world.run(train_whole, name, str(tmp_path), num_ranks=2)
    assert sum(num_kept for _, num_kept in ranks) == len([*model.parameters()]), "each is kept by one rank"
    for state, _ in ranks:
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-6, atol=1e-8)


def test_bad_patterns() -> None:
    for changes, said in (
        ({"optimizer": {"*.weight": OPTIMIZER["*"]}}, r"no pattern of optimizer= matches 0\.bias"),
        ({"optimizer": {"*": OPTIMIZER["*"], "*.weight": OPTIMIZER["*"]}}, r"no parameters are left for pattern '\*.weight' of optimizer="),
        ({"optimizer": OPTIMIZER["*"]}, r"scheduler= has patterns that optimizer= lacks .'\*\.weight'"),
        ({"optimizer": {"*": 3}, "scheduler": None}, r"optimizer\['\*'\]= is int, not a function"),
    ):
        with pytest.raises(ConfigError, match=said):
            parallelize(1, {}, **changes)


def test_an_optimizer_whose_state_has_no_groups(tmp_path: Path) -> None:
    class Wrapper(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict()}

    engine = parallelize(1, {}, optimizer=partial(Wrapper, lr=0.1), scheduler=None)
    for call in (lambda: engine.save(tmp_path / "c"), engine.replan):
        with pytest.raises(CheckpointError, match=r"state_dict.. of Wrapper has inner"):
            call()
    engine.step((BATCH[0].double(),))


RATES = (0.1, 0.03, 0.3)


def by_layer(named: Any, *, leaves_out: bool = False) -> torch.optim.Optimizer:
    """A group for each layer, each with its own rate; of some there are no parameters on a rank."""
    groups = [
        {"params": [own for name, own in named if name.startswith(f"{layer}.")], "lr": rate}
        for layer, rate in zip((0, 2, 4), RATES, strict=True)
    ]
    return torch.optim.SGD([group for group in groups if group["params"] or not leaves_out], lr=0.1)


CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=list(RATES), total_steps=8, cycle_momentum=False)
STAGES = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}


def train_by_layer(rank: int, num_ranks: int, folder: str) -> tuple[list[float], dict[str, Tensor] | None]:
    batch = (BATCH[0].double(),)
    with pytest.raises(ConfigError, match="scheduler= failed on the optimizer of this rank, which has") as caught:
        parallelize(num_ranks, STAGES, optimizer=partial(by_layer, leaves_out=True), scheduler=CYCLE)
    assert "make all groups on each rank; torch's optimizers take groups that are empty" in str(caught.value)
    engine = parallelize(num_ranks, STAGES, optimizer=by_layer, scheduler=CYCLE)
    losses = [float(engine.step(batch)) for _ in range(3)]
    engine.save(Path(folder) / "c")
    engine.close()
    engine = parallelize(num_ranks, {}, optimizer=by_layer, scheduler=CYCLE)
    engine.load(Path(folder) / "c")
    losses += [float(engine.step(batch)) for _ in range(3)]
    found = losses, engine.state_dict()
    engine.close()
    return found


def test_groups_by_layer_with_a_scheduler_that_has_a_value_for_each(world: World, tmp_path: Path) -> None:
    model, batch = build(), (BATCH[0].double(),)
    optimizer = by_layer(list(model.named_parameters()))
    scheduler, losses = CYCLE(optimizer), []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(value.detach()))
    for found, state in world.run(train_by_layer, str(tmp_path), num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close((state or {})[name], expected)
