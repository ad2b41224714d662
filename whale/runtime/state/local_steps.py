"""Local steps: groups of ranks step on their own; every so many steps weights and optimizer state become averages over all.

    group 0   step  step  step | average | step  step  step | average        average = sum over groups of share of rows x value
    group 1   step  step  step |         | step  step  step |

In each of them a group takes its part of the gradient of the global loss, divided by its share of the rows of the batch: for a mean over
rows, the gradient of its own mean. The average of all groups' gradients, by shares, is that of the global loss, for any loss.

An outer optimizer lets weights go on from those before the round, with Nesterov momentum (Douillard et al. 2023, DiLoCo):

    change = before - average      momentum = m x momentum + change      weights = before - rate x (change + m x momentum)

Optimizer state is averaged too, so that after a round all groups hold the same: checkpoints and other plans know nothing of groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.errors import ConfigError, RuntimeFault
from whale.ir.plan import Plan
from whale.runtime.program.shard.pieces import Index, on_device, part, write_part
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import RankLinks
from whale.runtime.state.joint import members_of
from whale.sharding.buckets import Bucket


@dataclass(frozen=True)
class _Slot:
    """Elements of what this rank's optimizer steps, and their place in a bucket."""

    name: str
    index: tuple[Index, ...] | None  # None for all
    start: int
    stop: int


@dataclass(frozen=True)
class _Averaged:
    """A bucket on this rank."""

    plan: Bucket
    ranks: tuple[int, ...]  # its owners in the world
    weight: float  # of this rank's values: the share of its group, for the first owner of it; else 0
    slots: tuple[_Slot, ...]
    links: RankLinks


