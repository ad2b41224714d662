"""Gradient synchronisation: buckets of what equal ranks own, each reduced while the backward pass still runs.

Every parameter lies on the ranks that own it; its gradient is the sum over them. What shares a flat bucket says
`whale.sharding.buckets`; a bucket is sent once each of its gradients is final.

Gradients are accumulated in the buckets themselves: `p.grad` is a view of its place from the start of the step. Only a part
of a parameter, or a gradient that another rank answers for, is kept apart and copied when its bucket starts.

All buckets of a rank start in one order, the same on every rank, whatever order the gradients come in. Buckets of one
stage start during its last backward, up to its SYNC, on all replicas at the same place of the same schedule. Those of
weights that several stages share, or that unlike replicas hold, are final at unlike places: they start when all else is
done, so that no rank that waits in one is missed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.hooks import RemovableHandle

from whale.comm import Groups, Launched, Waits
from whale.runtime.program.shard.pieces import Index, on_device, part, write_part
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.state.holdings import Holdings
from whale.sharding.buckets import Bucket


@dataclass(frozen=True)
class _Slot:
    """A piece's place in a flat buffer.

    Attributes:
        parameter: this rank's part of the parameter.
        index: where the piece lies in it; None for all of it.
        view: its place.
        adds: whether this rank's gradient is added; else it is a copy of another's.
    """

    parameter: torch.nn.Parameter
    index: tuple[Index, ...] | None
    view: torch.Tensor
    adds: bool

    @property
    def accumulates(self) -> bool:
        """Whether the parameter's gradient is accumulated in place."""
        return self.adds and self.index is None

    def fill(self) -> None:
        """Of a gradient that is not accumulated in place: copies what this rank adds, and shows where the sum will be."""
        gradient = self.parameter.grad
        if self.index is None:
            self.parameter.grad = self.view
        elif gradient is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        elif self.adds:
            self.view.copy_(part(gradient, self.index))


