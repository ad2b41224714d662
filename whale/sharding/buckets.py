"""Which gradients and weights travel together: parameters of equal owners and forms share buckets, in reverse order of first use.

    backward   |layer 3|layer 2|layer 1|
    bucket 0           |--- layers 3, 2 ---|
    bucket 1                           |-- layer 1 --|     a parameter of layers 3 and 1 is complete after layer 1

    flat       [ layer 3 | pad | layer 1 ][ layer 2 | pad ]     if owners keep parts of the sum, each has a contiguous run
                 -- kept by owner 0 ---    -- by owner 1 --     a parameter divided among keepers has a bucket of its own

All owners of sharded weights gather together: in each pass of the stage if their schedules are equal, else once for the whole
run. The latter also holds where weight gradients wait for passes of their own.

Where groups of owners each keep a copy, weights have buckets of their own in each group. Buckets of gradients are one for all; each group
has its runs, and what keepers of several groups have is summed between them:

    flat       [ layer 3 | layer 1 ][ layer 2 ]
    group a      -- owner 0 -------   owner 1
    group b      owner 2   -- owner 3 --------
    between      0, 2      0, 3       1, 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from whale.ir.graph import DTYPE_BYTES, ModelGraph
from whale.ir.plan import Form, Plan
from whale.ir.precision import HALF
from whale.ir.schedule import Kind, Schedule
from whale.ir.writes import reached_parameters
from whale.sharding.parameters import ParameterShardings, Places
from whale.sharding.sharding import Piece, Region

ALIGNED_BYTES = 16
"""Alignment of slots: the width of vectorized loads."""

WEIGHTS_ALIGNED_BYTES = 256
"""Alignment of slots that ops read in place: matrix products then choose the kernels, and round, as for separate allocations."""

NUM_AT_ONCE = 2
"""Buckets in flight at once, where each takes memory of its own until it has arrived."""

Run = tuple[int, int, int]
"""(Keeper, start, stop) of elements in a flat buffer."""

_Key = tuple[Places, tuple[int, ...], Form, str | None, bool, bool, str | None]
"""Places, owners, form, sum_dtype, feeds_back, is_unlike, and the parameter that keepers divide, or whose gradient is sparse; "" where
they divide none, None where all owners keep all.
"""


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Elements of one parameter in a flat buffer."""

    name: str
    piece: Piece  # which elements, and who owns them
    # (owner, number of elements) of those that keep parts, in order, one group that keeps a copy after the other; empty where all keep all
    keepers: tuple[tuple[int, int], ...] = ()
    start: int = 0  # in the buffer, in elements
    stop: int = 0


class _Placed(NamedTuple):
    """A slot that has no bucket yet, with its form and how it is summed (see `Bucket`)."""

    slot: BucketSlot
    places: Places
    form: Form
    sum_dtype: str | None = None
    feeds_back: bool = False
    is_unlike: bool = False


