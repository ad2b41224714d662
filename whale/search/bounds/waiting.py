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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.op_table import Floats
from whale.schedules import peak_in_flight
from whale.search.arrangement import Order

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
    """Seconds per column of a micro-batch on a kind of device, ``[cases, columns]``.

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
        """Seconds of all ops: ``[cases]``."""
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

    def after_first(self, num_micro_batch: Floats) -> Floats:
        """Seconds per column of so many micro-batches, but for the backward pass of the first of them."""
        return num_micro_batch[:, None] * self.mean.both - self.fewest.both + self.fewest.forward


@dataclass(frozen=True, slots=True)
class AlikeRanks:
    """Alike ranks that follow one another.

    Attributes:
        passes: of each.
        number: how many: ``[cases]``.
    """

    passes: Passes
    number: Floats


@dataclass(frozen=True, slots=True)
class Pipelines:
    """Replicas, many at once, that are as many runs long.

    Attributes:
        runs: along them.
        counts: ops of each column.
        num_micro_batch: of a step: ``[cases]``.
        shapes: ranks and micro-batches, and how many cases in a row have them.
    """

    runs: Sequence[AlikeRanks]
    counts: Floats
    num_micro_batch: Floats
    shapes: Sequence[tuple[int, int, int]]

    def computed(self) -> Floats:
        """Seconds in which nobody waits: per case, as all here."""
        speed = sum(run.number / run.passes.mean.whole for run in self.runs)
        result: Floats = self.num_micro_batch * (reduce(np.minimum, (run.passes.mean.shares for run in self.runs)) @ self.counts) / speed
        return result

    def waited(self, order: Order, *, training: bool) -> Floats | None:
        """Seconds with waits, if values and gradients pass through all ops; None where none are known."""
        if order.fills:
            found = self.first([run.passes.fewest.both for run in self.runs])
            return np.maximum(found, self.there_and_back(order)) if training else found
        if order.fills_forward:
            return self.first([run.passes.fewest.forward for run in self.runs])
        if order == CHUNKS and training:
            return np.maximum(self.computed(), self.chunks())
        return None

    def first(self, filling: Sequence[Floats]) -> Floats:
        """Ranks wait until those before them have done once what `filling` says, per run.

        From the last rank to the first: a rank whose work is dear enough through the ranks behind it has no weight, another the rest
        of what it wants. Of ranks of one kind in a row the sum of weights comes to that geometrically, and what ops pay changes in
        proportion between the two ends.
        """
        m, prices = self.num_micro_batch, list[Floats]()
        after = np.zeros_like(m)
        for run, own in zip(reversed(self.runs), reversed(filling), strict=True):
            mean, whole = run.passes.mean.both, run.passes.mean.whole
            share = own @ self.counts / whole
            nearest = np.maximum(1 / whole - share * after, 0.0)
            farthest = np.where(nearest > 0, _summed(after, 1 / whole, share, run.number - 1, m), after)
            prices.append(nearest[:, None] * mean + after[:, None] * own)
            prices.append(np.maximum(1 / whole - share * farthest, 0.0)[:, None] * mean + farthest[:, None] * own)
            after = np.where(nearest > 0, _summed(after, 1 / whole, share, run.number, m), after)
        result: Floats = (reduce(np.minimum, prices) @ self.counts) / after
        return result

    def chunks(self) -> Floats:
        """Ranks of two chunks each, with groups of micro-batches as large as can be.

        From the last rank to the first: one weight for the wait for first chunks, that makes an op in a first chunk as dear as wanted, and
        one for that for second chunks, likewise. The sum of the latter is guessed first: that of equal ranks. Along a run of ranks both
        sums approach what is wanted geometrically, so what ops pay is least at one of its ends.
        """
        m = self.num_micro_batch
        ratio = sum(run.number for run in self.runs) / m
        dearest = reduce(np.minimum, (1 / run.passes.mean.whole for run in self.runs))
        guess = dearest * (1 - np.exp(-ratio) * (1 + ratio)) / (1 - ratio * np.exp(-ratio))
        first, second, ends = np.zeros_like(m), np.zeros_like(m), list[tuple[AlikeRanks, Floats, Floats, Floats, Floats]]()
        for run in reversed(self.runs):
            wanted = 1 / run.passes.mean.whole
            own, both = np.maximum(0.0, wanted - guess - first), wanted - second
            for number in (np.zeros_like(m), run.number - 1):
                here, there = _left_after(own, both, number, m)
                ends.append((run, here, first + own - here, np.maximum(here, there), wanted - there))
            here, there = _left_after(own, both, run.number, m)
            first, second = first + own - here, wanted - there
        prices = list[Floats]()
        for run, own, before, both, behind in ends:
            mean, once = run.passes.mean.both, run.passes.fewest.both
            prices += [own[:, None] * mean + (before + second)[:, None] * once, both[:, None] * mean + behind[:, None] * once]
        result: Floats = (reduce(np.minimum, prices) @ self.counts) / (first + second)
        return result

    def there_and_back(self, order: Order) -> Floats:
        """Ranks wait until a micro-batch has gone to the end and come back.

        What an op pays on a rank of a run, by how many forward passes are before its first backward pass, is a quotient of two lines, or
        where a weight is held back a line that falls: least at one of the ends of the run.
        """
        m, peaks = self.num_micro_batch, list[int]()
        for num_ranks, num_micro_batch, times in self.shapes:
            peaks += peak_in_flight(order.schedule, num_ranks=num_ranks, num_micro_batch=num_micro_batch) * times
        ahead = np.array(peaks, dtype=np.float64)
        numbers = [run.number.astype(np.int64) for run in self.runs]
        ranks: NDArray[np.int64] = reduce(np.add, numbers)
        start: NDArray[np.int64] = np.cumsum(ranks) - ranks  # of the ranks of a run in each case
        inverse, ends = list[Floats](), list[Floats]()
        for run, number in zip(self.runs, numbers, strict=True):
            whole, forward = run.passes.after_first(m) @ self.counts, run.passes.most.forward @ self.counts
            case = np.repeat(np.arange(len(m)), number)
            place = np.arange(len(case)) + np.repeat(start - np.cumsum(number) + number, number)
            wanted = np.maximum(whole[case] - ahead[place] * forward[case], LEAST * run.passes.fewest.whole[case])
            inverse.append(np.bincount(case, 1 / wanted, minlength=len(m)).astype(np.float64))
            ends.append(ahead[np.stack([start, start + number - 1])])
            start = start + number
        waiting = np.sum([run.passes.fewest.whole * own for run, own in zip(self.runs, inverse, strict=True)], axis=0)
        part = reduce(np.add, inverse) / (1 + waiting)
        left = [np.maximum(0.0, 1 - part * run.passes.fewest.whole) for run in self.runs]
        total: Floats = np.sum([own * each for own, each in zip(left, inverse, strict=True)], axis=0)
        prices = list[Floats]()
        for run, own, reached in zip(self.runs, left, ends, strict=True):
            for peak in reached:
                more = run.passes.after_first(m) - peak[:, None] * run.passes.most.forward
                weight = own / np.maximum(more @ self.counts, LEAST * run.passes.fewest.whole)
                prices.append(total[:, None] * run.passes.fewest.both + weight[:, None] * more)
        result: Floats = (reduce(np.minimum, prices) @ self.counts) / total
        return result


def _summed(after: Floats, wanted: Floats, share: Floats, number: Floats, num_micro_batch: Floats) -> Floats:
    """The weights behind a rank, with those of so many ranks of a kind before it."""
    left = (1 - share / num_micro_batch) ** number
    even = after + wanted * number / num_micro_batch
    result: Floats = np.where(share > TINY, after * left + wanted * (1 - left) / np.maximum(share, TINY), even)
    return result


def _left_after(own: Floats, both: Floats, number: Floats, num_micro_batch: Floats) -> tuple[Floats, Floats]:
    """What is wanted of an op in a first chunk, and in a second one, beyond what it pays through so many ranks of a kind behind it."""
    left = 1 - 1 / num_micro_batch
    approached = np.maximum(own, both) * left**number + number * left ** np.maximum(number - 1, 0) * own / num_micro_batch
    return own * left**number, np.where(
        (own > 0) | (both > 0), approached, both
    )  # beside rounding both is never less than own where that is
