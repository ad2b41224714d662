"""Conversion between the form that ops read and the form that the optimizer steps.

    in_forms   one tensor if both are equal; a view if they differ only in owners, or in the type of gradients; else a copy. A
               gathered weight has no device memory, except the part of its keeper
    publish    optimizer form --> compute form    cast, copied to the device, sent to the other owners bucket by bucket

What owners hold in full is stored in the buckets themselves, and buckets in flight are waited for late: by the first op of the next step
that reads them, or by any other reader of weights.

    step    F   B  ... STEP | F: ops of bucket 0 | ops of bucket 1 |  B  ... STEP
                            |bucket 0 |bucket 1  |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, ne
from types import MappingProxyType

import torch
from torch import Tensor, nn

from whale.comm import Groups, Launched
from whale.errors import RuntimeFault, first_few
from whale.ir.plan import Form
from whale.runtime.program.shard.pieces import Index, on_device, part, write_part
from whale.runtime.state.holdings import Holdings, RankLinks
from whale.runtime.state.host_copies import pinned
from whale.runtime.state.updates import in_types
from whale.sharding.buckets import NUM_AT_ONCE, Bucket

_VERSION = attrgetter("_version")


def in_forms(
    holdings: Holdings,
    rank: int | None,  # of the plan; None if idle
    # that the rank holds, in the type that ops read or the model's; their gradients get the type of their gradient form
    tensors: Mapping[str, Tensor],
    device: torch.device,  # that the rank computes on
    made: Mapping[str, Tensor] = MappingProxyType({}),  # existing copies of what the optimizer steps
) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """What ops of a rank read, and what its optimizer steps, by name."""
    read, found = dict(tensors), dict[str, nn.Parameter]()
    for name, held in tensors.items():
        if rank is None or not isinstance(held, nn.Parameter):
            continue
        if holdings.kept(name, rank) is not None:
            known = made.get(name)
            if known is not None:
                found[name] = nn.Parameter(pinned(known, device), requires_grad=held.requires_grad)
            else:
                found[name] = _kept(holdings, rank, name, held, device)
        state = holdings.plan.state_of(name)
        dtype = holdings.read_type(name, rank)
        own = held if held.dtype is dtype else nn.Parameter(held.detach().to(dtype), requires_grad=held.requires_grad)
        is_here = state.compute.home == "device" and name in found and holdings.kept_index(name, rank) is None
        if state.is_gathered and not is_here:
            empty = torch.empty_like(held, dtype=dtype, device=device, memory_format=torch.contiguous_format)
            own = nn.Parameter(empty, requires_grad=held.requires_grad)
            own.untyped_storage().resize_(0)
        elif state.casts_gradient and own is found.get(name):
            own = nn.Parameter(held.detach(), requires_grad=held.requires_grad)
        if state.gradient is not None:
            own.grad_dtype = getattr(torch, state.gradient.dtype)
        read[name] = own
    return read, found


def _kept(holdings: Holdings, rank: int, name: str, held: nn.Parameter, device: torch.device) -> nn.Parameter:
    """What the optimizer steps, made from what the rank holds."""
    state, index = holdings.plan.state_of(name), holdings.kept_index(name, rank)
    stays = state.compute.home == "device"
    if index is None and not state.is_copied and stays:
        return held
    own = held.detach() if index is None else part(held.detach(), index)
    if state.is_copied or state.is_gathered:
        copies = index is not None or (stays and held.dtype is holdings.read_type(name, rank))  # else ops read another tensor
        own = pinned(own.to(home(state.kept, device), getattr(torch, state.kept.dtype), copy=copies).contiguous(), device)
    return nn.Parameter(own, requires_grad=held.requires_grad)


def home(form: Form, device: torch.device) -> torch.device:
    """The device of a form, on a rank that computes on `device`."""
    return torch.device("cpu") if form.home == "host" else device


@dataclass(frozen=True)
class Place:
    """A slot of a bucket: this rank's part of a parameter, and the index of the slot's elements in it."""

    held: Tensor
    index: tuple[Index, ...] | None
    start: int
    stop: int

    @property
    def value(self) -> Tensor:
        return self.held if self.index is None else part(self.held, self.index)

    def read(self, flat: Tensor) -> None:
        """Copies into the slot."""
        own = self.value
        flat[self.start : self.stop].view(own.shape).copy_(own, non_blocking=True)

    def write(self, flat: Tensor) -> None:
        """Copies out of the slot."""
        self.take(flat[self.start : self.stop].view(self.value.shape))

    def take(self, value: Tensor) -> None:
        """Copies from a value."""
        if self.index is None:
            self.held.copy_(value, non_blocking=True)
        else:
            write_part(self.held, self.index, value.to(self.held.device, non_blocking=True))


@dataclass(frozen=True)
class RankBucket:
    """A bucket on this rank, with the places that it sends and receives."""

    plan: Bucket
    ranks: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    given: tuple[Place, ...]
    taken: tuple[Place, ...]
    dtype: torch.dtype  # of what travels
    device: torch.device  # that ops read it on; what is sent may be on the host

    def room(self) -> Tensor:
        """The flat buffer."""
        return torch.empty(self.plan.num_elements, dtype=self.dtype, device=self.device)

    def start(self, groups: Groups) -> tuple[Tensor, list[Launched | None]]:
        """Fills a flat buffer and starts its broadcasts; returns both."""
        flat = self.room()
        with torch.no_grad():
            for place in self.given:
                place.read(flat)
        return flat, self.give(flat, groups)

    def give(self, flat: Tensor, groups: Groups) -> list[Launched | None]:
        """Starts a broadcast of each keeper's slots."""
        return [groups.broadcast(flat[start:stop], self.ranks, keeper) for keeper, start, stop in self.runs]


