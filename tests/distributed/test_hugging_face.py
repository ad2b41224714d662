"""The law for unmodified Hugging Face models: a pipeline of two stages, and uneven data parallel.

Parts of these models compute in float32 whatever their weights are, so the bound is float32's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.training import largest_of, make_cluster
from tests.distributed.world import World

TOLERANCE = 1e-5
ROWS = 8
optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

NO_DROPOUT = {
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout_rate": 0.0,
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
TOKENS = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, **TOKENS}),
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, "pad_token_id": 0}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0, **TOKENS},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5}),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": 5},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2, **TOKENS}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, **TOKENS}),
}
IMAGES = ("vit", "resnet")
SINGLE = ("mixtral",)  # its product of grouped matrices knows no float64


@dataclass(frozen=True)
class Case:
    """A family of models and how to run it."""

    family: str
    speeds: tuple[float, ...]
    config: tuple[tuple[str, Any], ...]


def build(family: str) -> torch.nn.Module:
    import transformers

    config_name, model_name, options = CONFIGS[family]
    kind = getattr(transformers, config_name)
    known = {name: value for name, value in NO_DROPOUT.items() if hasattr(kind(), name)}
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, model_name)(kind(**{**known, **options})).train()
    if family not in SINGLE:
        model.double()
    for module in model.modules():  # statistics of a batch's parts are tested elsewhere
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    return model


def make_batch(family: str, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    if family in IMAGES:
        size = 16 if family == "vit" else 32
        images = torch.randn(ROWS, 3, size, size, generator=random, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (ROWS,), generator=random)}
    tokens = torch.randint(2, 64, (ROWS, 6), generator=random)
    labels = tokens.clone()
    labels[torch.rand(labels.shape, generator=random) < 0.3] = -100
    labels[:, 1] = 2
    batch = {"input_ids": tokens, "labels": labels}
    if family in ("bert", "t5"):
        mask = torch.ones_like(tokens)
        mask[::2, -2:] = 0
        batch["attention_mask"] = mask
    return batch


def captured_family(family: str) -> Captured:
    return captured_once(_built, family)


def _built(family: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return build(family), make_batch(family, 1)


def _prepare(family: str) -> None:
    captured_family(family)


def own_loss(output: Any, batch: Any) -> Any:
    return output.loss


def train_rank(rank: int, num_ranks: int, case: Case) -> reference.Run:
    batches, made = [make_batch(case.family, seed) for seed in (1, 2)], captured_family(case.family)
    engine = whale.parallelize(
        made.model, optimizer=optimizer, batch=made.batch, config=dict(case.config), cluster=make_cluster(case.speeds)
    )
    try:
        losses, gradients = [float(engine.step(batches[0]))], reference.copy_of(engine.gradients())
        losses.append(float(engine.step(batches[1])))
        state = engine.state_dict()
        assert state is not None
        return reference.Run(losses, gradients, reference.copy_of(state))
    finally:
        engine.close()


@lru_cache(maxsize=1)  # both plans of a family come one after the other
def train_reference(family: str) -> reference.Run:
    model = build(family)
    return reference.train(model, own_loss, [make_batch(family, seed) for seed in (1, 2)], optimizer)


PLANS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "pipeline": ((1.0, 1.0), {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}),
    "uneven data parallel": ((1.0, 3.0), {"pipeline.num_stages": 1}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", CONFIGS)
def test_hugging_face(world: World, family: str, plan: str) -> None:
    speeds, config = PLANS[plan]
    world.prepare(_prepare, family)
    runs = world.run(train_rank, Case(family, speeds, tuple(config.items())), num_ranks=len(speeds))
    error, where = largest_of(runs, train_reference(family))
    assert error < TOLERANCE, where
