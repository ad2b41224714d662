"""Gradient synchronisation: one bucket per set of owners, reduced while the backward pass still runs.

Every parameter lies on the ranks that own it; its gradient is the sum over them. Parameters of equal owners share flat
buckets, in reverse order of use, and a bucket is sent once each of its gradients is final:

    backward   |layer 3|layer 2|layer 1|
    bucket 0           |--- layers 3, 2 ---|
    bucket 1                           |-- layer 1 --|

Buckets of one group start in one order on every rank, whatever order the gradients come in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.comm import Groups, wait
from whale.ir.graph import DTYPE_BYTES, ModelGraph
from whale.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters whose gradients travel together.

    Attributes:
        names: of the parameters, in the order of the flat buffer.
        owners: ranks of the plan that hold them.
        stages: stages (by replica) that use them.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]
    stages: tuple[tuple[int, int], ...]


def plan_buckets(plan: Plan, model: ModelGraph, reached: frozenset[str], bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """The buckets of the whole plan, equal on every rank.

    Args:
        plan: who owns what.
        model: sizes, and the order of use.
        reached: parameters that get a gradient.
        bucket_bytes: a bucket is closed when it has this many bytes.
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            for name in stage.parameters:
                holders.setdefault(name, []).append((replica.index, stage.index))
    order: dict[str, int] = {}
    for position, op in enumerate(model.ops):
        for name in op.inputs:
            order[name] = position  # the last use: its gradient comes first
    last_use = {model.by_name[name].target: position for name, position in order.items() if model.by_name[name].kind == "parameter"}
    open_buckets: dict[tuple[object, ...], list[str]] = {}
    closed: list[BucketPlan] = []
    for name in sorted(reached & set(holders), key=lambda n: (-last_use.get(n, 0), n)):
        stages, owners, dtype = tuple(holders[name]), plan.owners[name], model.parameter_by_name[name].spec.dtype
        key = (stages, owners, dtype)
        names = open_buckets.setdefault(key, [])
        names.append(name)
        if sum(model.parameter_by_name[n].spec.num_elements for n in names) * DTYPE_BYTES[dtype] >= bucket_bytes:
            closed.append(BucketPlan(tuple(names), owners, stages))
            del open_buckets[key]
    for (stages, owners, _), names in open_buckets.items():  # type: ignore[assignment]
        closed.append(BucketPlan(tuple(names), owners, stages))
    return tuple(sorted(closed, key=lambda bucket: (-max(s for _, s in bucket.stages), -last_use.get(bucket.names[0], 0), bucket.names)))


@dataclass
class _Bucket:
    """One bucket on this rank, through one step."""

    plan: BucketPlan
    ranks: tuple[int, ...]
    parameters: list[torch.nn.Parameter]
    stages: frozenset[int]
    flat: torch.Tensor
    views: list[torch.Tensor]
    final_stages: set[int] = field(default_factory=set)
    num_final: int = 0
    is_ready: bool = False
    is_started: bool = False
    work: dist.Work | None = None


class GradientSync:
    """The buckets of this rank.

    Args:
        buckets: of the whole plan; those of a single owner need nothing.
        rank: this rank of the plan.
        stages: (replica, stage) pairs that it runs.
        world_ranks: per rank of the plan, the rank in the world.
        parameters: what this rank owns.
        groups: one per owner set.
        timeout: the longest wait.
    """

    def __init__(
        self,
        buckets: Sequence[BucketPlan],
        rank: int,
        stages: Collection[tuple[int, int]],
        world_ranks: Sequence[int],
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Groups,
        timeout: timedelta,
    ) -> None:
        self._groups = groups
        self._timeout = timeout
        self._queues: dict[tuple[int, ...], list[_Bucket]] = {}
        self._buckets: list[_Bucket] = []
        self._armed: set[int] = set()
        for plan in buckets:
            if rank not in plan.owners or len(plan.owners) == 1:
                continue
            bucket = _make_bucket(plan, stages, tuple(sorted(world_ranks[owner] for owner in plan.owners)), parameters)
            self._buckets.append(bucket)
            self._queues.setdefault(bucket.ranks, []).append(bucket)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody whom this rank exchanges gradients with, itself included."""
        return tuple(sorted({rank for bucket in self._buckets for rank in bucket.ranks}))

    def begin(self) -> None:
        """Forgets the last step."""
        self._armed.clear()
        for bucket in self._buckets:
            bucket.final_stages.clear()
            bucket.num_final, bucket.is_ready, bucket.is_started, bucket.work = 0, False, False, None

    def arm(self, stage: int) -> None:
        """States that the backward about to run is this stage's last of the step."""
        self._armed.add(stage)

    def finish_stage(self, stage: int) -> None:
        """States that every gradient of a stage is final, and starts what can start."""
        for bucket in self._buckets:
            if stage in bucket.stages:
                bucket.final_stages.add(stage)
                bucket.is_ready = bucket.is_ready or bucket.final_stages == bucket.stages
        self._start_ready()

    def wait(self) -> None:
        """Waits until the gradients are sums over their owners."""
        for bucket in self._buckets:
            assert bucket.is_started, f"gradients of {bucket.plan.names} were never final"
            wait(bucket.work, "gradient synchronisation", bucket.ranks, self._timeout)

    def _hook(self, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            if bucket.stages <= self._armed and len(bucket.stages) == 1:
                bucket.num_final += 1
                if bucket.num_final == len(bucket.parameters):
                    bucket.is_ready = True
                    self._start_ready()

        return on_gradient

    def _start_ready(self) -> None:
        for queue in self._queues.values():
            for bucket in queue:
                if bucket.is_started:
                    continue
                if not bucket.is_ready:
                    break
                self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.is_started = True
        filled = [(view, p.grad) for view, p in zip(bucket.views, bucket.parameters, strict=True) if p.grad is not None]
        if len(filled) < len(bucket.views):
            bucket.flat.zero_()
        with torch.no_grad():
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            parameter.grad = view
        bucket.work = self._groups.all_reduce(bucket.flat, bucket.ranks)


def _make_bucket(
    plan: BucketPlan, stages: Collection[tuple[int, int]], ranks: tuple[int, ...], parameters: Mapping[str, torch.nn.Parameter]
) -> _Bucket:
    owned = [parameters[name] for name in plan.names]
    flat = torch.zeros(sum(p.numel() for p in owned), dtype=owned[0].dtype, device=owned[0].device)
    views, offset = [], 0
    for parameter in owned:
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    mine = frozenset(stage for replica, stage in plan.stages if (replica, stage) in stages)
    return _Bucket(plan, ranks, owned, mine, flat, views)
