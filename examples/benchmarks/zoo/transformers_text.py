"""Text models of Hugging Face's transformers: encoders, decoders, both, mixtures of experts, state spaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from zoo.entry import Batch, Entry, classes, masked_labels, padding_mask, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "embedding_size": 16,
    "head_dim": 8,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "sliding_window": 4,
}
"""What configurations call their sizes; each takes those that it has."""


def configured(config: str, options: dict[str, Any], sizes: dict[str, Any] = SIZES) -> Any:
    """A tiny configuration, without dropout."""
    kind = getattr(transformers, config)
    known = set(vars(kind())) | set(kind.attribute_map)
    drops = {name: 0.0 for name in known if ("drop" in name or "pdrop" in name) and isinstance(getattr(kind(), name, None), float)}
    return kind(**{**{name: value for name, value in sizes.items() if name in known}, **drops, **options})


def built(config: str, model: str, options: dict[str, Any]) -> nn.Module:
    """A model of a tiny configuration."""
    made: nn.Module = getattr(transformers, model)(configured(config, options))
    return made


def causal_batch(rows: int) -> Batch:
    """Tokens to predict from those before them, some ignored."""
    ids = tokens(rows)
    return {"input_ids": ids, "labels": masked_labels(ids)}


def padded_batch(rows: int) -> Batch:
    """The same, padded."""
    return {**causal_batch(rows), "attention_mask": padding_mask(rows)}


def class_batch(rows: int) -> Batch:
    """Padded tokens, and a class for every row."""
    return {"input_ids": tokens(rows), "attention_mask": padding_mask(rows), "labels": classes(rows)}


def answer_batch(rows: int) -> Batch:
    """Tokens, and where the answer begins and ends."""
    return {"input_ids": tokens(rows), "start_positions": torch.randint(0, 4, (rows,)), "end_positions": torch.randint(4, 8, (rows,))}


def pair_batch(rows: int) -> Batch:
    """Tokens to read and tokens to write."""
    return {"input_ids": tokens(rows), "attention_mask": padding_mask(rows), "labels": masked_labels(tokens(rows, 6))}


def entry(name: str, family: str, head: str, batch: Callable[[int], Batch] = causal_batch, single: bool = False, **options: Any) -> Entry:
    """An entry of a family of configurations and a head."""
    return Entry(f"transformers/{name}", partial(built, f"{family}Config", f"{family}{head}", options), batch, single=single)


decoder = partial(entry, head="ForCausalLM")
encoder = partial(entry, head="ForMaskedLM", batch=padded_batch)
both = partial(entry, head="ForConditionalGeneration", batch=pair_batch)

ENCODERS = (
    encoder("albert", "Albert"),
    encoder("bert", "Bert"),
    entry("bert-classifier", "Bert", "ForSequenceClassification", class_batch, num_labels=5),
    entry("bert-answers", "Bert", "ForQuestionAnswering", answer_batch),
    entry("bert-tokens", "Bert", "ForTokenClassification", padded_batch, num_labels=64),
    encoder("convbert", "ConvBert", conv_kernel_size=3),
    encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8),
    encoder("deberta-v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, max_relative_positions=8),
    encoder("distilbert", "DistilBert", dim=32, n_heads=4, n_layers=2, hidden_dim=48),
    encoder("electra", "Electra"),
    encoder("esm", "Esm", mask_token_id=3),
    encoder("fnet", "FNet", batch=causal_batch),
    encoder("longformer", "Longformer", attention_window=4),
    encoder("modernbert", "ModernBert", reference_compile=False, local_attention=4, global_attn_every_n_layers=2),
    encoder("mpnet", "MPNet"),
    encoder("roberta", "Roberta"),
    encoder("roformer", "RoFormer"),
    encoder("squeezebert", "SqueezeBert", embedding_size=32),
)

DECODERS = (
    decoder("biogpt", "BioGpt"),
    decoder("bloom", "Bloom", n_layer=2, n_head=4),
    decoder("codegen", "CodeGen", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    decoder("cohere", "Cohere"),
    decoder("falcon", "Falcon"),
    decoder("gemma", "Gemma"),
    decoder("gemma2", "Gemma2", query_pre_attn_scalar=8),
    Entry("transformers/gemma3", partial(built, "Gemma3TextConfig", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 8}), causal_batch),
    entry("gpt2", "GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4),
    entry("gpt2-padded", "GPT2", "LMHeadModel", padded_batch, n_embd=32, n_layer=2, n_head=4),
    decoder("gpt-neo", "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    decoder("gpt-neox", "GPTNeoX"),
    decoder("gptj", "GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    decoder("granite", "Granite"),
    decoder("llama", "Llama"),
    decoder("llama-padded", "Llama", batch=padded_batch),
    decoder("mistral", "Mistral"),
    decoder("mpt", "Mpt", n_heads=4, n_layers=2),
    decoder("olmo2", "Olmo2"),
    decoder("opt", "OPT", ffn_dim=48, word_embed_proj_dim=32),
    decoder("phi", "Phi"),
    decoder("phi3", "Phi3"),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3"),
    decoder("stablelm", "StableLm"),
    decoder("starcoder2", "Starcoder2"),
    decoder("xglm", "XGLM", single=True, num_layers=2, attention_heads=4, ffn_dim=48),
)

PAIRS = (
    both("bart", "Bart"),
    both("blenderbot", "Blenderbot"),
    both("m2m-100", "M2M100"),
    both("mbart", "MBart"),
    both("pegasus", "Pegasus"),
    both("t5", "T5", decoder_start_token_id=0, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    both("umt5", "UMT5", d_kv=8, d_ff=48, num_layers=2, num_heads=4),
)

EXPERTS = (
    decoder(
        "deepseek-v3",
        "DeepseekV3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        single=True,
    ),
    decoder("gpt-oss", "GptOss", single=True),
    decoder("mixtral", "Mixtral", single=True),
    decoder("mixtral-balanced", "Mixtral", single=True, output_router_logits=True),
    decoder("olmoe", "Olmoe", single=True),
    decoder("qwen2-moe", "Qwen2Moe", single=True),
    decoder("qwen3-moe", "Qwen3Moe", single=True),
    both(
        "switch-transformers",
        "SwitchTransformers",
        single=True,
        decoder_start_token_id=0,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
)

STATES = (
    decoder("falcon-mamba", "FalconMamba", state_size=4, time_step_rank=4),
    decoder("mamba", "Mamba", state_size=4, time_step_rank=4),
    decoder("mamba2", "Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    decoder(
        "recurrent-gemma", "RecurrentGemma", sliding_window=4, lru_width=32, attention_window_size=4, block_types=["recurrent", "attention"]
    ),
    decoder("rwkv", "Rwkv", attention_hidden_size=32, context_length=16),
)

ENTRIES = ENCODERS + DECODERS + PAIRS + EXPERTS + STATES
