"""A GPT over bytes, as a plain module; the only lines about Whale are the scopes around its stages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A decoder over the 256 bytes.

    Args:
        layers: number of blocks.
        width: features of a position.
        heads: attention heads; must divide the width.
        context: the longest sequence, in bytes.
        stages: pipeline stages, as scopes around equal numbers of blocks; 0 writes no scopes, so that the plan decides.
        split: devices that the layers of a stage are divided over; 1 does not divide them.
        axis: along which they are divided, wherever that can be (``heads``); None lets the plan decide.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        stages: int = 0,
        split: int = 1,
        axis: str | None = None,
    ) -> None:
        super().__init__()
        if stages > layers:
            raise ValueError(f"{stages} stages need at least as many layers, not {layers}")
        self.blocks = nn.ModuleList()
        num_scopes = max(stages, 1)
        for stage in range(num_scopes):
            with _scope(stage, stages, split, axis):
                if stage == 0:
                    self.bytes = nn.Embedding(256, width)
                    self.positions = nn.Embedding(context, width)
                for _ in range(layers * stage // num_scopes, layers * (stage + 1) // num_scopes):
                    self.blocks.append(Block(width, heads))
                if stage == num_scopes - 1:
                    self.norm = nn.LayerNorm(width)
                    self.head = nn.Linear(width, 256, bias=False)
        self.apply(_initialize)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[rows, length, 256]`` of the next byte, for bytes ``[rows, length]``."""
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _scope(stage: int, stages: int, split: int, axis: str | None) -> AbstractContextManager[object]:
    if split > 1:
        return whale.split(split, axis=axis, name=f"stage{stage}")
    return whale.replicate(device_count=1, name=f"stage{stage}") if stages else nullcontext()


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
