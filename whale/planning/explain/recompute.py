"""What recomputes and why, for `whale explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.estimate.prices.prices import PartCost
from whale.ir.plan import Choice, Replica
from whale.planning.replicas.solve import Solution, Solver
from whale.units import counted, format_bytes, format_seconds


def explain_recompute(solver: Solver, best: Solution, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """A choice per stage that recomputes, replicas that do the same together; nothing where nobody asked for any."""
    seen: dict[tuple[int, object], list[int]] = {}
    for index, model in enumerate(best.replicas):
        for stage, recompute in enumerate(model.recomputes):
            if recompute.segments or recompute.num_alive:
                seen.setdefault((stage, (recompute, replicas[index].stages[stage].shares)), []).append(index)
    for (stage, _), members in seen.items():
        yield _stage(solver, best, replicas, stage, members)
    if not seen and solver.policy.kind == "auto":
        yield Choice("recompute", "activations", "nothing recomputed", bound="everything fits in memory")


def _stage(solver: Solver, best: Solution, replicas: Sequence[Replica], stage: int, members: list[int]) -> Choice:
    model = best.replicas[members[0]]
    planned, recompute, part = replicas[members[0]].stages[stage], model.recomputes[stage], model.assignment.parts[stage]
    costs, rows = model.costs[stage], planned.shares
    prices = [solver.prices.local(part.ops, planned.shards, p) if planned.shards else solver.prices for p in range(planned.split)]
    seconds = max(
        prices[position].again(part, recompute, solver.prices.cluster.by_name[name], max(1.0, share)).device.at(share)
        for group, share in zip(planned.groups, rows, strict=True)
        for position, name in enumerate(group)
    )
    without, num_rows = prices[0].part(part), max(rows)
    kept, instead = (_kept(cost, model.pipeline.in_flight[stage], num_rows) for cost in (costs[0].part, without))
    if recompute.num_alive:
        decision = f"all {len(part.ops)} ops, by R actions"
    else:
        decision = f"{sum(map(len, recompute.segments))} of {len(part.ops)} ops, in {counted(len(recompute.segments), 'segment')}"
    device = planned.virtual_device.devices[0]
    memory = solver.prices.costs.capacity(solver.prices.cluster.by_name[device])
    is_asked = solver.policy.kind != "auto"
    return Choice(
        "recompute",
        f"stage {stage} of replica {', '.join(str(index) for index in members)}",
        decision,
        cost=f"{format_seconds(seconds)} more backward per micro-batch",
        bound="the configuration" if is_asked else f"memory of {device} ({format_bytes(memory)})",
        runner_up=f"nothing recomputed: {format_bytes(instead)} of activations instead of {format_bytes(kept)}",
    )


def _kept(cost: PartCost, in_flight: int, num_rows: int) -> int:
    return round(cost.activation.at(num_rows) * in_flight + cost.working.at(num_rows))
