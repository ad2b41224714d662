"""A GPT of any size as a graph: token and position embeddings, pre-norm blocks, and the loss of the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.capture import capture
from whale.errors import ConfigError, raise_faults
from whale.ir.graph import ModelGraph
from whale.ir.precision import Precision
from whale.workloads.repeat import repeat_blocks

Attention = Literal["fused", "explicit"]

DTYPES = ("float32", "float16", "bfloat16")

Built = tuple[nn.Module, dict[str, Tensor], Callable[[Tensor, dict[str, Tensor]], Tensor]]  # a model, an example batch and a loss

NUM_CAPTURED = 2  # blocks that are captured; the others are made from them


@dataclass(frozen=True, kw_only=True)
class GPT:
    """A GPT by its sizes, without memory.

    Its parameters are ``layers (12 hidden^2 + 13 hidden) + (vocabulary + sequence) hidden``, as published, and the ``2 hidden`` of the last
    normalisation; without tying ``vocabulary hidden`` more.

    Attributes:
        layers: number of blocks.
        hidden: features of a position; the feed-forward layer has four times as many.
        heads: attention heads; must divide `hidden`.
        sequence: tokens of a sample.
        vocabulary: number of distinct tokens.
        dtype: of weights and activations (``float32``, ``float16``, ``bfloat16``); the loss is computed in float32.
        tied: whether the output layer is the token embedding.
        attention: ``fused`` is one op that keeps no scores; ``explicit`` the products, softmax and dropout of published runs.
        dropout: its probability, on the embeddings, the attention and after either half of a block.

    Raises:
        ConfigError: sizes that are none, heads that do not divide `hidden`, an unknown type or form of attention; all of them at once.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    dtype: str = "float32"
    tied: bool = True
    attention: Attention = "fused"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        raise_faults(list(self._faults()))

    def graph(self, device: str | None = None, precision: Precision | None = None) -> ModelGraph:
        """Its captured graph: a few blocks are captured, the others made from them; arguments as of `whale.capture.capture`."""
        graph, _ = capture(*replace(self, layers=min(self.layers, NUM_CAPTURED)).built(), device=device, precision=precision)
        return graph if self.layers <= NUM_CAPTURED else repeat_blocks(graph, self.layers)

    def built(self) -> Built:
        """The model with all of its blocks, an example batch of 2 rows and the loss of the next token; on the meta device."""
        with torch.device("meta"):
            model, tokens = _Decoder(self), torch.zeros(2, self.sequence, dtype=torch.long)
        return model.to(getattr(torch, self.dtype)), {"tokens": tokens, "targets": tokens.clone()}, _next_token_loss

    def _faults(self) -> Iterator[ConfigError]:
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
        wrong = [name for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int) or size < 1]
        for name in wrong:
            yield ConfigError(f"{name} of the gpt: {sizes[name]!r} is not a whole number at least 1")
        if not wrong and self.hidden % self.heads:
            yield ConfigError(f"heads: {self.heads} of the gpt does not divide hidden: {self.hidden}")
        tied: object = self.tied
        if not isinstance(tied, bool):
            yield ConfigError(f"tied of the gpt: {tied!r} is not true or false")
        if self.dtype not in DTYPES:
            yield ConfigError(f"dtype of the gpt: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.attention not in get_args(Attention):
            yield ConfigError(f"attention of the gpt: {self.attention!r} is not one of {', '.join(get_args(Attention))}")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            yield ConfigError(f"dropout of the gpt: {self.dropout!r} is not a number from 0 and below 1")


def gpt(**sizes: Any) -> ModelGraph:
    """The graph of a GPT.

    Args:
        sizes: the attributes of `GPT`, by name.

    Raises:
        ConfigError: as `GPT`.
    """
    return GPT(**sizes).graph()


class _Attention(nn.Module):
    def __init__(self, sizes: GPT) -> None:
        super().__init__()
        self.heads, self.form, self.dropout = sizes.heads, sizes.attention, sizes.dropout
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        if self.form == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) * (hidden // self.heads) ** -0.5).masked_fill(later, float("-inf"))
            mixed = F.dropout(scores.softmax(-1), self.dropout) @ v if self.dropout else scores.softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return out


class _Block(nn.Module):
    def __init__(self, sizes: GPT) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = _Attention(sizes)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = _dropout(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return y


class _Decoder(nn.Module):
    def __init__(self, sizes: GPT) -> None:
        super().__init__()
        hidden, vocabulary = sizes.hidden, sizes.vocabulary
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sizes.sequence, hidden)
        self.drop = _dropout(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _dropout(sizes: GPT) -> nn.Module:
    return nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()


def _next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
