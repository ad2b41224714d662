"""Models wrapped by PEFT: most parameters frozen, small ones beside them in training."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
from torch import nn

from zoo.entry import Entry, image_classes
from zoo.transformers_text import built, causal_batch, class_batch, pair_batch

GPT2 = "GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = "LlamaConfig", "LlamaForCausalLM", {}
BERT = "BertConfig", "BertForSequenceClassification", {"num_labels": 5}
T5 = "T5Config", "T5ForConditionalGeneration", {"decoder_start_token_id": 0, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
VIT = "ViTConfig", "ViTForImageClassification", {"image_size": 16, "patch_size": 8, "num_labels": 5}


def wrapped(base: tuple[str, str, dict[str, Any]], method: str, options: dict[str, Any]) -> nn.Module:
    """A base model and PEFT's way to train it."""
    model: nn.Module = peft.get_peft_model(built(*base), getattr(peft, method)(**options))
    return model


def entry(name: str, base: tuple[str, str, dict[str, Any]], batch: Any, method: str, **options: Any) -> Entry:
    return Entry(f"peft/{name}", partial(wrapped, base, method, options), batch)


ATTENTION = ["q_proj", "v_proj"]
ENTRIES = (
    entry("lora-gpt2", GPT2, causal_batch, "LoraConfig", r=4, lora_dropout=0.0, task_type="CAUSAL_LM", fan_in_fan_out=True),
    entry("lora-llama", LLAMA, causal_batch, "LoraConfig", r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    entry("dora-llama", LLAMA, causal_batch, "LoraConfig", r=4, target_modules=ATTENTION, use_dora=True, task_type="CAUSAL_LM"),
    entry("lora-bert", BERT, class_batch, "LoraConfig", r=4, target_modules=["query", "value"], task_type="SEQ_CLS"),
    entry(
        "lora-vit",
        VIT,
        image_classes(16, name="pixel_values"),
        "LoraConfig",
        r=4,
        target_modules="all-linear",
        modules_to_save=["classifier"],
    ),
    entry("ia3-t5", T5, pair_batch, "IA3Config", task_type="SEQ_2_SEQ_LM"),
    entry("prompt-tuning-gpt2", GPT2, causal_batch, "PromptTuningConfig", num_virtual_tokens=4, task_type="CAUSAL_LM"),
    entry("loha-llama", LLAMA, causal_batch, "LoHaConfig", r=4, target_modules=ATTENTION),
    entry("vera-llama", LLAMA, causal_batch, "VeraConfig", r=4, target_modules=ATTENTION),
)
