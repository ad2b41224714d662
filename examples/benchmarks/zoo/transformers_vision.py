"""Models of Hugging Face's transformers for images, video, and images with text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.entry import Batch, Entry, classes, image_classes, images, padding_mask, tokens
from zoo.transformers_text import SIZES, built, configured

TEXT = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads", "d_model")}
VISION = {**TEXT, "image_size": 16, "patch_size": 8}
"""The sizes of a model of two towers."""

pictures = image_classes(16, name="pixel_values")
larger = image_classes(32, name="pixel_values")


def entry(
    name: str,
    family: str,
    head: str = "ForImageClassification",
    batch: Callable[[int], Batch] = pictures,
    single: bool = False,
    **options: Any,
) -> Entry:
    """An entry of a family of configurations and a head."""
    return Entry(f"transformers/{name}", partial(built, f"{family}Config", f"{family}{head}", options), batch, single=single)


def segment_batch(rows: int) -> Batch:
    """Images, and a class for every pixel."""
    return {"pixel_values": images(rows), "labels": torch.randint(0, 5, (rows, 32, 32))}


def video_batch(rows: int) -> Batch:
    """Clips of four frames, with classes."""
    return {"pixel_values": torch.randn(rows, 4, 3, 16, 16), "labels": classes(rows)}


def patches_batch(rows: int) -> Batch:
    """Images, of which a quarter of the four patches is to be seen, alike in all rows; the noise says which."""
    return {"pixel_values": images(rows, 16), "noise": torch.rand(rows, 4)}


def pair_batch(rows: int) -> Batch:
    """Images with texts, alike by row."""
    return {"input_ids": tokens(rows), "pixel_values": images(rows, 16), "attention_mask": padding_mask(rows)}


def towers(family: str, options: dict[str, Any]) -> nn.Module:
    """A model of a text and a vision tower that compares all rows with one another in its own loss."""
    kind = getattr(transformers, f"{family}Config")
    text, vision = (configured(f"{family}{part}Config", {}, sizes).to_dict() for part, sizes in (("Text", TEXT), ("Vision", VISION)))
    model: nn.Module = getattr(transformers, f"{family}Model")(kind(text_config=text, vision_config=vision, **options))
    return Contrastive(model)


class Contrastive(nn.Module):
    """Asks a model of two towers for its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, return_loss=True)


def detection_batch(rows: int) -> Batch:
    """Images with two boxes each."""
    boxes = torch.rand(rows, 2, 4) * 0.4 + 0.2
    return {"pixel_values": images(rows), "labels": [{"class_labels": classes(2), "boxes": each.float()} for each in boxes]}


def captioner(options: dict[str, Any]) -> nn.Module:
    """A ViT that a GPT-2 describes."""
    encoder = configured("ViTConfig", {"image_size": 16, "patch_size": 8})
    decoder = configured("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True, "is_decoder": True})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: nn.Module = transformers.VisionEncoderDecoderModel(config)
    return model


def caption_batch(rows: int) -> Batch:
    return {"pixel_values": images(rows, 16), "labels": tokens(rows, 6)}


SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_hidden_layers": 2,
    "num_attention_heads": [2, 4],
    "num_labels": 5,
}

CLASSIFIERS = (
    entry("beit", "Beit", image_size=16, patch_size=8, num_labels=5),
    entry("convnext", "ConvNext", batch=larger, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], num_hidden_layers=4, num_labels=5),
    entry("convnextv2", "ConvNextV2", batch=larger, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], num_hidden_layers=4, num_labels=5),
    entry("deit", "DeiT", image_size=16, patch_size=8, num_labels=5),
    entry("dinov2", "Dinov2", image_size=16, patch_size=8, num_labels=5, mlp_ratio=2),
    entry(
        "focalnet",
        "FocalNet",
        batch=larger,
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        num_labels=5,
    ),
    entry(
        "levit",
        "Levit",
        batch=larger,
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=5,
    ),
    entry("mobilenet-v1", "MobileNetV1", batch=larger, image_size=32, depth_multiplier=0.25, num_labels=5),
    entry("mobilenet-v2", "MobileNetV2", batch=larger, image_size=32, depth_multiplier=0.25, num_labels=5),
    entry("poolformer", "PoolFormer", batch=larger, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], num_labels=5),
    entry(
        "pvt",
        "Pvt",
        batch=larger,
        image_size=32,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 3, 4],
        num_labels=5,
    ),
    entry(
        "regnet", "RegNet", batch=larger, embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], groups_width=4, num_labels=5
    ),
    entry("resnet", "ResNet", batch=larger, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5),
    entry(
        "segformer",
        "Segformer",
        "ForSemanticSegmentation",
        segment_batch,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    ),
    entry("swin", "Swin", batch=larger, **SWIN),
    entry("swinv2", "Swinv2", batch=larger, **SWIN),
    entry("timesformer", "Timesformer", "ForVideoClassification", video_batch, image_size=16, patch_size=8, num_frames=4, num_labels=5),
    entry("videomae", "VideoMAE", "ForVideoClassification", video_batch, image_size=16, patch_size=8, num_frames=4, num_labels=5),
    entry("vit", "ViT", image_size=16, patch_size=8, num_labels=5),
    entry(
        "vit-mae",
        "ViTMAE",
        "ForPreTraining",
        patches_batch,
        image_size=16,
        patch_size=8,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
    ),
    entry(
        "yolos",
        "Yolos",
        "ForObjectDetection",
        detection_batch,
        single=True,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=4,
        num_labels=5,
    ),
)

TOWERS = (
    Entry("transformers/clip", partial(towers, "CLIP", {"projection_dim": 16}), pair_batch),
    Entry("transformers/siglip", partial(towers, "Siglip", {}), pair_batch),
    Entry("transformers/blip", partial(towers, "Blip", {"projection_dim": 16}), pair_batch),
    Entry("transformers/vision-encoder-decoder", partial(captioner, {}), caption_batch),
)

ENTRIES = CLASSIFIERS + TOWERS
