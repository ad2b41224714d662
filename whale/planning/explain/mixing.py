"""Ops that mix samples which a plan keeps apart, so that results differ from those of one device, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.axes import Axes, Mixing, discover
from whale.estimate.prices.prices import Prices
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, Replica
from whale.sharding.bridges import bridge_bytes
from whale.units import counted, each_counted, format_bytes

APART = "not gathered"  # decision where an op needs more rows than a device has at once


def explain_not_joined(reason: str) -> Choice:
    return Choice("joining", "rows that an op needs at once", APART, bound=reason)


def reason_not_joined(plan: Plan) -> str:
    """Why rows that an op needs together are kept apart; "" where they are not, or the plan does not say."""
    return next((choice.bound for choice in plan.choices if choice.pass_name == "joining" and choice.decision == APART), "")


def explain_joining(joined: Sequence[Replica], plan: Plan, prices: Prices) -> Iterator[Choice]:
    """One choice per stage whose rows are divided over a split group because some op needs them all.

    Args:
        joined: the separate replicas.
        plan: in which they are one.
    """
    for stage, before in zip(plan.replicas[0].stages, joined[0].stages, strict=True):
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
            runner_up=f"{counted(len(joined), 'replica')} each on its own rows: the numbers are not those of one device",
        )


MAX_PLACES = 5  # lines of the user's code in a warning


def mixed_apart(plan: Plan, graph: ModelGraph, axes: Axes | None = None) -> tuple[Mixing, ...]:
    """The ops and loss terms that mix samples of which the plan computes some separately.

    `axes`: of the graph, where already known.
    """
    if not keeps_apart(plan):
        return ()
    in_pieces, divided = _in_pieces(plan), _divided(plan)
    found = (axes or discover(graph)).mixing
    return tuple(mixing for mixing in found if in_pieces or mixing.op in divided or graph.by_name[mixing.op].kind != "call")


def keeps_apart(plan: Plan) -> bool:
    """Whether a plan computes any samples separately."""
    return _in_pieces(plan) or any(len(stage.shares) > 1 for replica in plan.replicas for stage in replica.stages)


def terms_apart(plan: Plan, graph: ModelGraph) -> Iterator[str]:
    """Warnings for loss terms that are no sums over samples, where the plan keeps their rows apart."""
    in_pieces, divided = _in_pieces(plan), _divided(plan)
    for term in graph.loss:
        if not term.exact and (in_pieces or term.sum in divided):
            place = f" (at {term.where})" if term.where else ""
            yield f"{term.reason}; it is computed per device and micro-batch, and weighted by rows{place}"


def _divided(plan: Plan) -> frozenset[str]:
    """Ops whose rows several devices of a stage divide."""
    return frozenset(name for replica in plan.replicas for stage in replica.stages if len(stage.shares) > 1 for name in stage.ops)


def _in_pieces(plan: Plan) -> bool:
    return len(plan.replicas) > 1 or any(pipeline.num_micro_batch > 1 for pipeline in plan.pipelines)


def explain_mixing(mixing: Sequence[Mixing]) -> Iterator[Choice]:
    """Ops that mix samples: their results depend on which rows share a micro-batch of one device."""
    for found in mixing:
        yield Choice(
            "bridging",
            f"{found.op} {'mixes' if found.kind == 'mixes' else 'may mix'} samples",
            "computed over the rows of one device and micro-batch",
            cost=found.reason,
            bound=f"the batch is cut (at {found.where})" if found.where else "the batch is cut",
        )


def warn_of_mixing(mixing: Sequence[Mixing], plan: Plan, graph: ModelGraph) -> str:
    """One text for all ops that mix samples, with the user's lines; "" where none does."""
    if not mixing:
        return ""
    places: dict[str, str] = {}
    for found in mixing:
        places.setdefault(place_of(found, graph), found.reason)
    shown = [f"  {place}: {reason}" for place, reason in list(places.items())[:MAX_PLACES]]
    more = [f"  and {len(places) - MAX_PLACES} more places: see `whale plan --explain`"] if len(places) > MAX_PLACES else []
    counts = [pipeline.num_micro_batch for pipeline in plan.pipelines]
    pieces = f"{counted(len(plan.replicas), 'replica')} of {each_counted(list(dict.fromkeys(counts)), 'micro-batch')}"
    first = f"the batch is needed whole here, and {pieces} see only their own rows of it: the numbers are not those of one device"
    reason = reason_not_joined(plan)
    return "\n".join([first, *shown, *more, *([f"  they are not gathered: {reason}"] if reason else [])])


def place_of(mixing: Mixing, graph: ModelGraph) -> str:
    """The user's line, or the module where the line is torch's own."""
    module = graph.by_name[mixing.op].module
    return str(mixing.where or (f"module {module}" if module else f"%{mixing.op}"))
