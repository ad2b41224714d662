"""What the ranks of a pipeline take at least for all micro-batches, each waiting for others, in closed form and whatever the cut.

With F_r and B_r the seconds of rank r for a micro-batch forward and backward, t_r = F_r + B_r, a step takes at least, for every rank s:

    m t_s + (t_1 + ... + t_s-1)                        the ranks before it fill and drain the pipeline     `first`
    m t_s + (F_1 + ... + F_s-1)                        they fill it; weight gradients may fill the drain   `first`
    (t_1 + ... + t_p) + (m - 1) t_s - (k_s - 1) F_s    until its first backward pass, with k_s forwards    `there_and_back`
                                                       before it, a micro-batch goes to the end and back
    (t_1,1 + ... + t_p,1) + (t_1,2 + ... + t_s-1,2)    before chunk 2 of a rank has its first turn a       `chunks`
        + m t_s - m t_s,1                              micro-batch has passed all first chunks

A mean of any of these over the ranks prices each op by the rank that has it, and whatever the cut it pays at least the least price. The
weights of a mean are those that make all ops together equally dear on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.schedules import peak_in_flight
from whale.search.arrangement import Group, Order

Runs = Sequence[tuple[Group, int]]

MANY = 4
"""With so many times as many micro-batches as ranks the waits for chunks are hardly known to be anything."""

TINY = 1e-6
"""A share of which nothing is left in a difference."""

LEAST = 1e-3
"""What the weights of a mean are divided by is not less than this share of a pass: any weights will do."""


PLAIN = Order("1f1b")

CHUNKS = Order("interleaved", 2)

NO_ORDER = Order("", 2)
"""Of which nothing is known: ranks neither wait for those before them, nor sum gradients when all is done."""


def first_alike(order: Order, num_ranks: int, num_micro_batch: int) -> Order:
    """Of the orders of which as much is known, one: a replica of one rank has none, and many micro-batches wait little for chunks."""
    if num_ranks == 1:
        return PLAIN
    if order.fills_forward:
        return Order("zb_h1")
    return order if order.fills or (order == CHUNKS and num_micro_batch < MANY * num_ranks) else NO_ORDER


@dataclass(frozen=True)
class Pass:
    """Seconds per column of a micro-batch on a kind of device, ``[rows, columns]``.

    Attributes:
        forward, backward: seconds.
        counts: ops of each column.
    """

    forward: Floats
    backward: Floats
    counts: Floats

    @cached_property
    def both(self) -> Floats:
        return self.forward + self.backward

    @cached_property
    def whole(self) -> Floats:
        """Seconds of all ops: ``[rows]``."""
        found: Floats = self.both @ self.counts
        return found

    @cached_property
    def shares(self) -> Floats:
        """What each op takes of the whole."""
        found: Floats = self.both / self.whole[:, None]
        return found


@dataclass(frozen=True, slots=True)
class Passes:
    """The micro-batches of a replica, which differ by a row at most: of the mean number of rows, the fewest and the most."""

    mean: Pass
    fewest: Pass
    most: Pass

    def after_first(self, num_micro_batch: int) -> Floats:
        """Seconds per column of so many micro-batches, but for the backward pass of the first of them."""
        return num_micro_batch * self.mean.both - self.fewest.both + self.fewest.forward


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A replica.

    Attributes:
        runs: the groups along it, each with how many alike ones follow one another.
        passes: per group.
        counts: ops of each column.
        num_micro_batch: of a step.
    """

    runs: Runs
    passes: Mapping[Group, Passes]
    counts: Floats
    num_micro_batch: int

    @property
    def num_ranks(self) -> int:
        return sum(number for _, number in self.runs)

    def computed(self) -> Floats:
        """Seconds in which nobody waits: per number of rows, as all here."""
        speed = np.sum([number / self.passes[kind].mean.whole for kind, number in self.runs], axis=0)
        least = np.min([own.mean.shares for own in self.passes.values()], axis=0) @ self.counts
        result: Floats = self.num_micro_batch * least / speed
        return result

    def waited(self, order: Order, *, training: bool) -> Floats | None:
        """Seconds with waits, if values and gradients pass through all ops; None where none are known."""
        if self.num_ranks == 1:
            return None
        if order.fills:
            found = self.first({kind: own.fewest.both for kind, own in self.passes.items()})
            return np.maximum(found, self.there_and_back(order)) if training else found
        if order.fills_forward:
            return self.first({kind: own.fewest.forward for kind, own in self.passes.items()})
        if order == CHUNKS and training:
            return np.maximum(self.computed(), self.chunks())
        return None

    def first(self, filling: Mapping[Group, Floats]) -> Floats:
        """Ranks wait until those before them have done once what `filling` says.

        From the last rank to the first: a rank whose work is dear enough through the ranks behind it has no weight, another the rest
        of what it wants. Of ranks of one kind in a row the sum of weights comes to that geometrically.
        """
        ends, total = self._weights({kind: filling[kind] @ self.counts for kind in filling})
        least = [x[:, None] * self.passes[kind].mean.both + after[:, None] * filling[kind] for kind, x, after in ends]
        result: Floats = (np.min(least, axis=0) @ self.counts) / total
        return result

    def chunks(self) -> Floats:
        """Ranks of two chunks each, with groups of micro-batches as large as can be.

        From the last rank to the first: one weight for the wait for first chunks, that makes an op in a first chunk as dear as wanted, and
        one for that for second chunks, likewise. The sum of the latter is guessed first: that of equal ranks.
        """
        m, ratio = self.num_micro_batch, self.num_ranks / self.num_micro_batch
        wanted = {kind: 1 / own.mean.whole for kind, own in self.passes.items()}
        guess = reduce(np.minimum, wanted.values()) * (1 - math.exp(-ratio) * (1 + ratio)) / (1 - ratio * math.exp(-ratio))
        first, second, ranks = np.zeros_like(guess), np.zeros_like(guess), list[tuple[Group, Floats, Floats, Floats, Floats]]()
        for kind in (kind for kind, number in reversed(self.runs) for _ in range(number)):
            own = np.maximum(0.0, wanted[kind] - guess - first)
            both = np.maximum(own, wanted[kind] - second)
            ranks.append((kind, own, first, both, second))
            first, second = first + own / m, second + (both - own) / m
        prices = list[Floats]()
        for kind, own, before, both, behind in ranks:
            mean, once = self.passes[kind].mean.both, self.passes[kind].fewest.both
            prices += [own[:, None] * mean + (before + second)[:, None] * once, both[:, None] * mean + behind[:, None] * once]
        result: Floats = (reduce(np.minimum, prices) @ self.counts) / (first + second)
        return result

    def _weights(self, filling: Mapping[Group, Floats]) -> tuple[list[tuple[Group, Floats, Floats]], Floats]:
        """What ops pay on the first and the last rank of each run: m times its weight, and the weights of all ranks behind it; their sum.

        Between the two ends of a run both change in proportion.
        """
        m, ends = self.num_micro_batch, list[tuple[Group, Floats, Floats]]()
        after = np.zeros(len(next(iter(self.passes.values())).mean.forward))
        for kind, number in reversed(self.runs):
            whole = self.passes[kind].mean.whole
            share = filling[kind] / whole
            ends.append((kind, np.maximum(1 / whole - share * after, 0.0), after))
            last = np.where(ends[-1][1] > 0, _summed(after, 1 / whole, share, number - 1, m), after)
            ends.append((kind, np.maximum(1 / whole - share * last, 0.0), last))
            after = np.where(ends[-2][1] > 0, _summed(after, 1 / whole, share, number, m), after)
        return ends, after

    def there_and_back(self, order: Order) -> Floats:
        """Ranks wait until a micro-batch has gone to the end and come back."""
        m, p = self.num_micro_batch, self.num_ranks
        ahead = np.array(peak_in_flight(order.schedule, num_ranks=p, num_micro_batch=m), dtype=np.float64)[:, None, None]
        stops = list(accumulate((number for _, number in self.runs), initial=0))
        runs = [(self.passes[kind], slice(*ends)) for (kind, _), ends in zip(self.runs, pairwise(stops), strict=True)]
        more = np.concatenate([own.after_first(m) - ahead[ranks] * own.most.forward for own, ranks in runs])
        whole = np.concatenate([np.broadcast_to(own.fewest.whole, (ranks.stop - ranks.start, more.shape[1])) for own, ranks in runs])
        wanted = np.maximum(more @ self.counts, LEAST * whole)
        weights = np.maximum(0.0, (1 - np.sum(1 / wanted, axis=0) / (1 + np.sum(whole / wanted, axis=0)) * whole) / wanted)
        total = weights.sum(axis=0)
        weighed = weights[:, :, None] * more
        prices = [total[:, None] * own.fewest.both + weighed[ranks].min(axis=0) for own, ranks in runs]
        result: Floats = (reduce(np.minimum, prices) @ self.counts) / total
        return result


def _summed(after: Floats, wanted: Floats, share: Floats, number: int, num_micro_batch: int) -> Floats:
    """The weights behind a rank, with those of so many ranks of a kind before it."""
    left = (1 - share / num_micro_batch) ** number
    even = after + wanted * number / num_micro_batch
    result: Floats = np.where(share > TINY, after * left + wanted * (1 - left) / np.maximum(share, TINY), even)
    return result
