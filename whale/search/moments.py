"""Plans judged by what they come to where what was measured scatters: each kind of device, and the links, have slow moments of their own.

measurements    ....:::::|:::::....        half of them are no slower than the median,
                      median ^ slow        half are slower: in their middle is the upper quartile

device a        ======~~~~~~======         a plan in which all wait for all loses in the slow moments of each of them,
device b        =============~~~~~         one in which b has time to spare in those of a alone
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from whale.estimate import StepEstimate, estimate_with
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Device
from whale.ir.plan import Plan
from whale.search.arrangement import Order, Team
from whale.search.objective import LeastMemory, Objective


@dataclass(frozen=True, eq=False)
class Expected:
    """Another objective, with what slow moments add to it: half of what each adds by itself, since half of all moments are slow.

    Attributes:
        judge: that objective.
        slow: prices in the slow moments of each.
    """

    judge: Objective
    slow: tuple[Prices, ...]

    @property
    def better(self) -> str:
        return self.judge.better

    def of(self, plan: Plan, step: StepEstimate) -> float:
        usual = self.judge.of(plan, step)
        values = (self.judge.of(plan, estimate_with(prices, plan)) for prices in self.slow)
        return usual + sum(max(value - usual, 0.0) for value in values) / 2

    def likely(self, teams: Sequence[Team], order: Order, micro_batches: Sequence[int], seconds: Sequence[float]) -> Sequence[float]:
        return self.judge.likely(teams, order, micro_batches, seconds)

    def of_sample(self, value: float, num_rows: int) -> float:
        return self.judge.of_sample(value, num_rows)

    def text(self, value: float) -> str:
        return self.judge.text(value)


def expected(judge: Objective, prices: Prices) -> Objective:
    """An objective with what slow moments add to it; itself where nothing scatters that it minds."""
    slow = () if isinstance(judge, LeastMemory) else tuple(slow_prices(prices))
    return Expected(judge, slow) if slow else judge


def slow_prices(prices: Prices) -> Iterator[Prices]:
    """Prices in the slow moments of each kind of device and of the links; none of what does not scatter, or was not measured."""
    measured = prices.costs.measured
    for kind in dict.fromkeys(device.kind for device in prices.cluster.devices):
        if kind.handling.slow is not None or (measured is not None and measured.kinds[kind].slow > 1.0):
            yield _slowed(prices, (kind,))
    if any(link.in_slow_moment != link for link in prices.cluster.links):
        yield _slowed(prices, links=True)


def _slowed(prices: Prices, kinds: Collection[Device] = (), *, links: bool = False) -> Prices:
    usual, measured = prices.cluster, prices.costs.measured
    cluster = usual.in_slow_moment(kinds, links=links)
    costs = prices.costs
    if measured is not None:
        names = {device.kind: slow.kind for device, slow in zip(usual.devices, cluster.devices, strict=True)}
        costs = replace(costs, measured=measured.in_slow_moment(kinds, names))
    slow = Prices(prices.graph, cluster, costs)
    slow.axes = prices.axes
    return slow


def value_on(objective: Objective, plan: Plan, prices: Prices) -> float:
    """What an objective says of a plan with other prices: of other links, say."""
    own = expected(objective.judge, prices) if isinstance(objective, Expected) else objective
    return own.of(plan, estimate_with(prices, plan))
