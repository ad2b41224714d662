"""What was cut and why: axes and sizes of every split stage, what they cost, what bound them, and the next best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.ir.plan import Choice, Replica, describe_shards
from whale.planning.replicas.solve import Solution
from whale.planning.shard.sharding import StageSharding
from whale.units import format_bytes, format_seconds


def explain_sharding(best: Solution, replicas: Sequence[Replica]) -> Iterator[Choice]:
    """One choice per split stage, replicas that cut alike together."""
    found: dict[tuple[int, StageSharding], list[int]] = {}
    for index, model in enumerate(best.replicas):
        for stage, sharding in enumerate(model.shardings):
            if sharding is not None:
                found.setdefault((stage, sharding), []).append(index)
    # Last stages first: what is next best there may fit in the others.
    others = {key: "; ".join(_others(key[1])) for key in reversed(found)}
    for (stage, sharding), members in found.items():
        copies = f" of replica {', '.join(map(str, members))}" if len(members) < len(replicas) else ""
        yield Choice(
            "sharding",
            f"axes of stage {stage}{copies}",
            describe_shards(replicas[members[0]].stages[stage].shards),
            cost=f"{format_seconds(sharding.seconds)} per micro-batch, {_memory(replicas[members[0]], stage)}",
            bound=_bound(sharding),
            runner_up=others[stage, sharding],
        )


def _bound(sharding: StageSharding) -> str:
    text = "memory" if sharding.bound_by_memory else "time of the slowest device and of its reductions"
    return text + (f"; the search ended within {sharding.gap:.1%} of the optimum" if sharding.gap > 0 else "")


def _memory(replica: Replica, stage: int) -> str:
    """What each position of a split group holds, at most."""
    own = replica.stages[stage]
    held = [max(e.parameter_bytes + e.activation_bytes for e in own.estimates[position :: own.split]) for position in range(own.split)]
    texts = list(dict.fromkeys(format_bytes(num_bytes) for num_bytes in held))
    return f"{' | '.join(texts)} per device"


def _others(sharding: StageSharding) -> Iterator[str]:
    """The next best set, told by what differs; and no cut at all."""
    names, seconds = sharding.runner_up
    if names:
        chosen = {shard.axis for shard in sharding.shards}
        less = _listed([shard.axis for shard in sharding.shards if shard.axis not in names])
        more = _listed([axis for axis in names if axis not in chosen])
        words = [text for text in (f"without {less}" if less else "", f"with {more}" if more else "") if text]
        yield f"{' and '.join(words)}: {format_seconds(seconds)}"
    yield f"nothing cut: {format_seconds(sharding.whole_seconds)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "") if names else ""
