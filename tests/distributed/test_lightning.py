"""WhaleStrategy logs, validates, saves and goes on as Lightning does in one process on the same global batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.test_examples import printed_by
from tests.distributed.world import World

pytest.importorskip("lightning", reason="lightning is not installed (pip install whale[lightning])")

PIPELINE = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "planning.search": "off"}
REPLICAS = {"planning.search": "off", "memory.zero": "1"}


def train(
    rank: int,
    num_ranks: int,
    folder: str,
    options: dict[str, Any],
    config: dict[str, Any] | None,
    resume: str | None,
    counts: tuple[int, int] = (44, 10),
) -> Any:
    """What is logged at each step and each validation, the test, predictions, and the weights that the module has afterwards."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader

    from whale.integrations.lightning import WhaleStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
            self.layers[2].bias.requires_grad_(False)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            output = self.layers(batch["x"])
            loss = F.cross_entropy(output, batch["y"])
            self.log("loss", loss.detach(), on_step=True, on_epoch=True)
            self.log("correct", (output.argmax(1) == batch["y"]).float().mean())
            return {"loss": loss}

        def validation_step(self, batch: dict[str, Tensor]) -> None:
            output = self.layers(batch["x"])
            accuracy = (output.argmax(1) == batch["y"]).float().mean()
            self.log_dict({"val_loss": F.cross_entropy(output, batch["y"]), "accuracy": accuracy})

        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("largest", self.layers(batch["x"]).sum(1).mean())

        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.layers(batch["x"])

        def configure_optimizers(self) -> Any:
            decayed = [each for name, each in self.named_parameters() if each.requires_grad and name.endswith("weight")]
            other = [each for name, each in self.named_parameters() if each.requires_grad and name.endswith("bias")]
            optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": 5e-3}], lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Noting(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, dict[str, float]]] = []

        def note(self, what: str, trainer: Any) -> None:
            rates = {f"rate {number}": group["lr"] for number, group in enumerate(trainer.optimizers[0].param_groups)}
            self.seen.append((what, {**rates, **{name: float(value) for name, value in trainer.callback_metrics.items()}}))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.note(f"step {trainer.global_step}", trainer)

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            self.note("epoch", trainer)

    def samples(count: int, seed: int) -> Any:
        numbers = torch.Generator().manual_seed(seed)
        rows = [{"x": torch.randn(6, generator=numbers), "y": torch.randint(3, (), generator=numbers)} for _ in range(count)]
        return rows

    lightning.seed_everything(1)
    module, noting = Module(), Noting()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if config is None else WhaleStrategy(config=config),
        callbacks=[noting, ModelCheckpoint(folder, monitor="val_loss", save_last=True, filename="best")],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
        **options,
    )
    held_out = DataLoader(samples(counts[1], 3), batch_size=6)
    trainer.fit(module, DataLoader(samples(counts[0], 2), batch_size=8, shuffle=True), held_out, ckpt_path=resume)
    [tested] = trainer.test(module, held_out, verbose=False)
    predicted = torch.cat(trainer.predict(module, held_out))
    if config is not None:
        trainer.strategy.engine.close()
    return noting.seen, tested, predicted, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, PIPELINE),
        ({"max_epochs": 2, "val_check_interval": 3}, REPLICAS),
    ],
    ids=["pipeline", "replicas"],
)
def test_logs_and_weights_are_those_of_plain_lightning(
    world: World, tmp_path: Path, options: dict[str, Any], config: dict[str, Any]
) -> None:
    [expected] = world.run(train, str(tmp_path / "plain"), options, None, None, num_ranks=1)
    folder = str(tmp_path / "whale")
    for found in world.run(train, folder, options, config, None, num_ranks=2):
        check(found, expected)
    theirs, ours = (torch.load(tmp_path / each / "best.ckpt", weights_only=False)["state_dict"] for each in ("plain", "whale"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    longer = {**options, "max_epochs": 3}
    [expected] = world.run(train, str(tmp_path / "plain"), longer, None, str(tmp_path / "plain/last.ckpt"), num_ranks=1)
    [found] = world.run(train, str(tmp_path / "one"), longer, {}, f"{folder}/last.ckpt", num_ranks=1)
    check(found, expected)


@pytest.mark.parametrize("config", [REPLICAS, PIPELINE], ids=["replicas", "pipeline"])
def test_last_batches_of_one_row_are_those_of_plain_lightning(world: World, tmp_path: Path, config: dict[str, Any]) -> None:
    counts = 3 * 8 + 1, 6 + 1
    [expected] = world.run(train, str(tmp_path / "plain"), {"max_epochs": 2}, None, None, counts, num_ranks=1)
    for found in world.run(train, str(tmp_path / "whale"), {"max_epochs": 2}, config, None, counts, num_ranks=2):
        check(found, expected)


def check(found: Any, expected: Any) -> None:
    assert [what for what, _ in found[0]] == [what for what, _ in expected[0]]
    for (what, ours), (_, theirs) in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), what
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_example_learns_digits_as_plain_lightning_does(world: World, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    plain = printed_by(world, 1, "examples/digits.py", "--plain", "--epochs", "4", "--output", str(tmp_path / "plain"))
    ours = printed_by(world, 2, "examples/digits.py", "--epochs", "4", "--output", str(tmp_path / "whale"))
    found, expected = (dict(re.findall(r"'(loss|val_loss|accuracy)': ([\d.]+)", text)) for text in (ours, plain))
    assert found.keys() == expected.keys() == {"loss", "val_loss", "accuracy"}
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=5e-3)
    assert float(found["accuracy"]) > 0.9
