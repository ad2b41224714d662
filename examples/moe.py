"""Trains a mixture-of-experts transformer on the source text of the Python standard library: its experts live on different devices.

    python examples/moe.py
    whale run --ranks 2 examples/moe.py
    whale run --ranks 4 --recipe strategies/recipes/mixture_of_experts.yaml examples/moe.py --capacity-factor 0
    whale plan examples/moe.py:build --cluster strategies/clusters/v100_t4.yaml --explain

Four lines, marked (1) to (4), make it parallel: attention and gates are copied on all devices and each takes some of the rows; the
experts are divided over the same devices. Every layer sends tokens to experts and their results back, all to all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpt import Attention
from text import SourceText
from torch import Tensor, nn

import whale
from whale.ir.plan import Plan

Batch = dict[str, Tensor]
BALANCE = 0.01  # weight of the balance loss
AXIS = re.compile(r"blocks\.(\d+)\.gate\.experts:0")  # what the plan calls the experts of a layer, after the first parameter that has them


class Routes(NamedTuple):
    """Where the tokens of each sample go; samples do not compete with one another for places.

    Attributes:
        dispatch: ``[rows, length, experts, capacity]``, 1 where a token has a place with an expert.
        combine: the same, with the expert's weight in the token's result.
        balance: ``[rows]``, 1 where the gate spreads a sample's tokens evenly over the experts, more where it does not.
        load: ``[rows, experts]``, how many of a sample's tokens chose each expert, dropped ones included.
    """

    dispatch: Tensor
    combine: Tensor
    balance: Tensor
    load: Tensor


class Gate(nn.Module):
    """Chooses the experts of every token.

    Args:
        width: features of a token.
        experts: how many there are.
        choices: experts of a token.
        capacity_factor: an expert takes this many times its even share of a sample's tokens; others are dropped, and pass it by
            on the residual path. 0 drops none: every expert has a place for every token.
    """

    def __init__(self, width: int, experts: int, choices: int, capacity_factor: float) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.choices, self.capacity_factor = choices, capacity_factor

    def forward(self, x: Tensor) -> Routes:
        """Routes of tokens ``[rows, length, width]``."""
        experts = len(self.experts)
        shares = F.linear(x, self.experts).softmax(-1)
        weights, chosen = shares.topk(self.choices)
        picked = (chosen.unsqueeze(-1) == torch.arange(experts, device=x.device)).to(x.dtype)  # [rows, length, choices, experts]
        # Places are given in the order of the tokens, to all first choices before any second one.
        queue = picked.transpose(1, 2).flatten(1, 2)
        ahead = (queue.cumsum(1) - queue).unflatten(1, (self.choices, -1)).transpose(1, 2)
        place = (ahead * picked).sum(-1)
        slots = torch.arange(capacity(x.shape[1], experts, self.choices, self.capacity_factor), device=x.device)
        taken = (place.unsqueeze(-1) == slots).to(x.dtype)  # [rows, length, choices, capacity]; no slot for a token that is dropped
        weights = weights / weights.sum(-1, keepdim=True)
        return Routes(
            dispatch=torch.einsum("bske,bskc->bsec", picked, taken),
            combine=torch.einsum("bske,bskc->bsec", picked * weights.unsqueeze(-1), taken),
            balance=experts * (picked.mean((1, 2)) * shares.mean(1)).sum(-1),
            load=picked.sum((1, 2)),
        )


def capacity(length: int, experts: int, choices: int, factor: float) -> int:
    """Tokens of a sample of `length` tokens that an expert has places for."""
    return min(length, math.ceil(factor * choices * length / experts)) if factor else length


class Experts(nn.Module):
    """Feed-forward layers, one for each expert, in stacked parameters."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        sent = torch.einsum("bsec,bsd->ebcd", routes.dispatch, x)  # tokens to the places of their experts
        with whale.split(axis="experts:0"):  # (3) the experts are divided over the devices
            hidden = F.gelu(torch.einsum("ebcd,edh->ebch", sent, self.up))
            done = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        return torch.einsum("bsec,ebcd->bsd", routes.combine, done)  # and their results back


class Block(nn.Module):
    """Attention and experts, each added to what it reads."""

    def __init__(self, width: int, heads: int, gate: Gate) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.gate, self.experts = nn.LayerNorm(width), gate, Experts(width, len(gate.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Routes]:
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x)
        routes = self.gate(tokens)
        return x + self.experts(tokens, routes), routes


