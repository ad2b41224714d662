"""Small models whose cuts meet what the Hugging Face families do not: uneven fused projections, groups, in-place ops, ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models

Made = tuple[Any, ...]
HIDDEN, LENGTH, ROWS = 12, 5, 3


class FusedGrouped(nn.Module):
    """Phi-3's block: a fused projection of unlike parts taken by slices, grouped-query attention, a fused gate."""

    def __init__(self, *, by_split: bool) -> None:
        super().__init__()
        self.by_split = by_split
        self.qkv = nn.Linear(HIDDEN, 6 * 4 + 2 * 3 * 4, bias=True)
        self.out = nn.Linear(24, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * 14, bias=False)
        self.down = nn.Linear(14, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        fused = self.qkv(x)
        if self.by_split:
            q, k, v = fused.split([24, 12, 12], -1)
        else:
            q, k, v = fused[..., :24], fused[..., 24:36], fused[..., 36:]
        q = q.view(rows, length, 6, 4).transpose(1, 2)
        k, v = (t.view(rows, length, 3, 4).transpose(1, 2) for t in (k, v))
        if self.by_split:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t[:, :, None].expand(rows, 3, 2, length, 4).reshape(rows, 6, length, 4) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, 24))
        gate, up = self.up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Regression(nn.Module):
    """Wraps a block: features in, mean squared error out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.block(x), y)


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output


def _seeded(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Made:
    torch.manual_seed(0)
    return make(), tuple(torch.randn(*shape) for shape in shapes), _loss


def _features(make: Callable[[], nn.Module]) -> Made:
    return _seeded(lambda: Regression(make()), (ROWS, LENGTH, HIDDEN), (ROWS, LENGTH, HIDDEN))


def fused_by_slices() -> Made:
    return _features(lambda: FusedGrouped(by_split=False))


def fused_by_split() -> Made:
    return _features(lambda: FusedGrouped(by_split=True))


class Attending(nn.Module):
    """A sequence with learned positions that attends to itself, causally or with a bias and a mask, and to a shorter memory."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.bias = nn.Parameter(torch.randn(3, LENGTH, LENGTH))
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(3))
        self.memory = nn.Parameter(torch.randn(LENGTH - 2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = x + self.positions
        first, second, third = self.layers
        x = x + self._mixed(*first(x).chunk(3, -1), is_causal=True)
        bias = None
        if self.is_masked:
            lengths = (x.detach()[..., 0] > -1.0)[:, None, None]
            bias = torch.where(lengths, self.bias, torch.full((), -1e9, dtype=x.dtype))
        x = x + self._mixed(*second(x).chunk(3, -1), attn_mask=bias)
        memory = self.memory.expand(rows, -1, -1)
        return x + self._mixed(third(x)[..., :HIDDEN], memory, memory, is_causal=True)

    @staticmethod
    def _mixed(*parts: Tensor, **settings: Any) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, HIDDEN // 3)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2)


def attending() -> Made:
    return _features(lambda: Attending(is_masked=False))


def attending_masked() -> Made:
    return _features(lambda: Attending(is_masked=True))


class InPlace(nn.Module):
    """In-place ops on parts, on whole tensors between cut uses, and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.back = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 6), nn.Linear(8, HIDDEN)
        self.scale, self.offset = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        hidden = self.first(x)
        hidden += 1.0
        hidden.mul_(0.5).tanh_()
        y = x.clone()
        before = y.unsqueeze(-1) + self.offset
        y += 1.5  # between two uses by parts
        after = y.unsqueeze(-1) - self.offset
        y = y + (before * after).sum(-1)
        shifted = self.second(y).view(-1, 2, 3)
        shifted[:, 0].add_(0.25)
        return self.back(hidden) + y + shifted.sum((1, 2)).reshape(x.shape[0], -1, 1)


def in_place() -> Made:
    return _features(InPlace)


class Tied(nn.Module):
    """One weight used by parts, whole, and transposed; scales used by parts only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 9) * 0.3)
        self.gain = nn.Parameter(torch.randn(1, 9))
        self.shift = nn.Parameter(torch.randn(()))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x) @ self.weight * self.gain + self.shift
        mixed = torch.relu(hidden) @ self.weight.t()
        return mixed + self.norm(x) * self.shift + x.mean(-1, keepdim=True) * self.weight.sum()


