"""The communicators that a plan needs: sets of ranks that sum together, and pairs of ranks that send messages.

Equal sets share one, and so do all messages from one rank to another, in every mode: their launches are in one order. Both directions
of a pair share one where they take turns, so that none waits for the other:

    gpipe    F0 F1 F2 F3 ........ B3 B2 B1 B0     all messages forward are launched before all those back: one communicator
    1f1b     F0 F1 .. B0 F2 .. B1 F3 .. B2 .. B3  with one, F2 would wait for B0, which is late where devices differ from the plan: two
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, product

from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica
from whale.ir.schedule import POSTS, SENDS, Kind, Schedule
from whale.sharding.crossings import DIRECTIONS, Crossings
from whale.sharding.parameters import ParameterShardings

Way = tuple[int, int]
"""Sender and receiver of messages."""

MANY_FOR_A_RANK = 64
"""Above this, NCCL takes much memory of one device: tens of MB of buffers for each communicator, and more over NVLink."""

MANY = 4096
"""Above this, setup takes long: every rank takes part in making each communicator."""


@dataclass(frozen=True)
class Communicators:
    """The communicators of a plan, by ranks of the plan."""

    # sorted sets of ranks that sum or share something, each once; all of the cluster are one of them, idle ones behind those of the plan
    groups: tuple[tuple[int, ...], ...]
    channels: tuple[tuple[Way, ...], ...]  # per communicator of a pair, one or both ways; sorted, each once

    def __len__(self) -> int:
        return len(self.groups) + len(self.channels)

    @cached_property
    def most_of_a_rank(self) -> int:
        """The most communicators that any one rank takes part in."""
        members = chain(self.groups, (ways[0] for ways in self.channels))
        return max(Counter(rank for ranks in members for rank in ranks).values(), default=0)

    @property
    def warning(self) -> str | None:
        if self.most_of_a_rank <= MANY_FOR_A_RANK and len(self) <= MANY:
            return None
        return (
            f"{len(self)} communicators, {self.most_of_a_rank} of them on one device, take NCCL much time to create and much "
            f"memory (many: above {MANY} in all or {MANY_FOR_A_RANK} on a device); fewer stages, or more even shares of rows, need fewer"
        )

    def __str__(self) -> str:
        kinds = f"{len(self.groups)} collective, {len(self.channels)} point-to-point"
        return f"communicators: {kinds}; at most {self.most_of_a_rank} on one device"


def communicators_of(
    plan: Plan, model: ModelGraph, shardings: ParameterShardings, schedules: Sequence[Schedule], num_ranks: int
) -> Communicators:
    """What a plan needs for training with its own batch; other modes and batches use the same.

    Args:
        schedules: per replica, with communication.
        num_ranks: of the cluster, those that the plan leaves idle among them.
    """
    everyone = {tuple(range(num_ranks))} if num_ranks > 1 else set()
    groups = tuple(sorted(everyone.union(groups_of(plan, model, shardings))))
    return Communicators(groups, tuple(channels_of(ways_of(plan, model), plan, schedules)))


def channels_of(ways: Iterable[Way], plan: Plan, schedules: Sequence[Schedule]) -> Iterator[tuple[Way, ...]]:
    """The ways that share each communicator, sorted.

    Args:
        ways: in which something is sent, with repetitions and with sends to oneself.
        schedules: per replica, with communication.
    """
    known, places = dict[tuple[int, tuple[Way, ...]], frozenset[frozenset[int]]](), dict[int, tuple[int, int]]()
    turns = list[frozenset[frozenset[int]]]()
    for replica, schedule in zip(plan.replicas, schedules, strict=True):
        pairs = tuple((edge.source, edge.target) for edge in replica.edges)
        look = id(schedule), pairs
        if look not in known:
            known[look] = frozenset(_taking_turns(schedule, pairs))
        turns.append(known[look])
        places |= _places(replica, plan.rank_of)
    found: dict[tuple[int, ...], set[Way]] = {}
    for way in ways:
        (number, rank), (_, other) = map(places.__getitem__, way)
        takes_turns = frozenset((rank, other)) in turns[number]
        if way[0] != way[1]:
            found.setdefault(tuple(sorted(way)) if takes_turns else way, set()).add(way)
    yield from sorted(tuple(sorted(each)) for each in found.values())


def _places(replica: Replica, rank_of: Mapping[str, int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Per rank of the plan, its replica and its virtual device there."""
    for place, stage in enumerate(replica.first_stages):
        yield from ((rank_of[device], (replica.index, place)) for device in stage.virtual_device.devices)


