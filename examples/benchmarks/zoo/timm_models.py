"""timm's models of images, narrow and shallow where they can be."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.layers import GatedMlp as SpatialMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock
from torch import nn

from zoo.entry import Entry, class_loss, image_classes


def built(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **options)
    return model


def entry(name: str, size: int = 32, **options: Any) -> Entry:
    return Entry(f"timm/{name}", partial(built, name, options), image_classes(size), class_loss)


def mixer(name: str, **options: Any) -> Entry:
    build = partial(MlpMixer, num_classes=5, img_size=32, patch_size=8, embed_dim=32, num_blocks=2, **options)
    return Entry(f"timm/{name}", build, image_classes(32), class_loss)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

ENTRIES = (
    entry("beit_base_patch16_224", **VIT),
    entry("cait_xxs24_224", **VIT),
    entry("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20)),
    entry("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20)),
    entry("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(2, 2, 2, 2), window_size=2),
    entry("deit_tiny_distilled_patch16_224", **VIT),
    entry("eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    mixer("gmlp", mlp_ratio=2, block_layer=SpatialGatingBlock, mlp_layer=SpatialMlp),
    entry("lcnet_050"),
    mixer("mlp_mixer"),
    entry("mobilenetv3_small_050"),
    entry("pit_ti_224", img_size=32, patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(2, 2, 2)),
    entry("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    mixer("resmlp", mlp_ratio=4, block_layer=ResBlock, norm_layer=Affine),
    entry("seresnet18", layers=(1, 1, 1, 1)),
    entry("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(1, 2), num_heads=(2, 4)),
    entry("tnt_s_patch16_224", img_size=32, patch_size=8, embed_dim=32, inner_dim=8, depth=2, num_heads_inner=2, num_heads_outer=4),
    entry("twins_svt_small", img_size=64, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    entry("vit_tiny_patch16_224", **VIT),
    entry("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
)
