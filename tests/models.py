"""Random models as picklable descriptions, so that every rank can build the same one.

tokens -> [embedding] -> block 0 -> block 1 -> ... -> [head] -> logits        one hidden size throughout
                            |                   ^
                            +------- skip ------+
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import whale

PlainKind = Literal["linear", "feed_forward", "norm", "attention", "convolution", "gelu", "buffer", "in_place"]
BlockKind = PlainKind | Literal["batch_norm", "recurrent", "experts", "gated", "complex", "pool"]
LossKind = Literal["cross_entropy", "mse", "pair", "late_pair", "two_terms", "penalty", "whole_mean", "clamped", "plain_sum"]
Placement = Literal["construction", "forward", "none"]

CLASSES = 11
IGNORED = -100
BLOCKS: tuple[BlockKind, ...] = get_args(PlainKind)
MORE_BLOCKS: tuple[BlockKind, ...] = (*BLOCKS, "recurrent", "experts", "gated", "complex", "pool")


@dataclass(frozen=True)
class Block:
    """One step of the chain.

    Attributes:
        kind: what it computes.
        skip_from: an earlier value to add to its input: 0 the chain's input, i the result of block i - 1; None for none.
        tied_to: an earlier block of the same kind whose first weight it shares.
        frozen: whether its parameters get no gradient.
        repeats: how many times it is called in a row.
    """

    kind: BlockKind
    skip_from: int | None = None
    tied_to: int | None = None
    frozen: bool = False
    repeats: int = 1


@dataclass(frozen=True)
class Segment:
    """The blocks from `start` up to the next segment, under a scope, or under none of their own.

    Attributes:
        start: the first block.
        device_count: of the scope.
        is_scoped: whether there is one.
        is_split: whether it is ``whale.split`` rather than ``whale.replicate``.
    """

    start: int
    device_count: int | None = 1
    is_scoped: bool = True
    is_split: bool = False


@dataclass(frozen=True)
class Description:
    """A model, its inputs and its loss.

    Attributes:
        tokens: whether the input is token ids, embedded, rather than features.
        blocks: the chain.
        width, sequence: sizes of the hidden values ``[rows, sequence, width]``.
        tied: whether the head shares the embedding's table.
        extra_at: the block before which a second input is added; None for one input.
        shift: whether a third input without rows is added at the end.
        unused: whether the model holds a parameter that nothing reads.
        loss: the form of the loss.
        segments: scopes, in order of `start`, the first from 0.
        placement: whether the scopes stand around construction or in `forward`.
        as_tuple: whether the batch is a tuple rather than a mapping.
        copies: device count of a scope around the whole model; None for no such scope.
    """

    tokens: bool
    blocks: tuple[Block, ...]
    width: int = 8
    sequence: int = 3
    tied: bool = False
    extra_at: int | None = None
    shift: bool = False
    unused: bool = False
    loss: LossKind = "cross_entropy"
    segments: tuple[Segment, ...] = (Segment(0),)
    placement: Placement = "none"
    as_tuple: bool = False
    copies: int | None = None


Batch = dict[str, Tensor] | tuple[Tensor, ...]
Loss = Callable[[Any, Any], Any]


class Attention(nn.Module):
    """Causal self-attention with two heads and a fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Experts(nn.Module):
    """A mixture of three experts, of which every token takes all, weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.rise = nn.Parameter(torch.randn(3, width, 2 * width) * width**-0.5)
        self.fall = nn.Parameter(torch.randn(3, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("bsd,edf->besf", x, self.rise))
        return torch.einsum("besf,efd,bse->bsd", hidden, self.fall, self.gate(x).softmax(-1))


class Step(nn.Module):
    """One block of the chain; its activation may be changed."""

    def __init__(self, kind: BlockKind, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.activation: Callable[[Tensor], Tensor] = F.gelu
        if kind in ("linear", "in_place"):
            self.layer = nn.Linear(width, width)
        elif kind == "feed_forward":
            self.layer, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        elif kind == "norm":
            self.layer = nn.LayerNorm(width)
        elif kind == "batch_norm":
            self.layer = nn.BatchNorm1d(width)
        elif kind == "attention":
            self.layer = Attention(width)
        elif kind == "convolution":
            self.layer = nn.Conv1d(width, width, 3, padding=1)
        elif kind == "recurrent":
            self.layer = nn.GRU(width, width, batch_first=True)
        elif kind == "experts":
            self.layer = Experts(width)
        elif kind == "gated":
            self.layer = nn.Linear(width, 2 * width)
        elif kind == "complex":
            self.layer = nn.Linear(width, width, dtype=torch.complex128)
        elif kind == "buffer":
            self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
            self.register_buffer("offset", torch.linspace(-0.1, 0.1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.activation(x)
        if self.kind == "buffer":
            return x * self.scale + self.offset
        if self.kind in ("convolution", "batch_norm"):
            return self.layer(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "pool":
            features = x.transpose(1, 2)
            return (F.avg_pool1d(features, 3, 1, 1) + F.max_pool1d(features, 3, 1, 1)).transpose(1, 2)
        if self.kind == "feed_forward":
            return x + self.back(self.activation(self.layer(x)))
        if self.kind == "recurrent":
            return self.layer(x)[0]
        if self.kind == "gated":
            gate, value = self.layer(x).chunk(2, dim=-1)
            return gate.sigmoid() * value
        if self.kind == "complex":
            z = self.layer(torch.complex(x, 0.5 * x))
            return z.real + z.imag * x
        if self.kind == "in_place":
            y = self.layer(x)
            y += x
            return y.mul_(0.5)
        return self.layer(x)


class Model(nn.Module):
    """The model of a description."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description
        with _copies(description, "construction"):
            self._construct(description)
        self._tie()
        if description.unused:
            self.unused = nn.Parameter(torch.ones(2))

    def _construct(self, description: Description) -> None:
        self.steps = nn.ModuleList()
        for number in range(len(description.segments)):
            with _scope(description, number, "construction"):
                if number == 0:
                    self.embedding = nn.Embedding(CLASSES, description.width) if description.tokens else nn.Identity()
                self.steps.extend([Step(block.kind, description.width) for _, block in _blocks(description, number)])
                if number == len(description.segments) - 1:
                    self.head = nn.Linear(description.width, CLASSES, bias=not description.tied)

    def _tie(self) -> None:
        for step, block in zip(self.steps, self.description.blocks, strict=True):
            if block.tied_to is not None:
                step.layer.weight = self.steps[block.tied_to].layer.weight
            if block.frozen:
                step.requires_grad_(False)
        if self.description.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, extra: Tensor | None = None, shift: Tensor | None = None) -> Any:
        with _copies(self.description, "forward"):
            return self._run(x, extra, shift)

    def _run(self, x: Tensor, extra: Tensor | None, shift: Tensor | None) -> Any:
        description, values = self.description, []
        for number in range(len(description.segments)):
            with _scope(description, number, "forward"):
                if number == 0:
                    x = self.embedding(x)
                    values.append(x)
                for index, block in _blocks(description, number):
                    x = self._step(index, block, x, values, extra)
                if number == len(description.segments) - 1:
                    return self._finish(x if shift is None else x + shift, values)
        raise AssertionError("a description has segments")

    def _step(self, index: int, block: Block, x: Tensor, values: list[Tensor], extra: Tensor | None) -> Tensor:
        if extra is not None and index == self.description.extra_at:
            x = x + extra
        if block.skip_from is not None:
            x = x + values[block.skip_from]
        for _ in range(block.repeats):
            x = self.steps[index](x)
        values.append(x)
        return x

    def _finish(self, x: Tensor, values: list[Tensor]) -> Any:
        logits = self.head(x)
        if self.description.loss == "two_terms":
            return logits, values[-1]
        if self.description.loss == "penalty":
            return logits, self.head.weight.square().sum()
        return logits


