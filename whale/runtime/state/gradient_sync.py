"""Gradient synchronisation: buckets of equal owners (`whale.sharding.buckets`), each reduced while the backward pass still runs.

A gradient is the sum over the ranks that own its parameter. A bucket is sent once all of its gradients are final: to all owners, or each
run of it to the owner that keeps it. `p.grad` is a view into the bucket from the start of the step. Only a part of a parameter, a gradient
that another rank contributes, or one that stays on its keeper alone, is separate and copied when its bucket starts. At the end
what the optimizer steps gets its gradient, in its own type and memory. Sparse gradients are summed one by one, after all others.

Where groups of owners each keep a copy, a bucket is summed inside each group, and then each run between its keepers in all groups. That
second sum starts when the next bucket does, or the stage ends: the first is mostly there by then, and all ranks have one order.

A bucket that stays on keepers alone has memory only from its start until its sum is taken. So has one that is summed in another type, to
which gradients are rounded. At most `NUM_AT_ONCE` such buckets are in flight:

    sent = round(gradients + lost)     lost = gradients + lost - sent     gradients = sum over owners of sent

All buckets of a rank start in one order, equal on every rank, whatever the order of the gradients. Buckets of one stage start during its
last backward, up to its SYNC, at the same point of the same schedule on all replicas. Buckets shared by several stages, or by replicas
with different schedules, are final at different points: they start after all else, so that no rank waits in one while others need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.utils.hooks import RemovableHandle

from whale.comm import Launched
from whale.runtime.program.shard.pieces import Index, on_device, part, write_part
from whale.runtime.state.holdings import RankLinks
from whale.runtime.state.host_copies import HostCopies
from whale.runtime.state.sparse_sums import RowSum
from whale.sharding.buckets import NUM_AT_ONCE, Bucket


@dataclass(frozen=True)
class _Slot:
    """A slot on this rank."""

    parameter: torch.nn.Parameter  # this rank's part of the parameter
    index: tuple[Index, ...] | None  # of its elements in that; None for all
    shape: torch.Size  # of its elements
    start: int  # in the flat buffer
    stop: int
    adds: bool  # whether this rank's gradient is a term of the sum; else it is a copy of another's
    accumulates: bool  # whether the parameter's gradient is accumulated in place

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Its place in the buffer."""
        return flat[self.start : self.stop].view(self.shape)

    def fill(self, flat: torch.Tensor) -> None:
        """For a gradient that is not accumulated in place: copies this rank's term, and points `grad` to the sum."""
        gradient = self.parameter.grad
        if gradient is not None and self.adds:
            self.view(flat).copy_(gradient if self.index is None else part(gradient, self.index))
        if self.index is None:
            self.parameter.grad = self.view(flat)
        elif gradient is None:
            self.parameter.grad = torch.zeros(self.parameter.shape, dtype=flat.dtype, device=flat.device)


@dataclass(frozen=True)
class _Collected:
    """A parameter whose gradient is moved to another tensor, or dropped, before the optimizer's step."""

    parameter: torch.nn.Parameter  # that ops read
    kept: torch.nn.Parameter | None  # that the optimizer steps; None where only others do
    index: tuple[Index, ...] | None  # of its elements in the parameter; None for all
    copies: bool  # whether its gradient needs a copy, since the bucket is freed
    leaves_device: bool  # whether it is copied from a device to the host

    def collect(self, to_host: HostCopies) -> None:
        """Gives the gradient to what the optimizer steps."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if self.kept is None or gradient is None:
            return
        own = gradient if self.index is None else part(gradient, self.index)
        self.kept.grad = to_host.on_host(own, self.kept.dtype) if self.leaves_device else own.to(self.kept, copy=self.copies)


@dataclass
class _Bucket:
    """One bucket on this rank, through one step."""

    plan: Bucket
    ranks: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    between: tuple[tuple[tuple[int, ...], int, int], ...]  # what this rank then sums with keepers of other copies
    slots: list[_Slot]
    stages: frozenset[int]
    device: torch.device
    number: int
    stays: bool = False  # whether it has memory from step to step
    flat: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    lost: torch.Tensor | None = None
    num_final: int = 0
    is_armed: bool = False
    is_ready: bool = False
    is_started: bool = False
    is_taken: bool = False
    is_collected: bool = False
    leaves_device: bool = False
    works: list[Launched | None] = field(default_factory=list)
    waits_for: tuple[int, ...] = ()  # the ranks of the sum that was started last
    rows: RowSum | None = None

    def room(self) -> torch.Tensor:
        """A flat buffer of zeros."""
        return torch.zeros(self.plan.num_elements, dtype=getattr(torch, self.plan.form.dtype), device=self.device)

    @property
    def is_freed(self) -> bool:
        """Whether only keepers keep its contents."""
        return self.plan.form.sharding == "owners"

    def round(self) -> torch.Tensor:
        """What is sent: the flat buffer, or that plus earlier rounding errors, rounded; keeps the new errors."""
        assert self.flat is not None
        if self.plan.sum_dtype is None:
            return self.flat
        dtype = getattr(torch, self.plan.sum_dtype)
        if self.plan.feeds_back:
            self.lost = self.room() if self.lost is None else self.lost
            self.lost.add_(self.flat)
            self.sent = self.lost.to(dtype)
            self.lost.sub_(self.sent)
        else:
            self.sent = self.flat.to(dtype)
        return self.sent

    @cached_property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Each once."""
        return tuple({slot.parameter: None for slot in self.slots})

    @cached_property
    def views(self) -> tuple[tuple[torch.nn.Parameter, torch.Tensor], ...]:
        """Of a bucket that stays: the parameters whose gradients are accumulated in it, and their places."""
        assert self.flat is not None, "gradients are accumulated where they stay"
        return tuple((slot.parameter, slot.view(self.flat)) for slot in self.slots if slot.accumulates)

    @cached_property
    def copied(self) -> tuple[_Slot, ...]:
        """Slots that are filled when the bucket starts."""
        return tuple(slot for slot in self.slots if not slot.accumulates)


