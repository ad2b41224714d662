"""What replicas take at least for their rows, many at once: waits, the end of a step, and what both leave out of towers.

Let t_s be the time of rank s for one micro-batch, over all its chunks. A step takes at least, for every rank s,

    pipeline    m t_s + what it waits for others              `whale.search.bounds.waiting`
    end         m t_s - B_s + sync_s + update_s               B_s: the last backward pass, behind which the sums may hide;
                                                              0 where unlike pipelines sum when all is done

so also any mean of these over the ranks, with weights of our choice. In a mean each op has a price per rank, and whatever
the cut it pays at least the least of them: the bound is the sum of that over the ops. With weights that make equal shares of the
work equally dear it is the time of a cut without grain. Ops that cost the same are one column, counted as often as they occur.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np

from whale.estimate import optimizer_seconds
from whale.estimate.costs.op_table import Floats
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.planning.pipeline.cut_points import CutPoints
from whale.search.arrangement import Group, Order, Team
from whale.search.bounds.chain import loose_runs
from whale.search.bounds.columns import Columns
from whale.search.bounds.summing import Summing
from whale.search.bounds.waiting import AlikeRanks, Pass, Passes, Pipelines, first_alike

MANY_AT_ONCE = 1 << 13
"""So many cases are worked out together, where there are more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica, and for how many rows it is asked what it takes.

    Attributes:
        team: its like.
        order: of its stages; of alike ones the first.
        num_micro_batch: of a step.
        rows: numbers of rows, each a case.
        summing: of its gradients.
    """

    team: Team
    order: Order
    num_micro_batch: int
    rows: tuple[float, ...]
    summing: Summing

    @staticmethod
    def of(team: Team, order: Order, num_micro_batch: int, rows: tuple[float, ...], summing: Summing) -> Asked:
        """One of a team, in the first of the orders of which as much is known."""
        return Asked(team.one, first_alike(order, team.num_ranks, num_micro_batch), num_micro_batch, rows, summing)

    @property
    def look(self) -> Hashable:
        """What is equal for those that are worked out together."""
        return self.order, len(self.team.runs), self.team.num_ranks == 1, self.summing.is_last


@dataclass(eq=False)
class Replicas:
    """What replicas of one model take at least.

    Args:
        prices: of the graph on the cluster.
        columns: the ops.
        points: where it can be cut.
        num_rows: of the global batch.
    """

    prices: Prices
    columns: Columns
    points: CutPoints
    num_rows: int
    _known: dict[tuple[Device, int, tuple[float, ...]], tuple[tuple[Floats, Floats], ...]] = field(default_factory=dict, init=False)

    def seconds(self, asked: Sequence[Asked]) -> list[Floats]:
        """The bound for each, per number of rows."""
        alike: dict[Hashable, list[int]] = {}
        for number, each in enumerate(asked):
            alike.setdefault(each.look, []).append(number)
        found: dict[int, Floats] = {}
        for numbers in alike.values():
            for some in _portions(numbers, [len(asked[number].rows) for number in numbers]):
                own = [asked[number] for number in some]
                stops = np.cumsum([len(each.rows) for each in own])
                found.update(zip(some, np.split(self._alike(own), stops[:-1]), strict=True))
        return [found[number] for number in range(len(asked))]

    def _alike(self, asked: Sequence[Asked]) -> Floats:
        """The bound for those that look alike, one after another."""
        first, sizes = asked[0], [len(each.rows) for each in asked]
        m = np.repeat([float(each.num_micro_batch) for each in asked], sizes)
        groups = [[each.team.runs[place] for each in asked] for place in range(len(first.team.runs))]
        passes = [self._passes([group for group, _ in own], asked) for own in groups]
        runs = [AlikeRanks(each, np.repeat([float(n) for _, n in own], sizes)) for each, own in zip(passes, groups, strict=True)]
        shapes = [(each.team.num_ranks, each.num_micro_batch, size) for each, size in zip(asked, sizes, strict=True)]
        pipelines, order = Pipelines(runs, self.columns.counts, m, shapes), first.order
        is_one = first.team.num_ranks == 1
        found = None if is_one else pipelines.waited(order, training=self.prices.training)
        if found is None or len(self._loose):  # else hardly anything is known by what they compute alone
            computed = pipelines.computed()
            found = computed if found is None else np.maximum(computed, found - self._beside(runs, order))
        if not self.prices.training:
            return found
        rates, is_last = np.repeat([each.summing.rate for each in asked], sizes), first.summing.is_last
        if is_one and order.fills and not is_last:
            return np.maximum(found, self._end_of_one([each.team.ranks[0] for each in asked], sizes, runs[0], m, rates))
        ends_with_backward = order.fills or order.fills_forward
        hidden = [run.passes.most.backward * (ends_with_backward and not is_last) for run in runs]
        return np.maximum(found, self._end(groups, sizes, runs, m, hidden, rates * (ends_with_backward or is_last)))

    def _passes(self, groups: Sequence[Group], asked: Sequence[Asked]) -> Passes:
        """Of a device of each split group, for micro-batches that differ by a row at most: part of the work, a kernel for each op."""
        own = [self._micro_batches(group.kind, each) for group, each in zip(groups, asked, strict=True)]
        widths = np.repeat([float(group.width) for group in groups], [len(each.rows) for each in asked])[:, None]
        sizes, found = [len(each.rows) for each in asked], list[Pass]()
        kernels = [np.repeat([self.columns.kernels(group.kind)[which] for group in groups], sizes, axis=0) for which in (0, 1)]
        for number in range(len(own[0])):
            whole = [np.concatenate([each[number][which] for each in own]) for which in (0, 1)]
            forward, backward = ((seconds - fixed) / widths + fixed for seconds, fixed in zip(whole, kernels, strict=True))
            found.append(Pass(forward, backward, self.columns.counts))
        return Passes(*found)

    def _micro_batches(self, kind: Device, asked: Asked) -> tuple[tuple[Floats, Floats], ...]:
        """Seconds forward and backward of micro-batches of the mean number of rows, of the fewest and of the most."""
        key = kind, asked.num_micro_batch, asked.rows
        if key not in self._known:
            mean = np.array(asked.rows) / asked.num_micro_batch
            sizes = mean, np.maximum(1.0, np.floor(mean + 1e-9)), np.ceil(mean - 1e-9)
            self._known[key] = tuple(self.columns.passes(kind, own) for own in sizes)
        return self._known[key]

    def _beside(self, runs: Sequence[AlikeRanks], order: Order) -> Floats:
        """Seconds by which a stage waits less for those before it where some of these have only ops that nobody there waits for.

        Such a stage has no more than a run of them, so all together no more than the longest runs.
        """
        loose = reduce(np.maximum, (run.passes.mean.both @ self._loose.T for run in runs))
        longest = np.cumsum(np.sort(loose, axis=1)[:, ::-1], axis=1)
        stages = np.sum([run.number for run in runs], axis=0).astype(np.int64) * order.num_chunks
        number = np.minimum(stages - 1, len(self._loose))
        result: Floats = np.where(number > 0, longest[np.arange(len(number)), number - 1], 0.0)
        return result

    @cached_property
    def _loose(self) -> Floats:
        return loose_runs(self.prices.graph, self.points, self.columns)

    def _end(
        self,
        groups: Sequence[Sequence[tuple[Group, int]]],
        sizes: Sequence[int],
        runs: Sequence[AlikeRanks],
        m: Floats,
        hidden: Sequence[Floats],
        rates: Floats,
    ) -> Floats:
        """The second bound, in the mean whose weights make every rank's share of the ops equally dear."""
        columns, priced = self.columns, list[Floats]()
        for own, run, hides in zip(groups, runs, hidden, strict=True):
            update = np.repeat([self._update(group.kind) for group, _ in own], sizes)
            width = np.repeat([float(group.width) for group, _ in own], sizes)
            per_byte = (update + rates) / width
            priced.append(m[:, None] * run.passes.mean.both - hides + per_byte[:, None] * columns.trained)
        wanted = [1 / (seconds @ columns.counts) for seconds in priced]
        total = sum(weight * run.number for weight, run in zip(wanted, runs, strict=True))
        shares = ((weight / total)[:, None] * seconds for weight, seconds in zip(wanted, priced, strict=True))
        result: Floats = reduce(np.minimum, shares) @ columns.counts
        return result

    def _end_of_one(self, groups: Sequence[Group], sizes: Sequence[int], run: AlikeRanks, m: Floats, rates: Floats) -> Floats:
        """The second bound of a rank that has the whole model: of gradients that are whole late in the pass less of the sum can hide."""
        columns = self.columns
        sums = {group: columns.last_sums(group.kind, self.num_rows) for group in dict.fromkeys(groups)}
        num_bytes, left = (np.repeat([sums[group][which] for group in groups], sizes, axis=0) for which in (0, 1))
        update, width = (
            np.repeat(each, sizes) for each in ([self._update(group.kind) for group in groups], [float(group.width) for group in groups])
        )
        hiding = run.passes.most.backward @ columns.counts
        exposed = np.max((rates / width)[:, None] * num_bytes - hiding[:, None] * left, axis=1)
        result: Floats = m * run.passes.mean.whole + exposed + update * num_bytes[:, -1] / width
        return result

    def _update(self, kind: Device) -> float:
        """Seconds per byte of a parameter that the optimizer takes."""
        return optimizer_seconds(kind, 1.0, 1.0, self.prices.costs.optimizer_states)


def _portions(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Parts of them with not many more cases than are worked out together."""
    portion, total = list[int](), 0
    for number, size in zip(numbers, sizes, strict=True):
        portion.append(number)
        total += size
        if total >= MANY_AT_ONCE:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion
