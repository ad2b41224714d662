"""What WhaleStrategy refuses in words, and what hooks see while they are captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from whale.errors import CaptureError, CheckpointError, ConfigError

lightning = pytest.importorskip("lightning", reason="lightning is not installed (pip install whale[lightning])")

ROWS = torch.randn(8, 4)


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self, change: Callable[[Module, Tensor, Any], Any] = lambda module, loss, batch_idx: loss) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 1), change

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.change(self, self.linear(batch).square().mean(), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Any, *, validates: bool = False, ckpt_path: str | None = None, **options: Any) -> Any:
    from whale.integrations.lightning import WhaleStrategy

    given = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(**{**given, "num_sanity_val_steps": 0, "enable_model_summary": False, **options}, strategy=WhaleStrategy())
    trainer.fit(module, DataLoader(ROWS, batch_size=4), DataLoader(ROWS, batch_size=4) if validates else None, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda module, loss, batch_idx: loss * (2 if batch_idx % 2 else 1), "training_step uses its batch_idx, but is captured once"),
        (lambda module, loss, batch_idx: loss if batch_idx == 0 else 2 * loss, "uses its batch_idx"),
        (
            lambda module, loss, batch_idx: module.log("both", torch.stack((loss, loss))) or loss,
            "metric 'logged both' .* not a scalar tensor",
        ),
        (lambda module, loss, batch_idx: module.log("number", 1.0) or loss, r"self.log of a value that is not a tensor .number: float"),
        (lambda module, loss, batch_idx: {"loss": loss, "twice": 2 * loss}, "training_step returning more than its loss .twice"),
        (
            lambda module, loss, batch_idx: loss * (1 + module.current_epoch),
            "training_step reads trainer.current_epoch ",
        ),
        (lambda module, loss, batch_idx: module.logger.log_metrics({"loss": loss}) or loss, r"training_step reads trainer.logger"),
    ],
    ids=["modulo", "comparison", "no scalar", "a number", "another output", "the epoch", "a logger"],
)
def test_what_a_captured_step_cannot_do_is_said(change: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        fit(Module(change))


def test_what_the_strategy_does_is_left_to_it() -> None:
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization is False"):
        fit(manual)
    own = type("Own", (Module,), {"backward": lambda self, loss: loss.backward()})()
    with pytest.raises(ConfigError, match="does not call backward, which Own overrides"):
        fit(own)
    with pytest.raises(ConfigError, match="does not support gradient_clip_algorithm"):
        fit(Module(), gradient_clip_val=0.5, gradient_clip_algorithm="value")
    with pytest.raises(ConfigError, match=r"Trainer\(precision='bf16-mixed'\)"):
        fit(Module(), precision="bf16-mixed")


def test_a_checkpoint_of_another_strategy_is_not_gone_on_from(tmp_path: Path) -> None:
    plain = lightning.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    plain.fit(Module(), DataLoader(ROWS, batch_size=4))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no .*plain.ckpt.whale"):
        fit(Module(), ckpt_path=str(tmp_path / "plain.ckpt"))


class Validated(Module):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.linear(batch)
        self.log("largest", output.amax(), True, reduce_fx="max")
        return output

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs = outputs


def test_what_a_hook_returns_is_of_all_rows() -> None:
    module = Validated()
    trainer = fit(module, validates=True, max_epochs=1, max_steps=-1)
    torch.testing.assert_close(module.outputs, module.linear(ROWS[4:]).detach())  # by the trained weights, which have come back
    assert float(trainer.callback_metrics["largest"]) == pytest.approx(float(module.linear(ROWS).amax().detach()))


class Counted(Module):
    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.linear(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=batch.size(0))
        return loss


def test_means_over_batches_are_weighted_by_their_own_rows() -> None:
    """A last batch of fewer rows, with a batch_size that is read from the batch."""
    from whale.integrations.lightning import WhaleStrategy

    def logged(**options: Any) -> float:
        torch.manual_seed(0)
        module, given = Counted(), {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(**given, enable_progress_bar=False, enable_model_summary=False, **options)
        trainer.fit(module, DataLoader(torch.cat([ROWS, 9 * ROWS[:1]]), batch_size=4))
        return float(trainer.callback_metrics["loss"])

    assert logged(strategy=WhaleStrategy()) == pytest.approx(logged())


class Counting(lightning.Callback):  # type: ignore[name-defined]
    def __init__(self) -> None:
        self.num_epochs = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.num_epochs += 1


def test_what_callbacks_keep_is_no_part_of_a_capture() -> None:
    """Also where one holds a member of an enum, as `EarlyStopping` does."""
    counting = Counting()
    callbacks = [lightning.pytorch.callbacks.EarlyStopping("largest", patience=9), counting]
    trainer = fit(Validated(), validates=True, max_epochs=3, max_steps=-1, callbacks=callbacks)
    assert counting.num_epochs == 3
    assert {name: len(mode.others) for name, mode in trainer.strategy.engine.modes._modes.items()} == {"train": 0, "eval": 0, "predict": 0}
