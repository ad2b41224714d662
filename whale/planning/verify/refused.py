"""Whether a plan fits is the estimate's word: where it finds more than the planner's closed forms do, all is decided again with less.

closed forms:  fits  -->  estimate: 300 bytes short on T4s  -->  closed forms, with 300 bytes less of each T4  --> ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from whale.errors import PlanError
from whale.estimate import StepEstimate
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.verify.verify import memory_fault, overfull

T = TypeVar("T")

MAX_ROUNDS = 4
"""So often a plan is decided again; each time about as much less memory is filled as was short."""


class Refused(MemoryShortage):
    """The estimate of a plan does not fit.

    Attributes:
        lacking: per kind of device, the bytes that are short.
    """

    lacking: Mapping[Device, int] = {}


def refuse_overfull(step: StepEstimate, cluster: Cluster) -> None:
    """Raises `Refused` where a step does not fit in memory."""
    lacking, faults = dict[Device, int](), list[PlanError]()
    for each, short in overfull(step, cluster):
        kind = cluster.by_name[each.devices[0]].kind
        lacking[kind] = max(lacking.get(kind, 0), short)
        faults.append(memory_fault(each, short))
    if faults:
        refused = Refused("\n".join(fault.message for fault in faults), hint=faults[0].hint)
        refused.num_bytes, refused.lacking = max(lacking.values()), lacking
        raise refused


def decided_within(prices: Prices, decide: Callable[[Prices], T]) -> T:
    """What is decided, on devices whose memory the estimate finds to be enough.

    Args:
        prices: of the graph on the cluster.
        decide: makes a plan, and raises `Refused` where it does not fit.

    Raises:
        MemoryShortage: nothing fits; where a plan was refused, with the estimate's figures of the first one.
    """
    first: Refused | None = None
    for _ in range(MAX_ROUNDS):
        try:
            return decide(prices)
        except Refused as refused:
            first = first or refused
            prices = prices.sparing(refused.lacking)
        except MemoryShortage as shortage:
            raise first or shortage from None
    assert first is not None
    raise first
