"""Models of Hugging Face's transformers of rarer kinds: hybrids, documents, tables, long texts, other ways to attend."""

from __future__ import annotations

import torch

from zoo.entry import Batch, classes, image_classes, images, masked_labels, padding_mask, tokens
from zoo.transformers_speech import SPEECH, wave_batch, wave_classes
from zoo.transformers_text import both, causal_batch, decoder, encoder, entry, padded_batch


def long_pair_batch(rows: int) -> Batch:
    return {"input_ids": tokens(rows, 16), "attention_mask": padding_mask(rows, 16), "labels": masked_labels(tokens(rows, 6))}


def box_batch(rows: int) -> Batch:
    """Words with their boxes on the page."""
    corner = torch.randint(0, 16, (rows, 8, 2))
    ids = tokens(rows)
    return {"input_ids": ids, "bbox": torch.cat((corner, corner + torch.randint(0, 16, (rows, 8, 2))), -1), "labels": masked_labels(ids)}


def table_batch(rows: int) -> Batch:
    """Tables as words with their columns, rows and ranks."""
    ids = tokens(rows)
    return {"input_ids": ids, "token_type_ids": torch.randint(0, 2, (rows, 8, 7)), "labels": masked_labels(ids)}


larger = image_classes(32, name="pixel_values")
smaller = image_classes(16, name="pixel_values")
PERCEIVER = {"num_latents": 4, "d_latents": 16, "num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}

HYBRIDS = (
    decoder("jamba", "Jamba", mamba_d_state=4, mamba_dt_rank=4, single=True, **JAMBA),
    decoder("bamba", "Bamba", mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=4, attn_layer_indices=[1], single=True),
    decoder(
        "zamba2",
        "Zamba2",
        mamba_d_state=4,
        mamba_headdim=8,
        n_mamba_heads=8,
        chunk_size=4,
        layers_block_type=["mamba", "hybrid"],
        use_mem_rope=False,
        single=True,
    ),
    decoder("granite-moe", "GraniteMoe", single=True),
    decoder("jetmoe", "JetMoe", kv_channels=8, single=True),
    decoder("glm", "Glm"),
    decoder(
        "xlstm",
        "xLSTM",
        num_heads=4,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        chunk_size=4,
        single=True,
    ),
    decoder("diffllama", "DiffLlama"),
)

TEXTS = (
    entry("xlnet", "XLNet", "LMHeadModel", causal_batch, d_model=32, n_layer=2, n_head=4, d_inner=48),
    encoder("funnel", "Funnel", d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1),
    encoder("big-bird", "BigBird", attention_type="original_full"),
    encoder("yoso", "Yoso", use_expectation=True),
    encoder("mobilebert", "MobileBert", intra_bottleneck_size=16, true_hidden_size=16),
    entry("xlm", "XLM", "WithLMHeadModel", padded_batch, emb_dim=32, n_layers=2, n_heads=4, n_langs=1, vocab_size=64, n_words=64),
    entry("luke", "Luke", "ForMaskedLM", padded_batch, entity_vocab_size=16, entity_emb_size=16),
    both("longt5", "LongT5", batch=long_pair_batch, d_kv=8, d_ff=48, num_layers=2, num_heads=4, local_radius=3, decoder_start_token_id=0),
)

PAGES = (
    encoder("layoutlm", "LayoutLM", batch=box_batch, max_2d_position_embeddings=64),
    encoder("tapas", "Tapas", batch=table_batch, type_vocab_sizes=[3, 8, 8, 2, 8, 8, 2]),
)

SENSES = (
    entry(
        "perceiver",
        "Perceiver",
        "ForSequenceClassification",
        lambda rows: {"inputs": tokens(rows), "attention_mask": padding_mask(rows), "labels": classes(rows)},
        num_labels=5,
        max_position_embeddings=8,
        num_cross_attention_heads=2,
        qk_channels=16,
        v_channels=16,
        **PERCEIVER,
    ),
    entry(
        "dinov2-registers", "Dinov2WithRegisters", "ForImageClassification", smaller, image_size=16, patch_size=8, mlp_ratio=2, num_labels=5
    ),
    entry(
        "bit", "Bit", "ForImageClassification", larger, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4, num_labels=5
    ),
    entry(
        "glpn",
        "GLPN",
        "ForDepthEstimation",
        lambda rows: {"pixel_values": images(rows, 32), "labels": torch.rand(rows, 32, 32) + 0.1},
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
    ),
    entry("sew", "SEW", "ForCTC", wave_batch, squeeze_factor=2, **SPEECH),
    entry(
        "wav2vec2-conformer",
        "Wav2Vec2Conformer",
        "ForSequenceClassification",
        wave_classes,
        classifier_proj_size=16,
        num_labels=5,
        conv_depthwise_kernel_size=3,
        **SPEECH,
    ),
)

ENTRIES = HYBRIDS + TEXTS + PAGES + SENSES