class LocalSteps:
    """Counts the steps of a round, and ends it.

    Args:
        plan: at work, with rounds.
        buckets: `Buckets.outer` of the plan.
        links: of this rank; None if it is idle, and only counts.
        state: of the training.
        device: on which values are summed.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket], links: RankLinks | None, state: EngineState, device: torch.device) -> None:
        assert plan.rounds is not None, "a plan without rounds has no local steps"
        self._state, self._rounds, self._device = state, plan.rounds, device
        weights = [0.0] * len(plan.sync_members)
        for replica in plan.replicas:
            weights[plan.sync_group_of(replica.index)] += replica.share
        shares = [weight / sum(weights) for weight in weights]
        self._buckets: tuple[_Averaged, ...] = ()
        if links is not None:
            self._buckets = tuple(_averaged(bucket, links, state, shares) for bucket in buckets if links.rank in bucket.owners)
        self._before: dict[str, Tensor] = {}
        self._has_looked = False

    @property
    def num_steps(self) -> int:
        """Of a round."""
        return self._rounds.num_steps

    def begin(self) -> None:
        """Before an update: notes the weights that a round begins with, where the outer optimizer goes on from them."""
        if self._rounds.is_average or self._state.num_local:
            return
        for name, kept in self._state.kept.items():
            if name in self._before:
                self._before[name].copy_(kept.detach())
            else:
                self._before[name] = kept.detach().clone()

    def end(self) -> bool:
        """After an update; returns whether it was the last of a round, and weights have changed once more."""
        self._state.num_local += 1
        if not self._has_looked:  # what cannot be averaged is an error now, not a round later
            self._has_looked = True
            self._entries()
        if self._state.num_local < self._rounds.num_steps:
            return False
        self.end_round()
        return True

    @torch.no_grad()
    def end_round(self) -> None:
        """Averages weights and optimizer state over all groups. A collective of the plan's ranks.

        Raises:
            RuntimeFault: the optimizer keeps numbers that differ between groups.
        """
        entries = {} if self._state.optimizer is None else self._entries()  # without one nothing has changed
        for bucket in self._buckets if entries else ():
            self._compare(bucket, entries)
            # all owners step the same parameters by the same optimizers, so they keep the same
            for key in sorted({key for slot in bucket.slots for key in entries.get(slot.name, {})}):
                self._average(bucket, {name: own[key] for name, own in entries.items() if key in own})
        if entries and not self._rounds.is_average:
            self._go_on()
        self._state.num_local = 0  # what an error leaves before is no state of one step

    def _average(self, bucket: _Averaged, values: dict[str, Tensor]) -> None:
        own = next(values[slot.name] for slot in bucket.slots if slot.name in values)
        dtype = torch.promote_types(own.dtype, torch.float32)
        flat = torch.zeros(bucket.plan.num_elements, dtype=dtype, device=self._device)
        placed = [(slot, values[slot.name]) for slot in bucket.slots if slot.name in values]
        for slot, value in placed if bucket.weight else ():
            held = value if slot.index is None else part(value, slot.index)
            flat[slot.start : slot.stop].view(held.shape).copy_(held)
        if bucket.weight:
            flat.mul_(bucket.weight)
        self._sum(flat, bucket)
        for slot, value in placed:
            shape = value.shape if slot.index is None else part(value, slot.index).shape
            found = flat[slot.start : slot.stop].view(shape)
            if slot.index is None:
                value.copy_(found)
            else:
                write_part(value, slot.index, found)

    @staticmethod
    def _sum(flat: Tensor, bucket: _Averaged) -> None:
        bucket.links.waits.wait(bucket.links.groups.all_reduce(flat, bucket.ranks), "averaging weights", bucket.ranks)

    def _compare(self, bucket: _Averaged, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raises RuntimeFault if a number that the optimizer keeps, such as its count of steps, differs between groups."""
        numbers = {
            (slot.name, key): float(value)
            for slot in bucket.slots
            for key, value in self._kept_by_optimizer(slot.name).items()
            if _is_number(value) and key not in entries[slot.name]
        }
        own = torch.tensor([*numbers.values()], dtype=torch.float64, device=self._device)
        mean = own * bucket.weight
        self._sum(mean, bucket)
        for (name, key), value, (here, among) in zip(numbers, numbers.values(), torch.stack([own, mean], 1).tolist(), strict=True):
            if not math.isclose(here, among, rel_tol=1e-9):
                raise RuntimeFault(
                    f"communication.sync_steps: hosts have other numbers in the optimizer's state ({key!r} of {name}: {value:g} here, "
                    f"{among:g} on average)",
                    hint="use an optimizer whose numbers do not depend on gradients, or set communication.sync_steps: 1",
                )

    def _go_on(self) -> None:
        """The outer optimizer's step, on the averages of weights."""
        for name, before in self._before.items():
            kept = self._state.kept[name].detach()
            change = before - kept
            if self._rounds.momentum:
                if name not in self._state.momenta:
                    self._state.momenta[name] = torch.zeros_like(change)
                momentum = self._state.momenta[name].mul_(self._rounds.momentum).add_(change)
                change.add_(momentum, alpha=self._rounds.momentum)
            kept.copy_(before.sub_(change, alpha=self._rounds.rate))

    def _kept_by_optimizer(self, name: str) -> Mapping[str, Any]:
        kept = self._state.kept[name]
        return next((each.state[kept] for each in members_of(self._state.optimizer).values() if kept in each.state), {})

    def _entries(self) -> dict[str, dict[str, Tensor]]:
        """Per parameter, what is averaged: the weights, their moving average, and what the optimizer keeps for each element.

        Raises:
            ConfigError: the optimizer keeps what has no average.
        """
        kept = self._state.kept
        found = {name: {"": weight.detach()} for name, weight in kept.items()}
        for name, average in self._state.averages.items():
            found[name]["average of weights"] = average
        states = {name: self._kept_by_optimizer(name) for name in kept}
        keys = {key for name, own in states.items() if kept[name].dim() for key in _shaped(name, kept[name], own)}
        if not any(own.dim() for own in kept.values()):  # numbers all: what is no count of steps is of the one element
            keys = {key for own in states.values() for key in own} - {"step"}
        for name, own in states.items():
            found[name].update((key, value) for key, value in own.items() if key in keys and isinstance(value, Tensor))
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _shaped(name: str, kept: Tensor, state: Mapping[str, Any]) -> Iterator[str]:
    """The keys of tensors of a parameter's shape. Raises ConfigError: an entry is neither that nor a number."""
    for key, value in state.items():
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided and (value.is_floating_point() or value.is_complex())
        if is_dense and value.shape == kept.shape:
            yield key
        elif value is not None and not _is_number(value):
            what = f"{value.dtype}, {value.layout}, {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"communication.sync_steps: the optimizer keeps {key!r} ({what}) for {name} {tuple(kept.shape)}: only numbers and dense "
                "floating-point tensors of the parameter's shape are averaged over hosts",
                hint="use another optimizer, or set communication.sync_steps: 1",
            )


def _averaged(bucket: Bucket, links: RankLinks, state: EngineState, shares: Sequence[float]) -> _Averaged:
    """A bucket on this rank; `shares`: of the rows, of each sync group."""
    plan, rank = links.holdings.plan, links.rank
    weight = shares[plan.sync_numbers[rank]] if plan.together(rank, bucket.owners)[0] == rank else 0.0
    slots = []
    for slot in bucket.slots:
        kept = links.holdings.kept(slot.name, links.rank)
        index = links.holdings.index(slot.name, slot.piece.region, kept)
        own = None if index is None else on_device(index, state.kept[slot.name].device)
        slots.append(_Slot(slot.name, own, slot.start, slot.stop))
    ranks = tuple(sorted(links.world_ranks[owner] for owner in bucket.owners))
    return _Averaged(bucket, ranks, weight, tuple(slots), links)
