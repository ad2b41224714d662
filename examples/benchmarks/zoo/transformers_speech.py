"""Models of Hugging Face's transformers for sound, series of numbers, and decisions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.entry import Batch, Entry, classes, tokens
from zoo.transformers_text import built

SPEECH = {
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "vocab_size": 16,
}


def wave_batch(rows: int) -> Batch:
    """Sound, and the letters that are said in it."""
    return {"input_values": torch.randn(rows, 320), "labels": tokens(rows, 4, 16, 1)}


def wave_classes(rows: int) -> Batch:
    """Sound of a class."""
    return {"input_values": torch.randn(rows, 320), "labels": classes(rows)}


def spectrum_batch(rows: int) -> Batch:
    """Spectra over time, and the tokens that are said in them."""
    return {"input_features": torch.randn(rows, 8, 32), "labels": tokens(rows, 6)}


def frames_batch(rows: int) -> Batch:
    """Spectra, frame after frame, of a class."""
    return {"input_values": torch.randn(rows, 32, 16), "labels": classes(rows)}


def features_batch(rows: int) -> Batch:
    """The same, with tokens to write."""
    return {"input_features": torch.randn(rows, 32, 8), "labels": tokens(rows, 6)}


def series_batch(rows: int) -> Batch:
    """The past of a series and its future."""
    past, future, lags = 16, 4, 3
    return {
        "past_values": torch.randn(rows, past + lags),
        "past_time_features": torch.randn(rows, past + lags, 1),
        "past_observed_mask": torch.ones(rows, past + lags),
        "future_values": torch.randn(rows, future),
        "future_time_features": torch.randn(rows, future, 1),
    }


def channels_batch(rows: int) -> Batch:
    """Several series at once, past and future."""
    return {"past_values": torch.randn(rows, 16, 3), "future_values": torch.randn(rows, 4, 3)}


def episode_batch(rows: int) -> Batch:
    """Episodes: states, actions and what they earned."""
    return {
        "states": torch.randn(rows, 6, 5),
        "actions": torch.randn(rows, 6, 2),
        "rewards": torch.randn(rows, 6, 1),
        "returns_to_go": torch.randn(rows, 6, 1),
        "timesteps": torch.arange(6).repeat(rows, 1),
        "attention_mask": torch.ones(rows, 6, dtype=torch.long),
    }


def action_loss(output: Any, batch: Batch) -> Tensor:
    """How far the actions are from those that were taken."""
    return (output.action_preds - batch["actions"]).square().mean()


def entry(name: str, family: str, head: str, batch: Any, single: bool = False, **options: Any) -> Entry:
    return Entry(f"transformers/{name}", partial(built, f"{family}Config", f"{family}{head}", options), batch, single=single)


SERIES = {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1, "scaling": "mean"}
PATCHES = {"context_length": 16, "prediction_length": 4, "num_input_channels": 3, "patch_length": 4, "patch_stride": 4, "loss": "mse"}

ENTRIES = (
    entry(
        "ast",
        "AST",
        "ForAudioClassification",
        frames_batch,
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        num_labels=5,
    ),
    entry("hubert", "Hubert", "ForCTC", wave_batch, **SPEECH),
    entry(
        "speech-to-text",
        "Speech2Text",
        "ForConditionalGeneration",
        features_batch,
        input_feat_per_channel=8,
        input_channels=1,
        conv_channels=16,
        max_source_positions=32,
        max_target_positions=16,
        decoder_start_token_id=1,
    ),
    entry("wav2vec2", "Wav2Vec2", "ForCTC", wave_batch, **SPEECH),
    entry("wav2vec2-classifier", "Wav2Vec2", "ForSequenceClassification", wave_classes, classifier_proj_size=16, num_labels=5, **SPEECH),
    entry("wavlm", "WavLM", "ForSequenceClassification", wave_classes, classifier_proj_size=16, num_labels=5, num_buckets=8, **SPEECH),
    entry(
        "whisper", "Whisper", "ForConditionalGeneration", spectrum_batch, num_mel_bins=8, max_source_positions=16, max_target_positions=16
    ),
    entry("autoformer", "Autoformer", "ForPrediction", series_batch, single=True, label_length=4, moving_average=3, **SERIES),
    entry("time-series-transformer", "TimeSeriesTransformer", "ForPrediction", series_batch, **SERIES),
    entry(
        "patchtst",
        "PatchTST",
        "ForPrediction",
        channels_batch,
        ffn_dim=48,
        **PATCHES,
    ),
    entry(
        "patchtsmixer",
        "PatchTSMixer",
        "ForPrediction",
        channels_batch,
        num_layers=2,
        **PATCHES,
    ),
    Entry(
        "transformers/decision-transformer",
        partial(
            built,
            "DecisionTransformerConfig",
            "DecisionTransformerModel",
            {"state_dim": 5, "act_dim": 2, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 16},
        ),
        episode_batch,
        action_loss,
    ),
)
