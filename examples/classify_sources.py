"""Transformers' Trainer on the devices of a plan: which package of the standard library does a piece of source text come from?

    whale run --ranks 2 examples/classify_sources.py
    python examples/classify_sources.py --plain          the same with transformers.Trainer, in one process
    whale run --ranks 2 examples/classify_sources.py --adapt checkpoints/classify_sources/checkpoint-100

The first two differ by the class that is made. The third teaches the trained model other packages by LoRA: the model stays as it is, in
bfloat16, and small float32 matrices beside its own are trained. Checkpoints are what PEFT saves and loads.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

from whale.integrations.transformers import WhaleTrainer

PACKAGES, OTHER_PACKAGES = ("asyncio", "email", "encodings", "multiprocessing"), ("distutils", "idlelib", "tkinter", "unittest")
LENGTH, VOCABULARY = 32, 4096
ADAPTED = ("word_embeddings", "query", "key", "value", "dense", "classifier")


class Pieces(Dataset[dict[str, torch.Tensor]]):
    """Pieces of source text, each word by a number, and the number of their package; every fifth, by its words, is held out."""

    def __init__(self, packages: tuple[str, ...], held_out: bool) -> None:
        self.pieces: list[tuple[list[int], int]] = []
        for label, package in enumerate(packages):
            text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib"), package).glob("*.py")))
            words = [crc32(word) % VOCABULARY for word in re.findall(rb"\w+", text)[:32_000]]
            pieces = (words[start : start + LENGTH] for start in range(0, len(words) - LENGTH, LENGTH))
            self.pieces += [(piece, label) for piece in pieces if (sum(piece) % 5 == 0) == held_out]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece, label = self.pieces[index]
        return {"input_ids": torch.tensor(piece), "labels": torch.tensor(label)}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def make_model() -> BertForSequenceClassification:
    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=len(PACKAGES),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(shape)


def with_adapters(checkpoint: str) -> torch.nn.Module:
    base = BertForSequenceClassification.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=[*ADAPTED]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="transformers.Trainer in place of WhaleTrainer")
    parser.add_argument("--adapt", metavar="CHECKPOINT", help="adapt the model of a checkpoint to other packages, by LoRA")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--rows", type=int, default=32, help="of each rank's share of a global batch (default 32)")
    parser.add_argument("--output", default="checkpoints/classify_sources", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in it")
    options = parser.parse_args()

    torch.manual_seed(0)
    packages = OTHER_PACKAGES if options.adapt else PACKAGES
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        per_device_eval_batch_size=64,
        learning_rate=5e-3 if options.adapt else 2e-3,
        warmup_steps=10,
        logging_steps=max(1, options.steps // 5),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_steps=max(1, options.steps // 2),
        report_to="none",
        disable_tqdm=True,
    )
    make = Trainer if options.plain else WhaleTrainer
    trainer = make(
        with_adapters(options.adapt) if options.adapt else make_model(),
        arguments,
        train_dataset=Pieces(packages, held_out=False),
        eval_dataset=Pieces(packages, held_out=True),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)


if __name__ == "__main__":
    main()