def _blocks(description: Description, number: int) -> list[tuple[int, Block]]:
    """The blocks of a segment, with their positions."""
    ends = [segment.start for segment in description.segments[1:]] + [len(description.blocks)]
    start = description.segments[number].start
    return list(enumerate(description.blocks))[start : ends[number]]


def _scope(description: Description, number: int, placement: Placement) -> AbstractContextManager[Any]:
    segment = description.segments[number]
    if description.placement != placement or not segment.is_scoped:
        return nullcontext()
    make = whale.split if segment.is_split else whale.replicate
    return make(segment.device_count, name=f"part{number}")


def _copies(description: Description, placement: Placement) -> AbstractContextManager[Any]:
    if description.placement != placement or description.copies is None:
        return nullcontext()
    return whale.replicate(description.copies)


def make_loss(description: Description) -> Loss:
    """The loss of a description: a function of the model's output and the batch."""
    return {
        "cross_entropy": _cross_entropy,
        "mse": lambda output, batch: F.mse_loss(output, _targets(batch)[1]),
        "pair": _masked_pair,
        "two_terms": lambda output, batch: 0.7 * _cross_entropy(output[0], batch) + 0.1 * output[1].square().mean(),
        "penalty": lambda output, batch: F.l1_loss(output[0], _targets(batch)[1]) + 0.01 * output[1],
        "late_pair": _pair_by_output,
        "clamped": _clamped_mean,
        "plain_sum": lambda output, batch: 0.01 * F.smooth_l1_loss(output, _targets(batch)[1], reduction="sum"),
        "whole_mean": lambda output, batch: output.square().mean(),
    }[description.loss]


def _targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Class targets and value targets: the last two of the batch."""
    labels, values = list(batch.values() if isinstance(batch, dict) else batch)[-2:]
    return labels, values


def _cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), _targets(batch)[0].flatten(), ignore_index=IGNORED)


def _masked_pair(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    labels, values = _targets(batch)
    counted = labels != IGNORED
    return ((output - values).square().sum(-1) * counted).sum(), counted.sum()


def _pair_by_output(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A weight that is known only after the forward pass."""
    confidence = 1 + output.detach().softmax(-1).amax(-1)
    return ((output - _targets(batch)[1]).square().mean(-1) * confidence).sum(), confidence.sum()


