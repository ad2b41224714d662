"""A transformer of any size, captured on the meta device under a split."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

import whale
from whale.capture import capture
from whale.ir.cluster import Cluster, Device, Host, Link
from whale.ir.graph import ModelGraph


class Block(nn.Module):
    """Attention and a feed-forward part, each with a norm before and dropout after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    """Token and position tables, blocks, a norm and a classifier, all under one split."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int, devices: int, axis: str | None) -> None:
        super().__init__()
        with whale.split(devices, axis=axis):
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block(width, 16) for _ in range(layers))
            self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.classes(self.norm(x))
        return output


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@lru_cache
def transformer(
    layers: int = 2,
    width: int = 8192,
    length: int = 2048,
    vocabulary: int = 50304,
    devices: int = 8,
    axis: str | None = None,
    mode: str = "train",
) -> ModelGraph:
    """The captured graph; shapes only, so that any size is cheap."""
    with torch.device("meta"):
        tokens = torch.zeros(2, length, dtype=torch.long)
        model = Transformer(layers, width, length, vocabulary, devices, axis)
        return capture(model, {"ids": tokens, "labels": tokens.clone()}, loss, mode=mode)[0]


def gpus(
    count: int = 8, flops: float = 3e14, bandwidth: float = 3e12, link: float = 3e11, latency: float = 3e-6, memory: int = 80 << 30
) -> Cluster:
    """A host of equal accelerators."""
    devices = tuple(Device(f"h/{index}", "h", "gpu", (("float32", flops),), memory, bandwidth) for index in range(count))
    return Cluster("gpus", (Host("h", devices, Link(link, latency)),), None)
