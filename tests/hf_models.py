"""Tiny random Hugging Face models of seven families, each with an example batch.

Every builder seeds torch, so equal calls give equal models, and returns ``(model, batch)`` where the model is float32 and
``batch`` holds the keyword arguments that give ``output.loss``. Dropout is 0 unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whale.capture import CapturedProgram, capture
from whale.ir.graph import ModelGraph

Batch = dict[str, Tensor]
VOCABULARY = 61
LENGTH = 9


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _made(model: str, config: str, settings: dict[str, Any]) -> nn.Module:
    import transformers  # takes a second, which whoever needs none of these models does not wait for

    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    assert isinstance(made, nn.Module)
    return made


def _tokens(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def _masked_labels(ids: Tensor) -> Tensor:
    """Labels with a different number of ignored positions in every row."""
    labels = ids.clone()
    labels[torch.rand(labels.shape) < 0.3] = -100
    labels[:, -1] = ids[:, -1]
    return labels


def gpt2(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """GPT-2 with its language-model head; the table is tied to the head."""
    with _seeded(seed):
        settings = {
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        settings |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        model = _made("GPT2LMHeadModel", "GPT2Config", settings | config)
        ids = _tokens(rows)
        return model, {"input_ids": ids, "labels": _masked_labels(ids)}


def bert(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """BERT with its masked-language-model head, an attention mask and segment numbers."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        settings |= {"max_position_embeddings": 16, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        model = _made("BertForMaskedLM", "BertConfig", settings | config)
        ids = _tokens(rows)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (torch.arange(LENGTH) > 4).long().repeat(rows, 1)}
        return model, batch | {"labels": _masked_labels(ids)}


def t5(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """T5, encoder and decoder; one table under four names."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False}
        settings |= {"dropout_rate": dropout, "decoder_start_token_id": 0}
        model = _made("T5ForConditionalGeneration", "T5Config", settings | config)
        return model, {"input_ids": _tokens(rows), "labels": _masked_labels(_tokens(rows, 7))}


def vit(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """ViT for image classification."""
    with _seeded(seed):
        settings = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
        }
        settings |= {"num_labels": 7, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        model = _made("ViTForImageClassification", "ViTConfig", settings | config)
        return model, {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 7, (rows,))}


def resnet(rows: int = 4, seed: int = 0, **config: Any) -> tuple[nn.Module, Batch]:
    """ResNet for image classification; BatchNorm mixes the samples of a batch in training."""
    with _seeded(seed):
        settings = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic", "num_labels": 7}
        model = _made("ResNetForImageClassification", "ResNetConfig", settings | config)
        return model, {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(0, 7, (rows,))}


def llama(rows: int = 4, seed: int = 0, **config: Any) -> tuple[nn.Module, Batch]:
    """Llama with grouped-query attention."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
        model = _made("LlamaForCausalLM", "LlamaConfig", settings | config)
        ids = _tokens(rows)
        return model, {"input_ids": ids, "labels": _masked_labels(ids)}


def mixtral(rows: int = 4, seed: int = 0, **config: Any) -> tuple[nn.Module, Batch]:
    """Mixtral: a mixture of 4 experts, 2 per token."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "experts_implementation": "batched_mm"}
        model = _made("MixtralForCausalLM", "MixtralConfig", settings | config)
        ids = _tokens(rows)
        return model, {"input_ids": ids, "labels": _masked_labels(ids)}


def bart(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """BART: learned positions in encoder and decoder, one table under three names."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
        settings |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        settings |= {"dropout": dropout, "attention_dropout": dropout, "use_cache": False, "decoder_start_token_id": 2}
        model = _made("BartForConditionalGeneration", "BartConfig", settings | config)
        return model, {"input_ids": _tokens(rows), "labels": _masked_labels(_tokens(rows, 7))}


def fnet(rows: int = 4, seed: int = 0, dropout: float = 0.0, **config: Any) -> tuple[nn.Module, Batch]:
    """FNet: Fourier transforms over the sequence and the features in place of attention."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "pad_token_id": 0}
        settings |= {"max_position_embeddings": 16, "hidden_dropout_prob": dropout}
        model = _made("FNetForMaskedLM", "FNetConfig", settings | config)
        ids = _tokens(rows)
        return model, {"input_ids": ids, "labels": _masked_labels(ids)}


def mamba(rows: int = 4, seed: int = 0, **config: Any) -> tuple[nn.Module, Batch]:
    """Mamba: a state-space model, no attention."""
    with _seeded(seed):
        settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 4}
        model = _made("MambaForCausalLM", "MambaConfig", settings | {"use_cache": False} | config)
        ids = _tokens(rows)
        return model, {"input_ids": ids, "labels": _masked_labels(ids)}


BUILDERS: dict[str, Callable[..., tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "llama": llama,
    "mixtral": mixtral,
}

OTHERS: dict[str, Callable[..., tuple[nn.Module, Batch]]] = {"bart": bart, "fnet": fnet, "mamba": mamba}
"""Models of other kinds, which the rules for operators were not written for."""

ALL = {**BUILDERS, **OTHERS}


@cache
def captured(family: str, mode: Any = "train", **settings: Any) -> tuple[nn.Module, Batch, ModelGraph, CapturedProgram]:
    """A model, its batch and their capture, for all tests of a process that change none of them."""
    model, batch = ALL[family](**settings)
    return model, batch, *capture(model, batch, mode=mode)
