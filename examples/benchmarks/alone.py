"""What each rank does alone in its work while all ranks compute: rows per second of the plain training step, nothing sent.

    rank 0   |rows|rows|rows|rows|rows|rows|update|
    rank 1   |  rows  |  rows  |  rows  |  update  |      the same clock for both: each goes on until the time is up

Forward and backward are timed apart from the optimizer's update: how many rows come with one update is the plan's affair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ranks import meet
from torch import Tensor, nn

from whale.ir.cluster import Cluster
from whale.ir.plan import Plan, Replica

MOST_ROWS = 8
"""Rows that are computed at once: so few that slow and fast ranks end soon after one another."""


@dataclass(frozen=True)
class Work:
    """What a plan gives a rank.

    Attributes:
        at_once: rows of a forward pass, at most `MOST_ROWS`.
        per_update: rows that one update of all parameters comes with: those of the rank's replica.
        fill: how many times longer the step takes because a pipeline fills and drains: (m + p - 1) / m.
    """

    at_once: int
    per_update: int
    fill: float


def work_of(plan: Plan, cluster: Cluster, rank: int, rows: int) -> Work:
    """What a rank does in a step; of a rank that the plan leaves out, what the whole step would be to it."""
    name = cluster.devices[rank].name
    for replica, (first, stop) in zip(plan.replicas, plan.replica_rows(rows), strict=True):
        if any(name in stage.virtual_device.devices for stage in replica.stages):
            count = replica.pipeline.num_micro_batch
            return Work(max(1, min(MOST_ROWS, (stop - first) // count)), stop - first, _fill(replica))
    return Work(min(MOST_ROWS, rows), rows, 1.0)


def _fill(replica: Replica) -> float:
    return 1 + (replica.pipeline.num_ranks - 1) / replica.pipeline.num_micro_batch


class Alone:
    """The plain training step on this rank, its parts timed again and again.

    Args:
        model: of this rank alone.
        batch: makes a batch of so many rows.
        loss: of the model's output.
        optimizer: of the parameters.
        work: of this rank under the plan that it is beside.
        seconds: of each round.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], dict[str, Tensor]],
        loss: Callable[[Tensor, dict[str, Tensor]], Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        work: Work,
        seconds: float,
    ) -> None:
        self._model, self._batch, self._loss = model, batch(work.at_once), loss
        self._optimizer, self._work, self._seconds = optimizer(model.parameters()), work, seconds
        self._pass()
        self._optimizer.step()

    def rows_per_second(self) -> list[float]:
        """Of every rank, from one round; every rank calls it."""
        meet()
        begin, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - begin < self._seconds:
            self._pass()
            count += 1
        per_row = (time.perf_counter() - begin) / (count * self._work.at_once)
        updates = []
        for _ in range(3):
            begin = time.perf_counter()
            self._optimizer.step()
            updates.append(time.perf_counter() - begin)
        rate = 1 / (per_row + statistics.mean(updates) / self._work.per_update)
        found: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(found, rate)
        return found

    def _pass(self) -> None:
        self._optimizer.zero_grad()
        inputs = self._batch
        self._loss(self._model(inputs["ids"]), inputs).backward()
