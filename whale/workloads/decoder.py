"""A GPT of any size as a graph: token and position embeddings, pre-norm blocks, and the loss of the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.capture import capture
from whale.errors import ConfigError, raise_faults
from whale.ir.graph import ModelGraph
from whale.workloads.repeat import repeat_blocks

Attention = Literal["fused", "explicit"]

DTYPES = ("float32", "float16", "bfloat16")

Built = tuple[nn.Module, dict[str, Tensor], Callable[[Tensor, dict[str, Tensor]], Tensor]]
"""A model, an example batch and a loss."""

NUM_CAPTURED = 2
"""Blocks that are captured; the others are made from them."""


def gpt(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    dtype: str = "float32",
    tied: bool = True,
    attention: Attention = "fused",
    dropout: float = 0.0,
) -> ModelGraph:
    """A GPT's graph, made without memory for its weights.

    Its parameters are ``layers (12 hidden^2 + 13 hidden) + (vocabulary + sequence) hidden``, as published, and the ``2 hidden`` of the last
    normalisation; without tying ``vocabulary hidden`` more.

    Args:
        layers: number of blocks.
        hidden: features of a position; the feed-forward layer has four times as many.
        heads: attention heads; must divide `hidden`.
        sequence: tokens of a sample.
        vocabulary: number of tokens that there are.
        dtype: of weights and activations (``float32``, ``float16``, ``bfloat16``); the loss is computed in float32.
        tied: whether the output layer is the token embedding.
        attention: ``fused`` is one op that keeps no scores; ``explicit`` the products, softmax and dropout of published runs.
        dropout: its probability, on the embeddings, the attention and after either half of a block.

    Raises:
        ConfigError: sizes that are none, heads that do not divide `hidden`, an unknown type or form of attention; all of them at once.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    raise_faults(list(_faults(sizes, dtype, attention, dropout)))
    model, batch, loss = _build(min(layers, NUM_CAPTURED), hidden, heads, sequence, vocabulary, dtype, tied, attention, dropout)
    graph, _ = capture(model, batch, loss)
    return graph if layers <= NUM_CAPTURED else repeat_blocks(graph, layers)


def gpt_model(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    dtype: str = "float32",
    tied: bool = True,
    attention: Attention = "fused",
    dropout: float = 0.0,
) -> Built:
    """The model, example batch and loss that `gpt` captures, with all of its blocks; on the meta device.

    Args:
        layers, hidden, heads, sequence, vocabulary, dtype, tied, attention, dropout: as `gpt` takes them.

    Raises:
        ConfigError: as `gpt`.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    raise_faults(list(_faults(sizes, dtype, attention, dropout)))
    return _build(layers, hidden, heads, sequence, vocabulary, dtype, tied, attention, dropout)


def _build(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    dtype: str,
    tied: bool,
    attention: Attention,
    dropout: float,
) -> Built:
    with torch.device("meta"):
        model = _Decoder(layers, hidden, heads, sequence, vocabulary, tied, attention, dropout)
        tokens = torch.zeros(2, sequence, dtype=torch.long)
    return model.to(getattr(torch, dtype)), {"tokens": tokens, "targets": tokens.clone()}, _next_token_loss


def _faults(sizes: Mapping[str, int], dtype: object, attention: object, dropout: object) -> Iterator[ConfigError]:
    wrong = [name for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    for name in wrong:
        yield ConfigError(f"{name} of a gpt is a whole number at least 1 ({sizes[name]!r} is not)")
    if not wrong and sizes["hidden"] % sizes["heads"]:
        yield ConfigError(f"the heads of a gpt divide its hidden size (heads: {sizes['heads']}, hidden: {sizes['hidden']})")
    if dtype not in DTYPES:
        yield ConfigError(f"dtype of a gpt is one of {', '.join(DTYPES)} ({dtype!r} is not)")
    if attention not in get_args(Attention):
        yield ConfigError(f"attention of a gpt is one of {', '.join(get_args(Attention))} ({attention!r} is not)")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        yield ConfigError(f"dropout of a gpt is a number from 0 and below 1 ({dropout!r} is not)")


class _Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int, form: Attention, dropout: float) -> None:
        super().__init__()
        self.heads, self.form, self.dropout = heads, form, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

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
    """Attention and a feed-forward layer, each added to what it reads."""

    def __init__(self, hidden: int, heads: int, attention: Attention, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = _Attention(hidden, heads, attention, dropout)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return y


class _Decoder(nn.Module):
    """A GPT."""

    def __init__(
        self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, tied: bool, attention: Attention, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(_Block(hidden, heads, attention, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
