"""WhaleTrainer logs, evaluates, saves and goes on as transformers' Trainer does in one process on the same global batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_examples import printed_by
from tests.distributed.world import World

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}
ROWS, EVAL_ROWS = 8, 4


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Token rows of which some are padded: losses of two batches of one update are means over unlike counts."""
    torch.manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(2, 32, (7,))
        labels = torch.where(torch.arange(7) < (7 if number % 3 else 4), ids, -100)
        found.append({"input_ids": ids, "labels": labels})
    return found


def train(
    rank: int,
    num_ranks: int,
    folder: str,
    options: dict[str, Any],
    config: dict[str, Any] | None,
    resume: str | None,
    lora: bool,
    counts: tuple[int, int],
) -> Any:
    """What a trainer logs, by Whale where there are settings for it; and the weights that the script's model has afterwards."""
    import numpy as np
    import peft
    import transformers

    from whale.integrations.transformers import WhaleTrainer

    tokens = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **tokens))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=ROWS // num_ranks,
        per_device_eval_batch_size=EVAL_ROWS // num_ranks,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )

    def metrics(prediction: Any) -> dict[str, float]:
        return {"mean": float(np.asarray(prediction.predictions).mean()), "rows": len(prediction.label_ids)}

    given: dict[str, Any] = {"train_dataset": samples(counts[0]), "eval_dataset": samples(counts[1]), "compute_metrics": metrics}
    make = transformers.Trainer if config is None else partial(WhaleTrainer, config=config)
    trainer = make(model, arguments, **given)
    trainer.train(resume_from_checkpoint=resume)
    wanted = re.compile(r"loss|grad_norm|learning_rate|eval_mean|eval_rows|train_loss|step$")
    logs = [{key: value for key, value in each.items() if wanted.search(key)} for each in trainer.state.log_history]
    if trainer.is_world_process_zero():  # as scripts do
        trainer.save_model(f"{folder}/final")
    if config is not None:
        trainer.engine.close()
    return logs, {name: value.clone() for name, value in model.state_dict().items()}


Plain = Callable[[dict[str, Any], bool, tuple[int, int]], tuple[Path, Any]]


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Trains by the plain trainer, once for all tests with these options: its folder, and what `train` returns."""
    made: dict[str, tuple[Path, Any]] = {}

    def find(options: dict[str, Any], lora: bool, counts: tuple[int, int]) -> tuple[Path, Any]:
        key = repr((options, lora, counts))
        if key not in made:
            folder = tmp_path_factory.mktemp("plain")
            [run] = world.run(train, str(folder), options, None, None, lora, counts, num_ranks=1)
            made[key] = folder, run
        return made[key]

    return find


PIPELINE = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2, "planning.search": "off"}


@pytest.mark.parametrize(
    ("options", "config", "lora"),
    [
        ({}, PIPELINE, False),
        ({"label_smoothing_factor": 0.1}, {"planning.search": "off", "memory.zero": "1"}, False),
        ({}, PIPELINE, True),
        ({}, {"planning.search": "off", "memory.zero": "3"}, True),
    ],
    ids=["pipeline", "replicas and a loss of the trainer's", "adapters of a frozen model", "adapters of one that is shared out"],
)
def test_logs_and_weights_are_those_of_the_plain_trainer(
    world: World, plain: Plain, tmp_path: Path, options: dict[str, Any], config: dict[str, Any], lora: bool
) -> None:
    plain_folder, (expected, weights) = plain(options, lora, (44, 10))
    folder = str(tmp_path / "whale")
    for logs, state in world.run(train, folder, options, config, None, lora, (44, 10), num_ranks=2):
        check(logs, expected)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    saved = "adapter_model.safetensors" if lora else "model.safetensors"
    theirs, ours = (load_file(each / "checkpoint-2" / saved) for each in (plain_folder, Path(folder)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    theirs, ours = (load_file(each / "final" / saved) for each in (plain_folder, Path(folder)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if config is PIPELINE:
        [(logs, state)] = world.run(train, folder, options, {}, f"{folder}/checkpoint-2", lora, (44, 10), num_ranks=1)
        check(logs, expected)
        torch.testing.assert_close(state, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [{"planning.search": "off"}, PIPELINE], ids=["replicas", "pipeline"])
def test_last_batches_of_one_row_are_those_of_the_plain_trainer(world: World, plain: Plain, tmp_path: Path, config: dict[str, Any]) -> None:
    counts = 5 * ROWS + 1, 2 * EVAL_ROWS + 1
    _, (expected, weights) = plain({}, False, counts)
    for logs, state in world.run(train, str(tmp_path), {}, config, None, False, counts, num_ranks=2):
        check(logs, expected)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def check(logs: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Numbers are equal to the rounding of float32; a run that goes on logs the mean loss of its own steps alone."""
    assert [each.keys() for each in logs] == [each.keys() for each in expected]
    for ours, theirs in zip(logs, expected, strict=True):
        assert ours["step"] == theirs["step"]
        for key in ours.keys() - {"train_loss"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (key, ours, theirs)


def test_the_example_trains_as_the_plain_trainer(world: World, tmp_path: Path) -> None:
    script = ("examples/classify_sources.py", "--steps", "5")
    plain = printed_by(world, 1, *script, "--plain", "--rows", "32", "--output", str(tmp_path / "plain"))
    ours = printed_by(world, 2, *script, "--rows", "16", "--output", str(tmp_path / "whale"))
    found, expected = (re.findall(r"'(?:loss|grad_norm|eval_loss|eval_accuracy)': '?([\d.]+)", text) for text in (ours, plain))
    assert len(expected) == 2 * 5 + 2 * 3, "five steps, and evaluation after two, four and the last"
    assert [float(each) for each in found] == pytest.approx([float(each) for each in expected], rel=2e-3)


@pytest.mark.slow
def test_adapters_of_a_frozen_half_precision_model_learn_other_packages(world: World, tmp_path: Path) -> None:
    base, script = str(tmp_path / "base"), "examples/classify_sources.py"
    printed_by(world, 1, script, "--plain", "--steps", "40", "--output", base)
    adapting = (script, "--adapt", f"{base}/checkpoint-40", "--steps", "20")
    plain = printed_by(world, 1, *adapting, "--plain", "--output", str(tmp_path / "plain"))
    ours = printed_by(world, 2, *adapting, "--rows", "16", "--output", str(tmp_path / "whale"))
    losses, own_losses = ([float(each) for each in re.findall(r"'(?:eval_)?loss': '?([\d.]+)", text)] for text in (plain, ours))
    assert len(losses) == 5 + 2 and own_losses == pytest.approx(losses, rel=0.01), "to the noise of bfloat16"
    found, expected = ([float(each) for each in re.findall(r"'eval_accuracy': '?([\d.]+)", text)] for text in (ours, plain))
    assert found == pytest.approx(expected, abs=0.05)
    assert found[-1] > 0.35, "a guess has a quarter of four packages"
    theirs, saved = (load_file(tmp_path / each / "checkpoint-20/adapter_model.safetensors") for each in ("plain", "whale"))
    assert {name: (value.dtype, value.shape) for name, value in saved.items()} == {
        name: (value.dtype, value.shape) for name, value in theirs.items()
    }
