"""Why replicas were joined, or were not, for `whale explain`: the ops that need the rows of all, and what is gathered for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.estimate.prices.prices import Prices
from whale.ir.plan import Choice, Plan, Replica
from whale.sharding.bridge_bytes import bridge_bytes
from whale.units import counted, format_bytes

APART = "not gathered"
"""The decision where an op needs more rows than are at hand at once."""


def explain_apart(reason: str) -> Choice:
    """The choice to leave apart what some op needs at once."""
    return Choice("joining", "rows that an op needs at once", APART, bound=reason)


def reason_apart(plan: Plan) -> str:
    """Why rows that an op needs at once are apart; "" where they are not, or the plan does not tell."""
    return next((choice.bound for choice in plan.choices if choice.pass_name == "joining" and choice.decision == APART), "")


def explain_joining(apart: Sequence[Replica], plan: Plan, prices: Prices) -> Iterator[Choice]:
    """One choice per stage whose rows are divided over a split group since some op needs them all; none where nothing is joined."""
    if plan.replicas == tuple(apart) or len(plan.replicas) > 1:
        return
    for stage, before in zip(plan.replicas[0].stages, apart[0].stages, strict=True):
        if stage.row_shard is None or before.shards:
            continue
        shard, axes = stage.shards[0], prices.axes
        bridges = [bridge for bridge in prices.bridges(stage.ops, stage.shards, frozenset()) if bridge.forward or bridge.backward]
        received = (bridge_bytes(bridge, prices.graph, axes, stage.shards, plan.planned_rows) for bridge in bridges)
        num_bytes = sum(max(sum(both_ways) for both_ways in devices) for devices in received)
        mixing = [found for found in axes.mixing if found.op in stage.ops]
        yield Choice(
            "joining",
            f"rows of stage {stage.index}",
            f"divided over one group of {stage.split} devices, {shard}",
            cost=f"{counted(len(bridges), 'bridge')}, {format_bytes(num_bytes)} per device",
            bound="; ".join(map(str, mixing)) or "another stage needs the batch whole",
            runner_up=f"{counted(len(apart), 'replica')} by themselves: other numbers than those of one device",
        )
