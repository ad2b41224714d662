"""How many rows replicas can hold at most if nothing is recomputed, however they are cut: where that is too few, no cut need be tried.

Every parameter is held, and what every op keeps for its backward pass, once at least; each byte of it that a rank keeps stands
there as often as the rank has micro-batches in flight. Gradients come while activations go, so they are not counted. With parameters
where most are in flight, most is left for activations:

    sum over ranks of (memory - parameters there) / in flight  >=  bytes kept per row x rows of a micro-batch
"""

from __future__ import annotations

from whale.estimate.memory.memory import size_line
from whale.estimate.prices.prices import Prices
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.strategy import Placed

SLACK = 1.01
"""Rows are surely too few where even so many times as many are: parts of a split are rounded to whole units."""


def most_rows(prices: Prices, pipeline: PipelineShape, placed: Placed) -> int:
    """A bound of the rows of a step that a replica can hold if nothing is recomputed.

    Args:
        placed: the devices of each rank.
    """
    kept = size_line(prices.outputs, dict.fromkeys(name for names in prices.kept_there.values() for name in names))
    held_bytes = (prices.held(own.name) for own in prices.graph.parameters)
    parameters = sum(own.compute + own.optimizer for own in held_bytes)
    in_flight = [min(pipeline.in_flight[stage] for stage in pipeline.stages_of(rank)) for rank in range(pipeline.num_ranks)]
    room = 0.0
    for rank in sorted(range(pipeline.num_ranks), key=lambda rank: -in_flight[rank]):
        memory = sum(prices.capacity(name) for name in placed[rank])
        held = min(memory, parameters)
        parameters -= held
        room += (memory - held) / in_flight[rank]
    if parameters > 0:
        return 0
    if kept.per_row <= 0:
        return int(1e18)
    return pipeline.num_micro_batch * max(0, int(SLACK * (room - kept.fixed) / kept.per_row))