def _taking_turns(schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> Iterator[frozenset[int]]:
    """The pairs of a pipeline's ranks of which one sends all that it sends in a step before the other sends anything, or nothing."""
    rank_of = schedule.stage_rank
    readers: dict[tuple[int, bool], set[int]] = {}  # per sending stage, whether backward
    for source, target in pairs:
        readers.setdefault((source, False), set()).add(rank_of[target])
        readers.setdefault((target, True), set()).add(rank_of[source])
    for rank, actions in enumerate(schedule.ranks):
        sends: dict[int, list[bool]] = {}  # per other rank, whether this one sends, launch by launch
        for action in actions:
            if action.kind in SENDS:
                assert action.stage is not None
                for other in readers.get((action.stage, action.kind is Kind.SEND_BACKWARD), ()):
                    sends.setdefault(other, []).append(True)
            elif action.kind in POSTS:
                assert action.stage is not None
                sends.setdefault(rank_of[action.stage], []).append(False)
        yield from (frozenset((rank, other)) for other, own in sends.items() if other > rank and len([*groupby(own)]) <= 2)


def groups_of(plan: Plan, model: ModelGraph, shardings: ParameterShardings) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that sum together, besides all: the owners of a gradient or of a copy of its state, the devices of a split group."""
    groups = {*_owner_sets(model, shardings), *_split_groups(plan)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def _owner_sets(model: ModelGraph, shardings: ParameterShardings) -> Iterator[tuple[int, ...]]:
    apart = shardings.keeping if shardings.groups else ()  # these are summed group by group
    summed = (shardings.summed_pieces(name) for name in shardings.parameters if name in model.trained and name not in apart)
    for found in {id(each): each for each in summed}.values():  # they are long, and parameters of one stage share theirs
        yield from (piece.owners for _, pieces in found for piece in pieces if not piece.is_complete)
    divided = {id(found): found for found in map(shardings.pieces_by_group, shardings.keeping)}  # layers share theirs
    yield from (piece.owners for found in divided.values() for _, pieces in found for piece in pieces)
    between = shardings.parameters if shardings.sync_groups else shardings.keeping if shardings.groups else ()
    for name in set(model.trained).intersection(between):
        owners = {piece.owners for piece in shardings.kept(name).pieces}
        yield from owners
        yield from (own for each in owners for own in shardings.together(each))


def _split_groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    for replica in plan.replicas:
        for stage in replica.stages:
            for group in stage.groups if stage.split > 1 else ():
                yield tuple(sorted(plan.rank_of[device] for device in group))


def ways_of(plan: Plan, model: ModelGraph) -> Iterator[Way]:
    """Sender and receiver of each region that crosses stages for the plan's own batch, with repetitions and with sends to oneself."""
    batch_axes, known = dict(plan.batch_axes), dict[Hashable, tuple[Way, ...]]()
    for replica, rows in zip(plan.replicas, plan.all_micro_batch_rows(plan.planned_rows), strict=True):
        names = tuple(dict.fromkeys(name for stage in replica.stages for name in stage.virtual_device.devices))
        sizes = {stop - start for start, stop in rows}
        stages = tuple((len(own.virtual_device.devices), own.shares, own.split, own.shards) for own in replica.stages)
        look = replica.edges, frozenset(sizes), replica.pipeline.stage_rank, stages
        if look not in known:
            crossings = Crossings(replica, model, {name: index for index, name in enumerate(names)}, batch_axes)
            moves = (crossings.moves(*each) for each in product(replica.edges, sizes, DIRECTIONS))
            known[look] = tuple(dict.fromkeys((move.source, move.target) for own in moves for _, move in own))
        yield from ((plan.rank_of[names[source]], plan.rank_of[names[target]]) for source, target in known[look])