def _read_in_place(
    bucket: Bucket, holdings: Holdings, rank: int, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]
) -> Tensor | None:
    """Moves what ops and the optimizer read into a flat buffer; None if the memory layout differs."""
    held = [tensors[slot.name] for slot in bucket.slots]
    if not bucket.is_read_in_place or not all(own.is_contiguous() for own in held):
        return None
    flat = torch.zeros(bucket.num_elements, dtype=held[0].dtype, device=held[0].device)
    for slot, own in zip(bucket.slots, held, strict=True):
        place, stepped = flat[slot.start : slot.stop].view(own.shape), kept.get(slot.name)
        place.copy_(own.data)
        own.data = place
        if stepped is not None and stepped is not own and not holdings.plan.state_of(slot.name).is_copied:
            index = holdings.kept_index(slot.name, rank)
            stepped.data = place if index is None else part(place, index)
    return flat


class Publishing:
    """What a rank sends to the other owners of its parameters, and receives from them.

    Attributes:
        numbers: per parameter that others keep and whose readers wait, its buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],  # of the whole plan, in the order in which they start
        links: RankLinks,
        tensors: Mapping[str, Tensor],  # what ops read
        kept: Mapping[str, Tensor],  # what the optimizer steps
        parts: Mapping[str, Tensor],  # of gathered weights, what this rank keeps, in the type that ops read
        *,
        defers: bool = False,  # whether readers wait for what is in flight when `publish` returns
    ) -> None:
        self._groups, self._waits, self._copies, self._watch, self._defers = links.groups, links.waits, links.copies, links.watch, defers
        holdings, rank = links.holdings, links.rank
        own_buckets = [bucket for bucket in buckets if rank in bucket.owners]
        self._flats = [_read_in_place(bucket, holdings, rank, tensors, kept) for bucket in own_buckets]
        self._under_way: dict[int, list[Launched | None]] = {}  # of buckets in which ops read
        cast: list[tuple[Tensor, Tensor]] = []
        self._brought: list[tuple[Tensor, Tensor]] = []  # from the host
        for name, own in kept.items():
            if holdings.plan.state_of(name).is_copied:
                read = _read_from(own, parts.get(name), tensors[name].detach(), holdings.kept_index(name, rank))
                if read is not None:
                    (cast if read.device == own.device else self._brought).append((read, own.detach()))
        self._cast = in_types(cast)
        self._rank_buckets = [_published(bucket, links, tensors, kept) for bucket in own_buckets]
        self.numbers: dict[str, tuple[int, ...]] = {}
        for number, rank_bucket in enumerate(self._rank_buckets):
            if defers and self._flats[number] is not None and rank_bucket.taken:
                self.numbers |= dict.fromkeys(rank_bucket.plan.names, (number,))
        state_of = holdings.plan.state_of
        shared = {name for each in self._rank_buckets for name in each.plan.names}
        shared |= {name for name in parts if state_of(name).is_shared_out}
        copied = {name for name in kept if state_of(name).is_copied}
        reads = {name: tensors[name] if name in shared else parts.get(name, tensors[name]) for name in copied | shared}
        watched = [(name, own) for name in sorted(reads) for own in (reads[name], kept.get(name)) if own is not None]
        self._names, self._watched = [name for name, _ in watched], [own for _, own in watched]
        self._whole = [(reads[name], kept[name]) for name in sorted(copied - shared)]
        self._versions = self._read_versions()

    def check(self) -> None:
        """Accepts what the script has written to weights that the optimizer steps.
        Raises RuntimeFault if other owners read copies of these weights.
        """
        if self._read_versions() == self._versions:
            return
        known = dict(zip(map(id, self._watched), self._versions, strict=True))
        for held, own in self._whole:
            if own._version != known[id(own)] and held._version == known[id(held)]:
                held.detach().copy_(own.detach())
                known |= {id(each): each._version for each in (held, own)}
        self._versions = [known[id(own)] for own in self._watched]
        if written := dict.fromkeys(compress(self._names, map(ne, self._versions, self._read_versions()))):
            raise RuntimeFault(
                f"weights were written since the last step ({first_few(list(written))}), but ranks read copies of them: write weights by "
                "engine.load_state_dict"
            )

    def _read_versions(self) -> list[int]:
        return [*map(_VERSION, self._watched)]

    def publish(self) -> None:
        """Updates what ops read from what the optimizer has stepped, on all owners; deferred buckets are then in flight."""
        self.arrive()
        for targets, sources in self._cast:
            torch._foreach_copy_(targets, sources)
        if self._brought:
            with self._copies.stream():
                for held, own in self._brought:
                    held.copy_(own, non_blocking=True)
            self._copies.arrive(self._copies.mark())
        under_way: list[tuple[RankBucket, Tensor, list[Launched | None]]] = []
        for number, (rank_bucket, flat) in enumerate(zip(self._rank_buckets, self._flats, strict=True)):
            if flat is not None:
                works = self._under_way[number] = rank_bucket.give(flat, self._groups)
                if self._defers and works[-1] is not None:
                    stages = {stage for _, stage in rank_bucket.plan.stages}
                    self._watch.publishing(number, stages, rank_bucket.ranks, flat, works[-1])
                continue
            if len(under_way) == NUM_AT_ONCE:
                self._take(*under_way.pop(0))
            under_way.append((rank_bucket, *rank_bucket.start(self._groups)))
        for each in under_way:
            self._take(*each)
        self._versions = self._read_versions()
        if not self._defers:
            self.arrive()

    def need(self, numbers: Iterable[int]) -> None:
        """Waits for buckets that an op is about to read."""
        for number in numbers:
            if number in self._under_way:
                with self._watch.waiting("weights"):
                    for work in self._under_way.pop(number):
                        self._waits.wait(work, "publishing weights", self._rank_buckets[number].ranks)
                self._watch.published(number)

    def arrive(self) -> None:
        """Waits for all buckets, before weights are read or written elsewhere."""
        self.need([*self._under_way])
        self._copies.finish()

    def _take(self, rank_bucket: RankBucket, flat: Tensor, works: Sequence[Launched | None]) -> None:
        with self._watch.waiting("weights"):
            for work in works:
                self._waits.wait(work, "publishing weights", rank_bucket.ranks)
        for place in rank_bucket.taken:
            place.write(flat)


def _read_from(own: Tensor, sent: Tensor | None, held: Tensor, index: tuple[Index, ...] | None) -> Tensor | None:
    """What follows a weight that the optimizer steps; None where nothing does, since the weight itself is sent to who reads it.

    Args:
        own: the weight.
        sent: of a gathered one, what this rank keeps for its readers.
        held: what ops read, or will once it is gathered.
        index: of the weight in it; None for all.
    """
    if sent is None:
        return held if index is None else part(held, index)
    if sent.untyped_storage()._cdata != own.untyped_storage()._cdata:
        return sent
    return held if index is None and held.untyped_storage().nbytes() else None


def _published(bucket: Bucket, links: RankLinks, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> RankBucket:
    """A bucket on a rank. Where owners read unlike types, each gets the weights as they are stepped, and rounds them itself."""
    found = bucket_of_rank(bucket, links, tensors)
    return replace(found, given=given_by(bucket, links, kept)) if bucket.is_unlike else found


def given_by(bucket: Bucket, links: RankLinks, parts: Mapping[str, Tensor]) -> tuple[Place, ...]:
    """The places of a bucket that a rank sends from its parts of parameters: of those that nobody keeps for others, all."""
    holdings, rank, found = links.holdings, links.rank, list[Place]()
    for slot in bucket.slots:
        start = slot.start
        for keeper, num_elements in slot.keepers or ((rank, slot.stop - slot.start),):
            if keeper == rank:
                own, region = parts[slot.name].data, holdings.kept(slot.name, rank)
                assert region is not None, "a keeper keeps some of it"
                index = holdings.index(slot.name, slot.piece.region.intersect(region), region)
                found.append(Place(own, None if index is None else on_device(index, own.device), start, start + num_elements))
            start += num_elements
    return tuple(found)


def bucket_of_rank(bucket: Bucket, links: RankLinks, tensors: Mapping[str, Tensor]) -> RankBucket:
    """A bucket on a rank; `tensors` are what ops read."""
    given, taken, holdings, rank = list[Place](), list[Place](), links.holdings, links.rank
    for slot in bucket.slots:
        held = tensors[slot.name].data
        index = holdings.index(slot.name, slot.piece.region, holdings.held(slot.name, rank))
        place = Place(held, None if index is None else on_device(index, held.device), slot.start, slot.stop)
        keepers = {keeper for keeper, _ in slot.keepers}
        given += [place] if rank in keepers else []
        taken += [place] if keepers != {rank} or bucket.form.home == "host" else []
    dtype = getattr(torch, holdings.plan.type_on(rank, bucket.form.dtype))
    device = tensors[bucket.slots[0].name].device
    return RankBucket(bucket, *links.in_world(bucket), tuple(given), tuple(taken), dtype, device)