def _clamped_mean(output: Tensor, batch: Any) -> Tensor:
    total, counted = _masked_pair(output, batch)
    return total / (counted + 0.5).clamp(min=20.0)


def make_batch(description: Description, num_rows: int, seed: int) -> Batch:
    """A batch of a description's inputs and targets, about a third of the class targets ignored."""
    random = torch.Generator().manual_seed(seed)
    shape = (num_rows, description.sequence)

    def values(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random, dtype=torch.float64)

    labels = torch.randint(0, CLASSES, shape, generator=random)
    labels[torch.rand(shape, generator=random) < 0.3] = IGNORED
    labels[:, 0] = 1  # no row, so no piece, is without a target
    batch = {"x": torch.randint(0, CLASSES, shape, generator=random) if description.tokens else values(*shape, description.width)}
    if description.extra_at is not None:
        batch["extra"] = values(*shape, description.width)
    if description.shift:
        batch["shift"] = values(1, description.width)
    batch |= {"labels": labels, "values": values(*shape, CLASSES)}
    return tuple(batch.values()) if description.as_tuple else batch


def build(description: Description, seed: int, num_rows: int = 8) -> tuple[nn.Module, Batch, Loss]:
    """A model in float64 with random weights, an example batch, and the loss."""
    torch.manual_seed(seed)
    model = Model(description).double()
    return model, make_batch(description, num_rows, seed), make_loss(description)


# -- strategies ----------------------------------------------------------------------------------


@st.composite
def descriptions(draw: st.DrawFn, max_devices: int = 1, kinds: tuple[BlockKind, ...] = BLOCKS) -> Description:
    """Random models whose scopes ask for at most `max_devices` devices."""
    num_blocks = draw(st.integers(1, 6))
    blocks = tuple(draw(_block(index, kinds)) for index in range(num_blocks))
    blocks = tuple(_with_tie(draw, blocks, index) for index in range(num_blocks))
    tokens = draw(st.booleans())
    extra_at = draw(st.none() | st.integers(0, num_blocks - 1))
    copies = draw(st.none() | st.integers(1, max_devices))
    shift = draw(st.booleans())
    return Description(
        tokens=tokens,
        blocks=blocks,
        sequence=draw(st.integers(2, 3)),
        tied=tokens and draw(st.booleans()),
        extra_at=extra_at,
        shift=shift,
        unused=draw(st.booleans()),
        loss=draw(st.sampled_from(get_args(LossKind))),
        segments=draw(_segments(num_blocks, max_devices // (copies or 1))),
        copies=copies,
        placement=draw(st.sampled_from(("construction", "forward", "none"))),
        as_tuple=extra_at is not None and shift and draw(st.booleans()),  # else targets would be taken for inputs
    )


@st.composite
def _block(draw: st.DrawFn, index: int, kinds: tuple[BlockKind, ...]) -> Block:
    return Block(
        kind=draw(st.sampled_from(kinds)),
        skip_from=draw(st.none() | st.integers(0, index)),
        frozen=draw(st.integers(0, 4)) == 4,
        repeats=2 if draw(st.integers(0, 4)) == 4 else 1,
    )


def _with_tie(draw: st.DrawFn, blocks: tuple[Block, ...], index: int) -> Block:
    """The block, perhaps tied to an earlier one with the same weight."""
    block = blocks[index]
    partners = [
        other
        for other in range(index)
        if blocks[other].kind == block.kind and block.kind in ("linear", "feed_forward", "convolution") and not blocks[other].frozen
    ]
    if not partners or block.frozen or draw(st.booleans()):
        return block
    return replace(block, tied_to=draw(st.sampled_from(partners)))


@st.composite
def _segments(draw: st.DrawFn, num_blocks: int, max_devices: int) -> tuple[Segment, ...]:
    """Consecutive scopes that together take at most `max_devices` devices."""
    wanted = draw(st.integers(1, min(max_devices, num_blocks)))
    starts = sorted(draw(st.sets(st.integers(1, num_blocks - 1), min_size=wanted - 1, max_size=wanted - 1))) if wanted > 1 else []
    if draw(st.integers(0, 4)) == 4:
        return tuple(Segment(start, device_count=None) for start in (0, *starts))
    spare = max_devices - wanted
    segments = []
    for start in (0, *starts):
        extra = draw(st.integers(0, spare))
        spare -= extra
        segments.append(Segment(start, 1 + extra))
    if len(segments) > 1 and draw(st.integers(0, 3)) == 3:
        unscoped = draw(st.integers(0, len(segments) - 1))
        segments[unscoped] = replace(segments[unscoped], is_scoped=False)
    return tuple(segments)