@dataclass(frozen=True)
class Bucket:
    """Elements that travel together."""

    slots: tuple[BucketSlot, ...]  # in the order of the flat buffer, those of one keeper contiguous
    form: Form
    owners: tuple[int, ...]  # ranks of the plan that hold them
    stages: Places  # (replica, stage) pairs that use them
    # whether all owners reach it at the same point of equal schedules. If not, and for sparse gradients, it starts after all else
    is_at_one_place: bool = True
    sum_dtype: str | None = None  # type to which elements are rounded for the sum; None for their own
    feeds_back: bool = False  # whether each owner keeps the rounding error and adds it to what it sums next
    # of gradients, the owners that each keep a copy together, where these are several groups
    groups: tuple[tuple[int, ...], ...] = ()
    # of a published bucket, whether each slot is all that its owners hold of the parameter, so that ops read it there
    is_read_in_place: bool = False
    is_unlike: bool = False  # of weights, whether owners read them in unlike types: then they travel as they are stepped

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters, each once."""
        return tuple(dict.fromkeys(slot.name for slot in self.slots))

    @cached_property
    def num_elements(self) -> int:
        return aligned(self.slots[-1].stop, self.form)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.form.dtype]

    @property
    def padding_bytes(self) -> int:
        return self.num_bytes - sum(slot.stop - slot.start for slot in self.slots) * DTYPE_BYTES[self.form.dtype]

    @property
    def sent_bytes(self) -> int:
        """Of the flat buffer in the type in which it is summed."""
        return self.num_elements * DTYPE_BYTES[self.sum_dtype or self.form.dtype]

    @property
    def lost_bytes(self) -> int:
        """Of the rounding errors that each owner keeps."""
        return self.num_bytes if self.feeds_back else 0

    @property
    def is_shared_out(self) -> bool:
        """Whether some owner alone has a part, which it sends to the others."""
        return len(self.owners) > 1 and bool(self.runs)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """(keeper, start, stop) of what each keeper keeps, group by group; empty where all owners keep all."""
        return tuple(run for runs in self._runs_of_groups for run in runs)

    @cached_property
    def _runs_of_groups(self) -> tuple[tuple[Run, ...], ...]:
        number = {owner: index for index, group in enumerate(self.groups) for owner in group}
        starts: list[list[tuple[int, int]]] = [[] for _ in self.groups or (self.owners,)]
        for slot in self.slots:
            reached = dict[int, int]()
            for keeper, num_elements in slot.keepers:
                group = number.get(keeper, 0)
                start = reached.get(group, slot.start)
                if not starts[group] or starts[group][-1][0] != keeper:
                    starts[group].append((keeper, start))
                reached[group] = start + num_elements
        return tuple(tuple(self._ended(own)) for own in starts)

    def _ended(self, starts: Sequence[tuple[int, int]]) -> Iterator[Run]:
        ends = [*(start for _, start in starts[1:]), self.num_elements][: len(starts)]
        yield from ((keeper, start, end) for (keeper, start), end in zip(starts, ends, strict=True))

    @cached_property
    def between(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """(keepers, start, stop) of what each group has summed and one keeper of each sums then; empty where one group keeps all."""
        if not self.groups:
            return ()
        bounds = sorted({bound for _, start, stop in self.runs for bound in (start, stop)})
        return tuple(
            (tuple(sorted(keeper for keeper, first, last in self.runs if first <= start < last)), start, stop)
            for start, stop in pairwise(bounds)
        )


@dataclass(frozen=True)
class Buckets:
    """All buckets of a plan, each kind in the order in which they start."""

    summed: tuple[Bucket, ...] = ()
    published: tuple[Bucket, ...] = ()  # weights that keepers send to the other owners after a step, in the order of first use
    # weights that keepers send, or each owner copies from its host, before ops read them, in the order of first use
    gathered: tuple[Bucket, ...] = ()
    outer: tuple[Bucket, ...] = ()  # what several sync groups step, in the form of the optimizer: averaged after each round
    # per keeper, the number of elements that it keeps of each parameter
    kept: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()  # sets of ranks that sum together, where `whale.sharding.communicators` was asked


def aligned(num_elements: int, form: Form, aligned_bytes: int = ALIGNED_BYTES) -> int:
    """The number of elements, rounded up to the start of the next slot."""
    size = DTYPE_BYTES[form.dtype]
    return filled_up(num_elements * size, aligned_bytes) // size


def filled_up(num_bytes: int, aligned_bytes: int = ALIGNED_BYTES) -> int:
    """Bytes, rounded up to the alignment."""
    return -(-num_bytes // aligned_bytes) * aligned_bytes


def plan_buckets(plan: Plan, shardings: ParameterShardings, model: ModelGraph, alike: Sequence[int], bucket_bytes: int) -> Buckets:
    """The buckets of a whole plan, equal on every rank.

    Pieces with one contributor are not summed, nor are parameters without gradient.

    Args:
        plan: says in which forms parameters are.
        shardings: who holds what.
        model: sizes, and the order of first use.
        alike: per replica a number, equal for those that run equal schedules.
        bucket_bytes: a bucket of at least this many bytes is closed.
    """
    first_use, never = model.first_reads, len(model.ops)
    reached = sorted(reached_parameters(model).intersection(shardings.parameters), key=lambda name: (-first_use[name], name))

    @cache
    def slots_of(name: str) -> tuple[tuple[BucketSlot, Places], ...]:
        return tuple(_summed_slots(shardings, model, name))

    def slots() -> Iterator[_Placed]:
        for name in reached:
            state = plan.state_of(name)
            assert state.gradient is not None, "what is trained has a gradient"
            own = state.gradient, state.sum_dtype, state.feeds_back
            yield from (_Placed(slot, places, *own) for slot, places in slots_of(name) if not slot.piece.is_complete)

    def kept_slots(name: str) -> Iterator[tuple[BucketSlot, Places]]:
        """What each group that keeps a copy sends or fetches, and where."""
        if not shardings.groups or name not in shardings.keeping:
            yield from slots_of(name)
            return
        kept = shardings.kept(name).held
        for (places, pieces), keeping in zip(shardings.pieces_by_group(name), shardings.keeping[name][0], strict=True):
            own = {device: kept[device] for device in keeping.devices}
            yield from ((slot, places) for slot in _slots(shardings, model, name, pieces, own))

    def order(bucket: Bucket) -> tuple[object, ...]:
        """Later stages first, and in a stage what is first used last first: the order in which gradients become complete."""
        first = min((-first_use[slot.name], slot.name, slot.piece.region.intervals) for slot in bucket.slots)
        return not bucket.is_at_one_place, -max(stage for _, stage in bucket.stages), *first

    def placed(bucket: Bucket) -> Bucket:
        places = {(alike[replica], stage) for replica, stage in bucket.stages}
        return replace(bucket, is_at_one_place=len(places) == 1 and not bucket.form.is_sparse)

    shared = [each for name in shardings.parameters if name in shardings.keeping for each in kept_slots(name)]
    given = [_as_read(plan, slot, places) for slot, places in shared if len(slot.piece.owners) > 1]
    on_host = (name for name in shardings.parameters if plan.state_of(name).compute.home == "host")
    there = [_as_read(plan, slot, places) for name in on_host for slot, places in kept_slots(name)]

    def weights(slots: Iterable[_Placed], aligned_bytes: int) -> list[Bucket]:
        own = sorted(slots, key=lambda each: first_use.get(each.slot.name, never))
        found = _filled(own, shardings, model, bucket_bytes, aligned_bytes)
        return sorted(found, key=lambda each: min(first_use.get(name, never) for name in each.names))

    def in_place(bucket: Bucket) -> Bucket:
        held = ((shardings.gradient(slot.name).held, slot.piece) for slot in bucket.slots)
        are_read = not bucket.is_unlike
        return replace(
            bucket, is_read_in_place=are_read and all(own[owner] == piece.region for own, piece in held for owner in bucket.owners)
        )

    brought = [*(each for each in given if each.form == Form(each.form.dtype, "owners")), *there]
    kept: dict[int, dict[str, int]] = {}
    for slot, _ in shared:
        for keeper, num_elements in slot.keepers:
            own = kept.setdefault(keeper, {})
            own[slot.name] = own.get(slot.name, 0) + num_elements
    return Buckets(
        tuple(sorted(map(placed, _filled(slots(), shardings, model, bucket_bytes)), key=order)),
        tuple(map(in_place, weights((each for each in given if each.form.is_plain), WEIGHTS_ALIGNED_BYTES))),
        tuple(weights(brought, ALIGNED_BYTES)),
        tuple(_filled(_stepped(plan, shardings), shardings, model, bucket_bytes)) if shardings.sync_groups else (),
        kept,
    )


def _stepped(plan: Plan, shardings: ParameterShardings) -> Iterator[_Placed]:
    """What optimizers step, in their form."""
    for name in shardings.parameters:
        if (form := plan.state_of(name).optimizer) is not None:
            yield from (_Placed(BucketSlot(name, piece), shardings.places(name), form) for piece in shardings.kept(name).pieces)


def _as_read(plan: Plan, slot: BucketSlot, places: Places) -> _Placed:
    """A slot of weights in the form that ops read; where owners read unlike types, in the dtype that is stepped."""
    state = plan.state_of(slot.name)
    is_unlike = bool(slot.keepers) and state.compute.dtype == HALF and plan.are_unlike(slot.piece.owners)
    form = replace(state.compute, dtype=state.kept.dtype) if is_unlike else state.compute
    return _Placed(slot, places, form, is_unlike=is_unlike)


def _slots(
    shardings: ParameterShardings, model: ModelGraph, name: str, pieces: Iterable[Piece], kept: Mapping[int, Region]
) -> Iterator[BucketSlot]:
    """Pieces of a parameter, each with what keepers have of it; `kept`: what each keeps."""
    for piece in pieces:
        common = ((keeper, piece.region.intersect(region)) for keeper, region in kept.items())
        keepers = ((keeper, region) for keeper, region in common if not region.is_empty)
        yield BucketSlot(name, piece, tuple((keeper, shardings.num_elements(model, name, region)) for keeper, region in keepers))


def _summed_slots(shardings: ParameterShardings, model: ModelGraph, name: str) -> Iterator[tuple[BucketSlot, Places]]:
    """What each group that sums gradients in each step has of a parameter, and where."""
    kept = shardings.kept(name).held if name in shardings.keeping else {}
    for places, pieces in shardings.summed_pieces(name):
        own = kept
        if kept and shardings.sync_groups:
            members = {owner for piece in pieces for owner in piece.owners}
            own = {keeper: region for keeper, region in kept.items() if keeper in members}
        yield from ((slot, places) for slot in _slots(shardings, model, name, pieces, own))


def _filled(
    slots: Iterable[_Placed], shardings: ParameterShardings, model: ModelGraph, bucket_bytes: int, aligned_bytes: int = ALIGNED_BYTES
) -> Iterator[Bucket]:
    """Buckets of slots with equal keys; one that is full is closed."""
    growing: dict[_Key, list[BucketSlot]] = {}
    held: dict[_Key, int] = {}
    for slot, places, form, sum_dtype, feeds_back, is_unlike in slots:
        is_divided = len(slot.keepers) > 1 and len(slot.keepers) > len(shardings.among([keeper for keeper, _ in slot.keepers]))
        divided = slot.name if is_divided or form.is_sparse else "" if slot.keepers else None
        key = places, slot.piece.owners, form, sum_dtype, feeds_back, is_unlike, divided
        num_elements = shardings.num_elements(model, slot.name, slot.piece.region)
        if form.is_sparse:
            num_elements = model.parameter_by_name[slot.name].gradient_elements
        growing.setdefault(key, []).append(replace(slot, stop=num_elements))
        held[key] = held.get(key, 0) + num_elements * DTYPE_BYTES[form.dtype]
        if held[key] >= bucket_bytes:
            yield _laid_out(growing.pop(key), key, shardings, aligned_bytes)
            del held[key]
    for key, own in growing.items():
        yield _laid_out(own, key, shardings, aligned_bytes)


def _laid_out(slots: Sequence[BucketSlot], key: _Key, shardings: ParameterShardings, aligned_bytes: int) -> Bucket:
    """A bucket of slots whose `stop` is their size, keeper by keeper."""
    places, owners, form, sum_dtype, feeds_back, is_unlike, _ = key
    found, start = [], 0
    for slot in sorted(slots, key=lambda slot: [keeper for keeper, _ in slot.keepers]):
        found.append(replace(slot, start=start, stop=start + slot.stop))
        start = aligned(found[-1].stop, form, aligned_bytes)
    groups = shardings.among(owners) if slots[0].keepers else ()
    return Bucket(
        tuple(found),
        form,
        owners,
        places,
        sum_dtype=sum_dtype,
        feeds_back=feeds_back,
        groups=groups if len(groups) > 1 else (),
        is_unlike=is_unlike,
    )


@dataclass(frozen=True)
class Visits:
    """What a rank gathers, by numbers of buckets."""

    forward: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # per stage, in a forward pass, in the order of first use
    # in a backward pass, in reverse order of last use; without what only frozen parts of the model read
    backward: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    throughout: tuple[int, ...] = ()  # once, before a run


def visits_of(buckets: Sequence[Bucket], model: ModelGraph, plan: Plan, schedules: Sequence[Schedule]) -> dict[int, Visits]:
    """The visits of each rank.

    Args:
        buckets: `Buckets.gathered`.
        schedules: per replica.
    """
    runs: dict[int, set[tuple[int, int]]] = {}
    for replica in plan.replicas if buckets else ():
        for stage in replica.stages:
            for device in stage.virtual_device.devices:
                runs.setdefault(plan.rank_of[device], set()).add((replica.index, stage.index))
    numbers: dict[Schedule, int] = {}
    alike = [numbers.setdefault(schedule, len(numbers)) for schedule in schedules]
    weights_wait = {(number, stage) for schedule, number in numbers.items() for stage in _with_weights(schedule)}
    at_one_place: dict[int, dict[int, list[int]]] = {}
    throughout: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        for rank in bucket.owners:
            own = at_one_place.setdefault(rank, {})
            together = bucket.stages if bucket.is_shared_out else runs[rank].intersection(bucket.stages)  # else each brings its own
            places = {(alike[replica], stage) for replica, stage in together}
            is_throughout = len(places) > 1 or places <= weights_wait
            (throughout if is_throughout else own).setdefault(rank if is_throughout else next(iter(places))[1], []).append(number)

    def last(number: int) -> int:
        return max(model.last_reads.get(name, 0) for name in buckets[number].names)

    read_again = frozenset(_read_backward(model, plan)) if at_one_place else frozenset[str]()
    again = [not read_again.isdisjoint(bucket.names) for bucket in buckets]
    return {
        rank: Visits(
            {stage: tuple(each) for stage, each in own.items()},
            {stage: tuple(sorted((number for number in each if again[number]), key=last, reverse=True)) for stage, each in own.items()},
            tuple(throughout.get(rank, ())),
        )
        for rank, own in at_one_place.items()
    }


def _read_backward(model: ModelGraph, plan: Plan) -> Iterator[str]:
    """Parameters read, maybe through views, by ops that have gradients or are recomputed."""
    again = {name for replica in plan.replicas for stage in replica.stages for segment in stage.recomputed for name in segment}
    for op in model.ops:
        if op.requires_grad or op.name in again:
            yield from (each.name for each in model.parameters_among(model.storage[source] for source in op.inputs))


def _with_weights(schedule: Schedule) -> set[int | None]:
    """The stages whose weight gradients wait for passes of their own."""
    return {action.stage for actions in schedule.ranks for action in actions if action.kind is Kind.BACKWARD_WEIGHT}
