"""What WhaleTrainer refuses when it is made, and what a captured compute_loss may do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import AcceleratorConfig

import whale
from tests.gpu.gpu import Gpu, gpu_or_stand_in
from whale.errors import CaptureError, ConfigError
from whale.integrations.transformers import Computed, FiniteLoss, WhaleTrainer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_find_batch_size", True),
        ("torch_compile", True),
        ("use_liger_kernel", True),
        ("save_on_each_node", True),
        ("bf16_full_eval", True),
        ("ddp_find_unused_parameters", False),
        ("accelerator_config", AcceleratorConfig(split_batches=True)),
    ],
)
def test_an_argument_that_cannot_be_served_is_an_error_that_names_it(tmp_path: Path, name: str, value: Any) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    setattr(arguments, name, value)
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}"):
        WhaleTrainer(nn.Linear(2, 2), arguments)


def test_an_optimizer_that_is_made_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = partial(WhaleTrainer, model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    with pytest.raises(ConfigError, match="cannot use an optimizer that is already made"):
        make(optimizers=(optimizer, None))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 1), nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(self.drop(x)).square().mean()}


def test_what_comes_in_evaluation_mode_is_trained_in_training_mode(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=4, learning_rate=0.0, logging_steps=1, eval_strategy="steps", eval_steps=1
    )
    rows = [{"x": torch.ones(4)} for _ in range(8)]
    trainer = WhaleTrainer(Dropping().eval(), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.label_names, trainer.can_return_loss = [], True
    trainer.evaluate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        trainer.train()
    losses, evaluated = ([each[key] for each in trainer.state.log_history if key in each] for key in ("loss", "eval_loss"))
    assert len(set(losses)) == 4 and len(set(evaluated)) == 1, "dropout draws in each step, and in no evaluation"


class Annealed(WhaleTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return model(**inputs)["loss"] * (1 + self.state.global_step)


def test_a_loss_that_depends_on_the_step_is_refused(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    trainer = Annealed(Dropping(), arguments, train_dataset=[{"x": torch.ones(4)}] * 8)
    with pytest.raises(CaptureError, match=r"compute_loss reads self.state.global_step, but is captured once"):
        trainer.train()
    assert trainer.state.global_step == 0


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).float().square().mean()}


class Watched(WhaleTrainer):
    """Notes when the host asks whether a step was skipped, and what it waits for from the third step on.

    Attributes:
        gpu: where it computes.
        events: passes and questions, in order.
        rates: by the schedule, and by the optimizer, when it logs.
        waits: of the stand-in device.
    """

    gpu: Gpu | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[str] = []
        self.waits: list[str] = []
        self.rates: list[float] = []

    def log(self, logs: dict[str, float], *others: Any) -> None:
        super().log(logs, *others)
        if "loss" in logs and self.args.logging_steps == 1:
            rate = self.lr_scheduler.get_last_lr()[0]
            assert self.optimizer.param_groups[0]["lr"] == rate
            self.rates.append(rate)

    def _plain(self, loss: torch.Tensor) -> torch.Tensor:
        """On the stand-in device a loss cannot stay where it is: torch.tensor makes none there to add it to."""
        return super()._plain(loss) if torch.cuda.is_available() or self.gpu is None else torch.zeros(())

    def training_step(self, *arguments: Any) -> Any:
        self.events.append("pass")
        looks = self.gpu is not None and self.gpu.stand_in is not None
        if looks and self.state.global_step == 2:
            self.gpu.stand_in.forget()
        self.waits = list(self.gpu.stand_in.waits) if looks else []
        return super().training_step(*arguments)


@contextmanager
def watched(tmp_path: Path, on_device: bool, dtype: str = "fp16", **options: Any) -> Iterator[Watched]:
    """A trainer of 8 steps in float16 with a fused optimizer, on the GPU or the stand-in for it, or on the CPU."""
    asked: Any = whale.Engine.was_skipped.fget  # type: ignore[attr-defined]
    given = {"max_steps": 8, "learning_rate": 1e-3, "logging_steps": 1, "lr_scheduler_type": "linear", "save_strategy": "no", **options}
    with gpu_or_stand_in() if on_device else nullcontext() as gpu:
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=not torch.cuda.is_available(), report_to="none", **given)
        sgd = torch.optim.SGD, {"lr": 1e-3, "fused": True}
        rows = [{"x": torch.ones(4)} for _ in range(8)]
        trainer = Watched(Steep(), arguments, train_dataset=rows, config={"precision.dtype": dtype}, optimizer_cls_and_kwargs=sgd)
        trainer.gpu = gpu
        with mock.patch.object(whale.Engine, "was_skipped", property(lambda self: trainer.events.append("asked") or asked(self))):
            yield trainer


@pytest.mark.parametrize("dtype", ["float32", "fp16"])
def test_the_host_waits_for_nothing_between_logs(tmp_path: Path, dtype: str) -> None:
    with watched(tmp_path, True, dtype, logging_steps=8, max_grad_norm=0.5) as trainer:
        trainer.train()
        assert trainer.waits == [] and trainer.events.count("asked") == 8, "once per step, for which fp16 waits"


@pytest.mark.parametrize("filters", [False, True])
def test_a_loss_that_is_not_finite_is_logged_as_by_the_trainer(tmp_path: Path, filters: bool) -> None:
    given, passes, losses = iter([1.0, 2.0, math.inf, 4.0]), whale.Engine.forward_backward, [1.0, 2.0, 3.0 / 3, 4.0]
    with (
        watched(tmp_path, False, max_steps=4, logging_steps=4, logging_nan_inf_filter=filters) as trainer,
        mock.patch.object(whale.Engine, "forward_backward", lambda *arguments: torch.full_like(passes(*arguments), next(given))),
    ):
        trainer.train()
    (logged,) = (each["loss"] for each in trainer.state.log_history if "loss" in each)
    assert logged == (sum(losses) / 4 if filters else math.inf)
    finite, total = torch.tensor(2.0).as_subclass(FiniteLoss), torch.tensor(1.0)
    total += finite
    assert (torch.isnan(finite), torch.isinf(finite)) == (False, False) and type(total) is torch.Tensor and total == 3


def test_what_a_script_sees_of_the_schedule_has_gone_on(tmp_path: Path) -> None:
    class Noting(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            noted.append(given["lr_scheduler"].get_last_lr()[0])

    noted: list[float] = []
    with watched(tmp_path, True) as trainer:
        trainer.add_callback(Noting())
        trainer.train()
    assert trainer.rates == noted and 2 < len({*noted}) < 8
    with watched(tmp_path, True) as trainer:
        trainer.train()
    assert trainer.rates == noted, "also where nothing but a method of the script's looks"


@pytest.mark.parametrize("on_device", [False, True])
def test_a_skipped_step_does_not_move_the_schedule_on(tmp_path: Path, on_device: bool) -> None:
    """As of the plain trainer, whose loop is the one here: its accelerator has no scale of the loss on the CPU."""
    rows, rates = [{"x": torch.ones(4)} for _ in range(8)], []
    model = Steep()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    for _ in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.stack([each["x"] for each in rows]))["loss"]
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        if scaler.get_scale() == before:
            scheduler.step()
    assert 1 < rates.count(1e-3) < 6, "some steps are skipped, and others are not"
    with watched(tmp_path, on_device, max_grad_norm=0.0) as trainer:
        trainer.train()
    assert [each["learning_rate"] for each in trainer.state.log_history if "loss" in each] == pytest.approx(rates)
    torch.testing.assert_close(trainer.model.linear.weight, model.linear.weight, rtol=1e-3, atol=0.0)


def test_the_seed_is_that_of_dropout(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", seed=7)
    for config, seed in ((None, 7), ({"runtime.seed": 3}, 3)):
        assert WhaleTrainer(nn.Linear(2, 2), arguments, config=config)._sources["config"].runtime.seed == seed


def test_compute_loss_gets_the_output_that_is_there() -> None:
    model, x, output = nn.Linear(2, 2), torch.zeros(1, 2), torch.ones(1, 2)
    computed = Computed(model, output, {"x": x})
    assert computed(x=x, num_items_in_batch=3) is output
    assert computed.weight is model.weight
    with pytest.raises(CaptureError, match="compute_loss passes x to the model"):
        computed(x=x + 1)