def tied() -> Made:
    return _features(Tied)


class Channels(nn.Module):
    """Grouped and plain convolutions, transposed ones, batch and group normalisation, pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4, padding=1)
        self.groups = nn.GroupNorm(3, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.groups(F.max_pool2d(self.grouped(x), 2))
        x = F.adaptive_avg_pool2d(self.up(F.gelu(x)), 1).squeeze()
        return F.cross_entropy(self.head(x), y[:, :5].softmax(-1))


def channels() -> Made:
    return _seeded(Channels, (ROWS, 3, 8, 8), (ROWS, 7))


class Pointwise(nn.Module):
    """A model that can be cut along its sequence: positions, masks indexed by them, lookups, reductions of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, HIDDEN, padding_idx=2)
        self.kinds = nn.Embedding(7, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 10), nn.Linear(10, HIDDEN)
        self.register_buffer("table", torch.randn(LENGTH, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, length, _ = x.shape
        positions = torch.arange(length, device=x.device)
        mask = (y[..., 0] > 0)[torch.arange(rows, device=x.device)[:, None], positions[None, :]]
        x = x + self.places(positions) + self.table[positions] + self.kinds((y[..., 1].abs() * 3).long().clamp(max=6))
        x = x + self.down(F.gelu(self.up(x))) * mask[..., None]
        peak = x.amax(-1) + x.amin(1).mean(-1, keepdim=True) + 1e-3 * x.tanh().prod(-1)
        return F.mse_loss(x * peak[..., None].tanh(), y, reduction="sum") / x.shape[0]


def pointwise() -> Made:
    return _features_plain(Pointwise)


def _features_plain(make: Callable[[], nn.Module]) -> Made:
    return _seeded(make, (ROWS, LENGTH, HIDDEN), (ROWS, LENGTH, HIDDEN))


class Repeated(nn.Module):
    """Copies: repeat_interleave, repeat, tile, expand; stacks and concatenations of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 6)
        self.mix = nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        small = self.up(x)
        wide = torch.cat([small.repeat_interleave(2, -1), small.repeat(1, 1, 2)], -1)
        stacked = torch.stack([wide, wide.flip(1)], 0).sum(0)
        return self.mix(stacked) + small.unsqueeze(-1).expand(-1, -1, -1, 2).flatten(2)


def repeated() -> Made:
    return _features(Repeated)


class Classes(nn.Module):
    """Three losses over cut classes or cut positions: plain, weighted by class, smoothed; labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(HIDDEN, 9), nn.Linear(HIDDEN, 9, bias=False)
        self.register_buffer("weight", torch.rand(9) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labels = (y[..., 0].abs() * 4).long().clamp(max=8)
        labels = torch.where(y[..., 1] > 0.8, -100, labels)
        logits = self.head(x)
        plain = F.cross_entropy(logits.transpose(1, 2), labels)
        weighted = F.cross_entropy(self.other(x).flatten(0, 1), labels.flatten(), weight=self.weight, label_smoothing=0.1)
        return plain + 0.3 * weighted + logits.logsumexp(-1).mean()


def classes() -> Made:
    return _features_plain(Classes)


class Clipped(torch.autograd.Function):
    """A square root whose gradient is bounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / torch.sqrt(torch.clip(4.0 * x, min=1.0))


class OwnFunction(nn.Module):
    """A pointwise autograd function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 14), nn.Linear(14, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Clipped.apply(self.up(x).square()))


def own_function() -> Made:
    return _features(OwnFunction)


BUILDERS = (
    "fused_by_slices",
    "fused_by_split",
    "in_place",
    "tied",
    "channels",
    "pointwise",
    "repeated",
    "classes",
    "own_function",
    "attending",
)


def _predicting(family: str) -> Made:
    model, batch = hf_models.BUILDERS[family]()
    return model, {name: value for name, value in batch.items() if name != "labels"}


def gpt2_predicting() -> Made:
    return _predicting("gpt2")


def bert_predicting() -> Made:
    return _predicting("bert")


def llama_predicting() -> Made:
    return _predicting("llama")


def resnet_predicting() -> Made:
    return _predicting("resnet")