class GradientSync:
    """The buckets of this rank."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        links: RankLinks,
        stages: Collection[tuple[int, int]],  # (replica, stage) pairs that it runs
        parameters: Mapping[str, torch.nn.Parameter],  # what this rank owns
        kept: Mapping[str, torch.nn.Parameter],  # what the optimizer steps of these
    ) -> None:
        self._groups, self._waits, self._copies, self._watch = links.groups, links.waits, links.copies, links.watch
        holdings, rank = links.holdings, links.rank
        self._armed: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        freed = {name for plan in buckets if rank in plan.owners and plan.form.sharding == "owners" for name in plan.names}
        bucketed = {name for plan in buckets if rank in plan.owners for name in plan.names}
        self._collected: dict[torch.Tensor, _Collected] = {}  # after their last bucket
        self._collected_last: list[_Collected] = []
        for name, parameter in parameters.items():
            own, stays = kept.get(name), holdings.gradient_stays(name)
            if own is not parameter or not stays:
                index = None if own is None else holdings.kept_index(name, rank)
                leaves = own is not None and own.device != parameter.device
                collected = _Collected(parameter, own, index, not stays and (name in freed or index is not None), leaves)
                if name in freed or (name in bucketed and collected.leaves_device):
                    self._collected[parameter] = collected
                    continue
                self._collected_last.append(collected)
                if collected.leaves_device and parameter.requires_grad:
                    places = frozenset(stage for replica, stage in holdings.shardings.places(name) if (replica, stage) in stages)
                    hook = self._leaver(collected, places)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._buckets: list[_Bucket] = []
        self._buckets_of: dict[torch.Tensor, list[_Bucket]] = {}  # tensors are keys by identity
        self._under_way: list[_Bucket] = []  # of those that have memory only in flight
        self._to_cross: list[_Bucket] = []  # whose second sums are still to start
        self._num_coming: Counter[torch.Tensor] = Counter()
        self._scale = 1.0
        self._sparse_alone = [own for name, own in parameters.items() if name not in bucketed and holdings.gradient_is_sparse(name)]
        for plan in buckets:
            if rank not in plan.owners:
                continue
            bucket = _make_bucket(plan, links, stages, parameters, len(self._buckets))
            going = [self._collected[parameter] for parameter in bucket.parameters if parameter in self._collected]
            bucket.is_collected = bool(going)
            bucket.leaves_device = all(each.leaves_device for each in going) and len(going) == len(bucket.parameters)
            self._buckets.append(bucket)
            for parameter in bucket.parameters if plan.is_at_one_place else ():
                self._buckets_of.setdefault(parameter, []).append(bucket)
        for owned, its in self._buckets_of.items():
            self._hooks.append(owned.register_post_accumulate_grad_hook(self._watcher(its)))  # type: ignore[no-untyped-call]

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do in a step."""
        return bool(self._buckets or self._collected_last or self._sparse_alone)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with which this one exchanges gradients, itself included."""
        sets = (ranks for bucket in self._buckets for ranks in (bucket.ranks, *(ranks for ranks, _, _ in bucket.between)))
        return tuple(sorted({rank for ranks in sets for rank in ranks}))

    def begin(self, scale: float = 1.0) -> None:
        """Starts a step: zeroes the buckets, and makes them the gradients of their parameters, which will be multiplied by `scale`."""
        self._armed.clear()
        self._under_way.clear()
        self._to_cross.clear()
        self._num_coming = Counter(parameter for bucket in self._buckets if bucket.is_collected for parameter in bucket.parameters)
        for bucket in self._buckets if scale != self._scale else ():
            if bucket.lost is not None:
                bucket.lost.mul_(scale / self._scale)
        self._scale = scale
        for bucket in self._buckets:
            bucket.num_final = 0
            bucket.is_armed = bucket.is_ready = bucket.is_started = bucket.is_taken = False
            if bucket.flat is not None:
                bucket.flat.zero_()
            if bucket.stays:
                for parameter, place in bucket.views:
                    parameter.grad = place

    def rest(self) -> None:
        """Lets the gradients of a step pass that sums others: of a capture that trains other parameters."""
        self._armed.clear()
        for bucket in self._buckets:
            bucket.is_armed = False

    def arm(self, stage: int) -> None:
        """The next backward is this stage's last of the step: what it accumulates is final."""
        self._armed.add(stage)
        for bucket in self._buckets:
            bucket.is_armed = bucket.stages <= self._armed

    def settle(self, stage: int, waiting: Collection[torch.Tensor]) -> None:
        """The gradients of a stage are final, except those in `waiting`, whose weight part runs next."""
        pending = set(waiting)
        for parameter, buckets in self._buckets_of.items():
            if parameter not in pending and stage in buckets[0].stages:
                self.is_final(parameter)

    def is_final(self, parameter: torch.Tensor) -> None:
        """One parameter's gradient is final; starts what can start."""
        self._count(self._buckets_of.get(parameter, ()))

    def finish_stage(self, stage: int) -> None:
        """Every gradient of a stage is final; starts what can start."""
        for bucket in self._buckets:
            if bucket.plan.is_at_one_place and stage in bucket.stages:
                bucket.is_ready = True
        self._start_ready()
        if self._to_cross:
            self._cross()

    def finish(self) -> None:
        """Every gradient of the rank is final; starts the rest."""
        for bucket in self._buckets:
            if not bucket.is_started:
                self._start(bucket)
        if self._to_cross:
            self._cross()

    def wait(self) -> None:
        """Waits until the gradients are sums over their owners, or their keepers have these."""
        for parameter in self._sparse_alone:
            parameter.grad = None if parameter.grad is None else parameter.grad.coalesce()
        for bucket in self._buckets:
            assert bucket.is_started, f"gradients of {bucket.plan.names} were never final"
            if not bucket.is_taken:
                self._take(bucket)
        for each in self._collected_last:
            each.collect(self._copies)
        self._copies.finish()

    def _take(self, bucket: _Bucket) -> None:
        """Waits for a sum and converts it; frees a bucket that only keepers keep."""
        with self._copies.stream() if bucket.leaves_device else nullcontext():  # so that the device's main stream does not wait for it
            self._receive(bucket)

    def _receive(self, bucket: _Bucket) -> None:
        if bucket.rows is not None:
            bucket.is_taken = True
            self._wait(bucket)
            bucket.rows.finish(self._groups, lambda work: self._waits.wait(work, "gradient synchronisation", bucket.ranks))
            self._watch.summed(bucket.number)
            return
        assert bucket.flat is not None, "a bucket that has started has memory"
        bucket.is_taken = True
        self._wait(bucket)
        self._watch.summed(bucket.number)
        if bucket.sent is not None:
            bucket.flat.copy_(bucket.sent)
            if bucket.leaves_device:
                self._copies.keep_for_copies(bucket.sent)
            bucket.sent = None
        for slot in bucket.copied:
            if slot.index is not None:
                assert slot.parameter.grad is not None
                write_part(slot.parameter.grad, slot.index, slot.view(bucket.flat))
        for parameter in bucket.parameters if bucket.is_collected else ():
            self._num_coming[parameter] -= 1
            if not self._num_coming[parameter] and parameter in self._collected:
                self._collected[parameter].collect(self._copies)
        if bucket.is_freed:
            if bucket.leaves_device:
                self._copies.keep_for_copies(bucket.flat)
            bucket.flat = None

    def abandon(self) -> None:
        """Waits for what was started in an abandoned step: its buffers are about to be reused."""
        for bucket in self._buckets:
            if bucket.is_started:
                self._wait(bucket)
                bucket.sent = bucket.lost = None

    def forget_lost(self) -> None:
        """Drops rounding errors: their step does not count, or the weights were replaced."""
        for bucket in self._buckets:
            bucket.lost = None

    def _wait(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            self._waits.wait(work, "gradient synchronisation", bucket.waits_for)
        bucket.works.clear()  # they hold the buffer

    def close(self) -> None:
        """Releases the parameters, which another may take over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watcher(self, buckets: Sequence[_Bucket]) -> Callable[[torch.Tensor], None]:
        """A hook on every gradient of a parameter with slots in some buckets; kept cheap."""
        first = buckets[0]  # all are of the same stage
        num, is_alone = len(first.parameters), len(buckets) == 1

        def on_gradient(_: torch.Tensor) -> None:
            if first.is_armed and is_alone:  # nearly always
                first.num_final += 1
                if first.num_final == num:
                    self._settled(first)
            elif first.is_armed:
                self._count(buckets)

        return on_gradient

    def _leaver(self, collected: _Collected, places: frozenset[int]) -> Callable[[torch.Tensor], None]:
        """A hook on the gradients of a parameter that no other rank has, and that is stepped on the host."""

        def on_gradient(_: torch.Tensor) -> None:
            if places <= self._armed:
                collected.collect(self._copies)

        return on_gradient

    def _count(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            bucket.num_final += 1
            if bucket.num_final == len(bucket.parameters):
                self._settled(bucket)

    def _settled(self, bucket: _Bucket) -> None:
        bucket.is_ready = True
        self._start_ready()

    def _start_ready(self) -> None:
        for bucket in self._buckets:
            if bucket.is_started or not bucket.plan.is_at_one_place:
                continue
            if not bucket.is_ready:
                break
            self._start(bucket)

    def _cross(self) -> None:
        """Starts the second sums of buckets whose first have started."""
        for bucket in self._to_cross:
            self._wait(bucket)
            self._watch.summed(bucket.number)
            sent = bucket.flat if bucket.sent is None else bucket.sent
            assert sent is not None, "a bucket in flight has memory"
            bucket.works += [self._groups.all_reduce(sent[start:stop], ranks) for ranks, start, stop in bucket.between]
            bucket.waits_for = tuple(sorted({rank for ranks, _, _ in bucket.between for rank in ranks}))
            last = bucket.works[-1]
            if last is not None:
                self._watch.summing(bucket.number, bucket.stages, bucket.between[-1][0], sent, last)
        self._to_cross.clear()

    def _start(self, bucket: _Bucket) -> None:
        if self._to_cross:
            self._cross()
        bucket.is_started, bucket.waits_for = True, bucket.ranks
        if bucket.between:
            self._to_cross.append(bucket)
        if bucket.rows is not None:
            counts = bucket.rows.start(self._groups)
            bucket.works.append(counts)
            if counts is not None:
                self._watch.summing(bucket.number, bucket.stages, bucket.ranks, bucket.rows.counts, counts)
            return
        if bucket.is_freed or bucket.is_collected or bucket.plan.sum_dtype is not None:
            if len(self._under_way) == NUM_AT_ONCE:
                self._take(self._under_way.pop(0))
            self._under_way.append(bucket)
        if bucket.flat is None:
            bucket.flat = bucket.room()
        flat = bucket.flat
        for slot in bucket.copied:
            slot.fill(flat)
        sent = bucket.round()
        if bucket.runs:
            bucket.works += [self._groups.reduce(sent[start:stop], bucket.ranks, keeper) for keeper, start, stop in bucket.runs]
        else:
            bucket.works.append(self._groups.all_reduce(sent, bucket.ranks))
        if bucket.works[-1] is not None:
            self._watch.summing(bucket.number, bucket.stages, bucket.ranks, sent, bucket.works[-1])


def _make_bucket(
    plan: Bucket, links: RankLinks, stages: Collection[tuple[int, int]], parameters: Mapping[str, torch.nn.Parameter], number: int
) -> _Bucket:
    holdings, rank = links.holdings, links.rank
    stays, slots = plan.form.sharding == "stage", list[_Slot]()
    in_place = stays and not plan.form.is_sparse
    for slot in plan.slots:
        parameter = parameters[slot.name]
        index = holdings.index(slot.name, slot.piece.region, holdings.held(slot.name, rank))
        shape = parameter.shape if index is None else part(torch.empty(parameter.shape, device="meta"), index).shape
        if index is not None:
            index = on_device(index, parameter.device)
        adds = rank in slot.piece.contributors
        slots.append(_Slot(parameter, index, shape, slot.start, slot.stop, adds, accumulates=in_place and adds and index is None))
    mine = frozenset(stage for replica, stage in plan.stages if (replica, stage) in stages)
    (ranks, runs), device = links.in_world(plan), slots[0].parameter.device
    made = _Bucket(plan, ranks, runs, links.between(plan), slots, mine, device, number)
    if plan.form.is_sparse:
        made.rows = RowSum(slots[0].parameter, slots[0].adds, ranks)
        return made
    made.stays, made.flat = stays, made.room() if stays else None
    return made