@dataclass
class _Bucket:
    """One bucket on this rank, through one step."""

    plan: Bucket
    ranks: tuple[int, ...]
    slots: list[_Slot]
    stages: frozenset[int]
    flat: torch.Tensor
    number: int
    num_final: int = 0
    is_armed: bool = False
    is_ready: bool = False
    is_started: bool = False
    work: Launched | None = None

    @cached_property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Those with a place in it, each once."""
        return tuple({slot.parameter: None for slot in self.slots})

    @cached_property
    def in_place(self) -> tuple[_Slot, ...]:
        """Slots in which a gradient is accumulated."""
        return tuple(slot for slot in self.slots if slot.accumulates)

    @cached_property
    def apart(self) -> tuple[_Slot, ...]:
        """Slots that are filled when the bucket starts."""
        return tuple(slot for slot in self.slots if not slot.accumulates)


class GradientSync:
    """The buckets of this rank.

    Args:
        buckets: of the whole plan.
        holdings: which part of a parameter this rank holds.
        rank: this rank of the plan.
        stages: (replica, stage) pairs that it runs.
        world_ranks: per rank of the plan, the rank in the world.
        parameters: what this rank owns.
        groups: one per owner set.
        waits: how communication is waited for.
        watch: told when each bucket begins and ends.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        holdings: Holdings,
        rank: int,
        stages: Collection[tuple[int, int]],
        world_ranks: Sequence[int],
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Groups,
        waits: Waits,
        watch: Watch = NOBODY,
    ) -> None:
        self._groups = groups
        self._waits, self._watch = waits, watch
        self._buckets: list[_Bucket] = []
        self._buckets_of: dict[torch.Tensor, list[_Bucket]] = {}  # tensors are keys by identity
        self._armed: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for plan in buckets:
            if rank not in plan.owners:
                continue
            ranks = tuple(sorted(world_ranks[owner] for owner in plan.owners))
            bucket = _make_bucket(plan, holdings, rank, stages, ranks, parameters, len(self._buckets))
            self._buckets.append(bucket)
            for parameter in bucket.parameters if plan.is_at_one_place else ():
                self._buckets_of.setdefault(parameter, []).append(bucket)
        for owned, its in self._buckets_of.items():
            self._hooks.append(owned.register_post_accumulate_grad_hook(self._watcher(its)))  # type: ignore[no-untyped-call]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody whom this rank exchanges gradients with, itself included."""
        return tuple(sorted({rank for bucket in self._buckets for rank in bucket.ranks}))

    def begin(self) -> None:
        """Forgets the last step, and makes zeros in the buckets the gradients of their parameters."""
        self._armed.clear()
        for bucket in self._buckets:
            bucket.num_final, bucket.work = 0, None
            bucket.is_armed = bucket.is_ready = bucket.is_started = False
            bucket.flat.zero_()
            for slot in bucket.in_place:
                slot.parameter.grad = slot.view

    def arm(self, stage: int) -> None:
        """States that the backward about to run is this stage's last of the step: what it accumulates is final."""
        self._armed.add(stage)
        for bucket in self._buckets:
            bucket.is_armed = bucket.stages <= self._armed

    def settle(self, stage: int, waiting: Collection[torch.Tensor]) -> None:
        """States that the gradients of a stage are final but for parameters that wait for the weight part that comes now."""
        apart = set(waiting)
        for parameter, buckets in self._buckets_of.items():
            if parameter not in apart and stage in buckets[0].stages:
                self.is_final(parameter)

    def is_final(self, parameter: torch.Tensor) -> None:
        """States that the gradient of one parameter is final, and starts what can start."""
        self._count(self._buckets_of.get(parameter, ()))

    def finish_stage(self, stage: int) -> None:
        """States that every gradient of a stage is final, and starts what can start."""
        for bucket in self._buckets:
            if bucket.plan.is_at_one_place and stage in bucket.stages:
                bucket.is_ready = True
        self._start_ready()

    def finish(self) -> None:
        """States that every gradient of the rank is final, and starts the rest."""
        for bucket in self._buckets:
            if not bucket.is_started:
                self._start(bucket)

    def wait(self) -> None:
        """Waits until the gradients are sums over their owners."""
        for bucket in self._buckets:
            assert bucket.is_started, f"gradients of {bucket.plan.pieces} were never final"
            self._waits.wait(bucket.work, "gradient synchronisation", bucket.ranks)
            self._watch.summed(bucket.number)
            for slot in bucket.apart:
                if slot.index is not None:
                    assert slot.parameter.grad is not None
                    write_part(slot.parameter.grad, slot.index, slot.view)

    def abandon(self) -> None:
        """Lets what was started end, after a step that was given up: its buffers are about to be used again."""
        for bucket in self._buckets:
            if bucket.is_started:
                self._waits.wait(bucket.work, "gradient synchronisation", bucket.ranks)

    def close(self) -> None:
        """Lets go of the parameters; another may take them over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watcher(self, buckets: Sequence[_Bucket]) -> Callable[[torch.Tensor], None]:
        """Called at every gradient of a parameter that has places in some buckets, so it does little."""
        first = buckets[0]  # all are of one stage, and that is the same

        def on_gradient(_: torch.Tensor) -> None:
            if first.is_armed:
                self._count(buckets)

        return on_gradient

    def _count(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            bucket.num_final += 1
            if bucket.num_final == len(bucket.parameters):
                bucket.is_ready = True
                self._start_ready()

    def _start_ready(self) -> None:
        for bucket in self._buckets:
            if bucket.is_started or not bucket.plan.is_at_one_place:
                continue
            if not bucket.is_ready:
                break
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.is_started = True
        for slot in bucket.apart:
            slot.fill()
        bucket.work = self._groups.all_reduce(bucket.flat, bucket.ranks)
        if bucket.work is not None:
            self._watch.summing(bucket.number, bucket.stages, bucket.ranks, bucket.flat, bucket.work)


def _make_bucket(
    plan: Bucket,
    holdings: Holdings,
    rank: int,
    stages: Collection[tuple[int, int]],
    ranks: tuple[int, ...],
    parameters: Mapping[str, torch.nn.Parameter],
    number: int,
) -> _Bucket:
    places = []
    for name, piece in plan.pieces:
        parameter = parameters[name]
        index = holdings.index(name, piece.region, holdings.held(name, rank))
        if index is not None:
            index = on_device(index, parameter.device)
        places.append((parameter, index, parameter.shape if index is None else part(parameter, index).shape, rank in piece.contributors))
    first = parameters[plan.pieces[0][0]]
    flat = torch.zeros(sum(shape.numel() for _, _, shape, _ in places), dtype=first.dtype, device=first.device)
    slots, offset = [], 0
    for parameter, index, shape, adds in places:
        slots.append(_Slot(parameter, index, flat[offset : offset + shape.numel()].view(shape), adds))
        offset += shape.numel()
    mine = frozenset(stage for replica, stage in plan.stages if (replica, stage) in stages)
    return _Bucket(plan, ranks, slots, mine, flat, number)
