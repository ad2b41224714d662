"""A ResNet as a plain module that makes features of images; nothing in it knows of Whale."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Depth:
    """Blocks in each of the four parts, and whether a block is a bottleneck (of 1x1, 3x3 and 1x1) or two 3x3 convolutions."""

    blocks: tuple[int, int, int, int]
    is_bottleneck: bool = False


DEPTHS = {
    10: Depth((1, 1, 1, 1)),
    18: Depth((2, 2, 2, 2)),
    34: Depth((3, 4, 6, 3)),
    50: Depth((3, 4, 6, 3), is_bottleneck=True),
    101: Depth((3, 4, 23, 3), is_bottleneck=True),
}


class Block(nn.Module):
    """Convolutions whose result is added to what they read.

    Args:
        channels: that arrive.
        width: channels of the 3x3 convolutions; a bottleneck hands on four times as many.
        stride: pixels from one to the next; above 1 the image shrinks.
        is_bottleneck: 1x1, 3x3 and 1x1 convolutions in place of two 3x3 ones.
        norm: ``group`` or ``batch``.
    """

    def __init__(self, channels: int, width: int, stride: int, is_bottleneck: bool, norm: str) -> None:
        super().__init__()
        kernels = (1, 3, 1) if is_bottleneck else (3, 3)
        widths = (width, width, 4 * width) if is_bottleneck else (width, width)
        strides = (1, stride, 1) if is_bottleneck else (stride, 1)
        self.layers = nn.ModuleList()
        before = channels
        for kernel, after, step in zip(kernels, widths, strides, strict=True):
            self.layers.append(_convolution(before, after, kernel, step, norm))
            before = after
        is_alike = stride == 1 and channels == before
        self.shortcut = nn.Identity() if is_alike else _convolution(channels, before, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Of images ``[rows, channels, height, width]``."""
        y = x
        for number, layer in enumerate(self.layers):
            y = layer(y if number == 0 else F.relu(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """The layers of a ResNet before its last one.

    Args:
        depth: a key of `DEPTHS`.
        width: channels of the first part; each of the others has twice as many as the one before.
        norm: ``group``: what comes of an image does not depend on the others. ``batch``: as in the paper; statistics are those
            of the rows that a device has of a micro-batch.

    Attributes:
        num_features: of an image.
    """

    def __init__(self, depth: int = 10, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        size = DEPTHS[depth]
        self.stem = _convolution(3, width, 3, 1, norm)
        blocks: list[nn.Module] = []
        channels = width
        for part, number in enumerate(size.blocks):
            for block in range(number):
                stride = 2 if part > 0 and block == 0 else 1
                blocks.append(Block(channels, width * 2**part, stride, size.is_bottleneck, norm))
                channels = width * 2**part * (4 if size.is_bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.num_features = channels

    def forward(self, images: Tensor) -> Tensor:
        """Features ``[rows, num_features]`` of images ``[rows, 3, height, width]``."""
        y: Tensor = self.blocks(F.relu(self.stem(images)))
        return y.mean((2, 3))


def _convolution(before: int, after: int, kernel: int, stride: int, norm: str) -> nn.Sequential:
    normalize = nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(min(8, after), after)
    return nn.Sequential(nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False), normalize)
