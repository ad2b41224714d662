"""torchvision's models of images and video, narrow or shallow where they can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock

from zoo.entry import Batch, Entry, class_loss, image_classes, images

models = torchvision.models
small, middle = (image_classes(size) for size in (32, 64))


def entry(
    name: str, build: Callable[..., nn.Module], batch: Callable[[int], Batch] = small, loss: Any = class_loss, **options: Any
) -> Entry:
    return Entry(f"torchvision/{name}", partial(build, **options), batch, loss)


def pixel_batch(rows: int) -> Batch:
    """Images, and a class for every pixel."""
    return {"input": images(rows), "labels": torch.randint(0, 5, (rows, 32, 32))}


def pixel_loss(output: dict[str, Tensor], batch: Batch) -> Tensor:
    """Cross-entropy of every pixel."""
    return F.cross_entropy(output["out"], batch["labels"])


def auxiliary_loss(output: Any, batch: Batch) -> Tensor:
    """GoogLeNet's: the scores on the way count less."""
    return class_loss(output.logits, batch) + 0.3 * (class_loss(output.aux_logits1, batch) + class_loss(output.aux_logits2, batch))


def video_batch(rows: int) -> Batch:
    return {"x": torch.randn(rows, 3, 4, 16, 16), "labels": torch.randint(0, 5, (rows,))}


def vgg(norm: bool) -> nn.Module:
    """VGG with few channels and a small head."""
    model = models.VGG(torchvision.models.vgg.make_layers([8, "M", 16, "M", 16, "M"], batch_norm=norm), num_classes=5, init_weights=False)
    model.avgpool, model.classifier = (
        nn.AdaptiveAvgPool2d(2),
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)),
    )
    return model


def with_own_loss(build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return Detection(build(weights=None, weights_backbone=None, num_classes=5, **options))


class Detection(nn.Module):
    """A detector given images and boxes as tensors; the sum of its own losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, boxes: Tensor, kinds: Tensor) -> Tensor:
        targets = [{"boxes": box, "labels": kind} for box, kind in zip(boxes, kinds, strict=True)]
        return sum(self.model(list(x), targets).values())


def boxes_batch(rows: int) -> Batch:
    corner = torch.rand(rows, 2, 2) * 20
    return {"x": torch.rand(rows, 3, 64, 64), "boxes": torch.cat((corner, corner + 20), dim=2), "kinds": torch.randint(1, 5, (rows, 2))}


def own(output: Tensor, batch: Batch) -> Tensor:
    return output


ENTRIES = (
    entry("convnext", models.ConvNeXt, block_setting=[CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=5),
    entry("densenet", DenseNet, growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=5),
    entry(
        "maxvit",
        models.MaxVit,
        middle,
        input_size=(64, 64),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    entry("mobilenet-v2", models.mobilenet_v2, num_classes=5, width_mult=0.25),
    entry("resnet", models.ResNet, block=BasicBlock, layers=[1, 1, 1, 1], num_classes=5),
    entry("resnet-group-norm", models.ResNet, block=BasicBlock, layers=[1, 1, 1, 1], num_classes=5, norm_layer=partial(nn.GroupNorm, 4)),
    entry("shufflenet-v2", models.shufflenet_v2_x0_5, num_classes=5),
    entry("squeezenet", models.squeezenet1_1, num_classes=5),
    entry(
        "swin",
        models.SwinTransformer,
        patch_size=[4, 4],
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    entry("vgg", vgg, norm=False),
    entry("vgg-batch-norm", vgg, norm=True),
    entry(
        "vit", models.VisionTransformer, image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5
    ),
    entry(
        "lraspp", models.segmentation.lraspp_mobilenet_v3_large, pixel_batch, pixel_loss, weights=None, weights_backbone=None, num_classes=5
    ),
    entry(
        "r2plus1d",
        models.video.VideoResNet,
        video_batch,
        block=models.video.resnet.BasicBlock,
        conv_makers=[models.video.resnet.Conv2Plus1D] * 4,
        layers=[1, 1, 1, 1],
        stem=models.video.resnet.R2Plus1dStem,
        num_classes=5,
    ),
    Entry(
        "torchvision/retinanet",
        partial(with_own_loss, models.detection.retinanet_resnet50_fpn, min_size=64, max_size=64),
        boxes_batch,
        own,
        single=True,
    ),
)
