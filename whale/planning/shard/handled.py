"""What the messages of a cut stage take of the time of each device of its split groups, beside what all wait for."""

from __future__ import annotations

from collections.abc import Sequence

from whale.estimate.costs.line import Line
from whale.ir.plan import Shard
from whale.planning.shard.figures import Figures
from whale.planning.shard.space import Scene


def handled(scene: Scene, figures: Figures, shards: tuple[Shard, ...]) -> Sequence[float]:
    """Seconds per position, of one micro-batch, on the device there that they take most of.

    Args:
        shards: the cuts, of whatever sizes.
    """
    tolls, found = figures.tolls, [0.0] * figures.site.width
    workers = [worker for worker in figures.workers if worker.device.handling]
    if workers:
        bridges = tolls.prices.bridges(scene.ops, shards, scene.returned)
        for worker in workers:
            seconds = Line.sum(tolls.handled(bridges, worker.device)).at(figures.site.num_rows)
            found[worker.position] = max(found[worker.position], seconds)
    return found