class MixtureOfExperts(nn.Module):
    """A decoder over the 256 bytes whose feed-forward layers are mixtures of experts.

    Args:
        layers, width, heads, context: as of `gpt.GPT`.
        experts: of every layer.
        choices: experts of a token.
        capacity_factor: of `Gate`; 0 drops no token.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 128,
        heads: int = 4,
        context: int = 64,
        experts: int = 8,
        choices: int = 2,
        capacity_factor: float = 1.25,
    ) -> None:
        super().__init__()
        whale.set_default_strategy(whale.replicate())  # (2) all else is copied, and the rows are divided
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, Gate(width, experts, choices, capacity_factor)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        whale.set_default_strategy(None)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``[rows, length, 256]``, the balance ``[rows]``, and the load ``[rows, layers, experts]``, of bytes ``[rows, length]``."""
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        balances, loads = [], []
        for block in self.blocks:
            x, routes = block(x)
            balances.append(routes.balance)
            loads.append(routes.load)
        return self.head(self.norm(x)), torch.stack(balances).mean(0), torch.stack(loads, 1)


def loss_fn(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy of the next byte, in nats, and the mean over samples of each sample's own balance: exact however rows are cut."""
    logits, balance, _ = output
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + BALANCE * balance.mean()


def build(
    layers: int = 2, width: int = 256, context: int = 128, experts: int = 8, capacity_factor: float = 1.25, rows: int = 32
) -> tuple[MixtureOfExperts, Batch, Callable[..., Tensor]]:
    """The model, an example batch and the loss, for ``whale plan examples/moe.py:build``."""
    with torch.device("meta"):
        model = MixtureOfExperts(layers, width, context=context, experts=experts, capacity_factor=capacity_factor)
    ids = torch.zeros(rows, context, dtype=torch.int64)
    return model, {"ids": ids, "targets": ids}, loss_fn


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    whale.init()  # (1)
    sizes = (options.layers, options.width, 4, options.context, options.experts, options.choices, options.capacity_factor)
    text = SourceText(options.context)
    batch = torch.utils.data.default_collate([text[index] for index in range(options.global_batch_size)])
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    engine = whale.parallelize(MixtureOfExperts(*sizes), loss=loss_fn, optimizer=optimizer, batch=batch)  # (4)
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_: None
    say(engine.plan)
    losses = engine.loader(text, global_batch_size=options.global_batch_size, shuffle=True)
    for loss in map(engine.step, itertools.islice(losses, options.steps)):
        if engine.step_number in (1, options.steps) or engine.step_number % options.print_every == 0:
            say(f"step {engine.step_number}: loss {float(loss):.3f}")
            _, _, load = engine.predict({"ids": batch["ids"]})  # of one batch, always the same; whole on every rank
            say("\n".join(describe_load(load, engine.plan, capacity(options.context, *sizes[4:]))))


def describe_load(load: Tensor, plan: Plan, places: int) -> Iterator[str]:
    """How many tokens chose each expert, what part was dropped, and how many each device has to do with, for every layer.

    Args:
        load: ``[rows, layers, experts]``, tokens of each sample.
        plan: says which device has which experts.
        places: that an expert has for tokens of one sample.
    """
    per_device = load_of_devices(load, plan)
    for layer, chosen in enumerate(load.unbind(1)):
        dropped = float((chosen - places).clamp(min=0).sum() / chosen.sum())
        experts = " ".join(f"{int(number)}" for number in chosen.sum(0))
        devices = ", ".join(f"{device} {number}" for device, number in per_device.get(layer, {}).items())
        yield f"  layer {layer}: tokens per expert {experts}; dropped {dropped:.1%}" + (f"; per device {devices}" if devices else "")


def load_of_devices(load: Tensor, plan: Plan) -> dict[int, dict[str, int]]:
    """Tokens for the experts of each device, by layer and device; nothing where the experts are not divided."""
    found: dict[int, dict[str, int]] = {}
    for replica, (start, stop) in zip(plan.replicas, plan.replica_rows(len(load)), strict=True):
        for stage in replica.stages:
            for shard in stage.shards:
                layer = AXIS.fullmatch(shard.axis)
                if layer is None or len(stage.groups) > 1:
                    continue
                parts = load[start:stop, int(layer[1])].sum(0).split(shard.sizes)
                tokens = {device: int(part.sum()) for device, part in zip(stage.virtual_device.devices, parts, strict=True)}
                found.setdefault(int(layer[1]), {}).update(tokens)
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="attention and experts each")
    parser.add_argument("--width", type=int, default=64, help="features of a token")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer")
    parser.add_argument("--choices", type=int, default=2, help="experts of a token")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="places of an expert by its even share; 0 drops no token")
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--print-every", type=int, default=20, help="steps between printed losses and loads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
