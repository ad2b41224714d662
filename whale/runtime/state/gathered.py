"""Weights that are sharded over owners or kept on hosts: gathered bucket by bucket before ops read them, and freed after.

A visit is one pass through a stage: F or R forward, B backward. All owners run equal schedules, so they make the same visits in the same
order, and each visit gathers every bucket of the stage once, in one order: of first use forward, of last use backward. A needed bucket
starts with all before it, and the next; those never needed start at the end.

    F   gather 0, 1 | ops of 0 | free 0, gather 2 | ops of 1 | ...
    B   gather 2, 1 | ops of 2 | free 2, gather 0 | ...           a recomputed segment needs all of its buckets at once

Buckets whose owners make different visits, or whose weight gradients wait, are gathered before a run and freed after it.
A bucket that one owner alone has on its host is copied to where ops read it; a sharded one goes through a flat buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from whale.comm import Launched
from whale.runtime.state.holdings import RankLinks
from whale.runtime.state.host_copies import Mark, pinned
from whale.runtime.state.publishing import Place, RankBucket, bucket_of_rank, given_by, home
from whale.sharding.buckets import NUM_AT_ONCE, Bucket, Visits


class GatheredWeights:
    """The weights of a rank that exist only around the ops that read them.

    Attributes:
        parts: what this rank keeps, in the type that ops read, on the device or host where it stays.
        numbers: per parameter, its buckets.
        communicates: whether some come from other ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        links: RankLinks,
        tensors: Mapping[str, Tensor],  # what ops read
        kept: Mapping[str, Tensor],  # what the optimizer steps
    ) -> None:
        self.buckets = buckets
        self._groups, self._waits, self._copies, self._watch = links.groups, links.waits, links.copies, links.watch
        holdings, rank = links.holdings, links.rank
        self.parts: dict[str, Tensor] = {}
        unlike = {name for bucket in buckets if bucket.is_unlike for name in bucket.names}  # sent as they are stepped
        for name, own in kept.items():
            state = holdings.plan.state_of(name)
            is_whole = state.compute.home == "device" and holdings.kept_index(name, rank) is None
            if state.is_gathered and is_whole and name not in unlike:
                self.parts[name] = tensors[name].data
            elif state.is_gathered:
                dtype = own.dtype if name in unlike else holdings.read_type(name, rank)
                there = home(state.compute, tensors[name].device)
                with links.watch.on_host() if state.compute.home == "host" else nullcontext():
                    self.parts[name] = pinned(own.data.to(there, dtype), links.copies.device) if state.is_copied else own.data
        self.numbers: dict[str, tuple[int, ...]] = {}
        self._rank_buckets: dict[int, RankBucket] = {}
        for number, bucket in enumerate(buckets):
            if rank in bucket.owners:
                self._rank_buckets[number] = self._rank_bucket(bucket, links, tensors)
                self.numbers |= {name: (*self.numbers.get(name, ()), number) for name in bucket.names}
        self.communicates = any(rank_bucket.plan.is_shared_out for rank_bucket in self._rank_buckets.values())
        self._users: Counter[int] = Counter()  # per storage of a weight, the number of its buckets that are here
        self._order: tuple[int, ...] = ()
        self._num_started = 0
        self._is_backward = False
        self._under_way: dict[int, tuple[Tensor | None, list[Launched | None], Mark]] = {}
        self._here: set[int] = set()
        self._throughout: frozenset[int] = frozenset()

    def _rank_bucket(self, bucket: Bucket, links: RankLinks, tensors: Mapping[str, Tensor]) -> RankBucket:
        found = bucket_of_rank(bucket, links, tensors)
        taken = tuple(place for place in found.taken if place.held.untyped_storage().nbytes() == 0 or place.held.numel() == 0)
        return replace(found, given=given_by(bucket, links, self.parts), taken=taken)

    @contextmanager
    def run(self, visits: Visits) -> Iterator[None]:
        """Around a run: gathers buckets that no visit gathers. After an error nothing is there: the next run may have other weights."""
        try:
            for number in visits.throughout:
                self._start(number)
                if len(self._under_way) == NUM_AT_ONCE:
                    self._arrive(next(iter(self._under_way)))
            for number in [*self._under_way]:
                self._arrive(number)
            self._throughout = frozenset(visits.throughout)
            yield
            self._drop(visits.throughout)
        except BaseException:
            self._copies.finish()  # they write to what is freed
            for place in (place for rank_bucket in self._rank_buckets.values() for place in rank_bucket.taken):
                place.held.untyped_storage().resize_(0)
            for left in (self._under_way, self._here, self._users):
                left.clear()
            raise
        finally:
            self._order, self._throughout = (), frozenset()
            self._copies.finish()  # what they read may be written after

    @contextmanager
    def visit(self, order: Sequence[int], *, backward: bool) -> Iterator[None]:
        """Around one pass through a stage that gathers these buckets in this order."""
        self._order, self._num_started, self._is_backward = tuple(order), 0, backward
        yield
        for number in self._order[self._num_started :]:
            if self._rank_buckets[number].plan.is_shared_out:  # others wait for this rank's part
                self._start(number)
        for number in [*self._under_way]:
            self._arrive(number)
        self._drop(self._order)
        self._order = ()

    def need(self, numbers: Iterable[int]) -> None:
        """Gathers buckets that an op is about to read."""
        for number in numbers:
            if number in self._here:
                continue
            place = self._order.index(number)
            assert number in self._under_way or place >= self._num_started, f"bucket {number} is read after it was let go"
            while self._num_started < min(place + 2, len(self._order)):
                self._start_next()
            self._arrive(number)

    def free(self, numbers: Iterable[int], *, backward: bool) -> None:
        """Frees buckets that no op reads any more, if the current pass has this direction."""
        if backward == self._is_backward:
            self._drop(number for number in numbers if number not in self._throughout)

    def _start_next(self) -> None:
        self._start(self._order[self._num_started])
        self._num_started += 1

    def _start(self, number: int) -> None:
        rank_bucket = self._rank_buckets[number]
        if rank_bucket.plan.form.home == "device":
            self._under_way[number] = (*rank_bucket.start(self._groups), None)
        elif rank_bucket.plan.is_shared_out:
            with self._copies.stream():
                self._under_way[number] = (*rank_bucket.start(self._groups), self._copies.mark())
        else:
            for place in rank_bucket.taken:
                self._make_room(place)
            with self._copies.stream(), torch.no_grad():
                for source, place in zip(rank_bucket.given, rank_bucket.taken, strict=True):
                    place.take(source.value)
                self._under_way[number] = None, [], self._copies.mark()

    def _arrive(self, number: int) -> None:
        rank_bucket, (flat, works, mark) = self._rank_buckets[number], self._under_way.pop(number)
        self._here.add(number)
        self._copies.arrive(mark)
        if flat is None:
            return
        with self._watch.waiting("weights"):
            for work in works:
                self._waits.wait(work, "gathering weights", rank_bucket.ranks)
        for place in rank_bucket.taken:
            self._make_room(place)
            with torch.no_grad():
                place.write(flat)
        if mark is not None:
            self._copies.keep_for_device(flat)

    def _make_room(self, place: Place) -> None:
        """Allocates a weight's storage, unless another of its buckets is here."""
        memory = place.held.untyped_storage()
        if not self._users[memory._cdata]:
            memory.resize_(place.held.numel() * place.held.element_size())
            self._watch.resized(place.held)
        self._users[memory._cdata] += 1

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._here:
                self._here.remove(number)
                for place in self._rank_buckets[number].taken:
                    memory = place.held.untyped_storage()
                    self._users[memory._cdata] -= 1
                    if not self._users[memory._cdata]:
                        memory.resize_(0)
                        self._watch.resized(place.held)
