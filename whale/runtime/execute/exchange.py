"""Tensors between the stages of a replica, forward and backward: receives posted early, waited for at their RECV, assembled once.

A parcel is the region of a tensor that one rank sends to another for one micro-batch. A single parcel that is all of the tensor is
used as it arrived; several are written side by side (activations, gradients of regions) or added (gradients from several readers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from whale.axes import Axes
from whale.comm import Channel, Channels, Launched, Waits, as_moved, rounded
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, BatchAxis, Edge, Plan, Replica
from whale.ir.schedule import Action, Kind
from whale.runtime.program.shard.pieces import Index, as_index, on_device, part, write_part
from whale.runtime.program.watch import Place, Watch
from whale.schedules import Releases
from whale.sharding import IndexSpace, Region
from whale.sharding.crossings import Crossings, Direction, row_space
from whale.sharding.index_sets import axis_sizes


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of one boundary tensor, or of its gradient, from one rank to another (or to itself)."""

    tensor: str  # op name
    channel: Channel  # between world ranks
    region: Region  # of the micro-batch's tensor


@dataclass(frozen=True)
class Boundary:
    """All copies of one replica."""

    plan: Plan
    replica: Replica
    model: ModelGraph
    world_ranks: tuple[int, ...]  # per rank of the plan, the rank in the world
    axes: Axes | None = None  # of the model; needed where tensors cross cut along another axis than the batch

    def copies(self, number: int, num_rows: int, direction: Direction) -> tuple[Copy, ...]:
        """The copies of edge `number` of the replica for a micro-batch of `num_rows` rows, in the order that both ends use."""
        key = number, num_rows, direction
        if key not in self._copies:
            self._copies[key] = tuple(self._find_copies(*key))
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[tuple[int, int, Direction], tuple[Copy, ...]]:
        return {}

    def _find_copies(self, number: int, num_rows: int, direction: Direction) -> Iterator[Copy]:
        for tensor, move in self._crossings.moves(self.replica.edges[number], num_rows, direction):
            yield Copy(tensor, Channel(move.source, move.target), move.region)

    @cached_property
    def _crossings(self) -> Crossings:
        rank_of = {device: self.world_ranks[rank] for device, rank in self.plan.rank_of.items()}
        return Crossings(self.replica, self.model, rank_of, self._batch_axes)

    @cached_property
    def _batch_axes(self) -> dict[str, BatchAxis]:
        return dict(self.plan.batch_axes)

    def held(self, edge: Edge, stage: int, tensor: str, rank: int, num_rows: int) -> Region:
        """A rank's region of a tensor, or of its gradient, on a stage at an end of an edge."""
        return self._crossings.value(edge, stage, tensor, num_rows).held[rank]

    def dtype(self, tensor: str, rank: int) -> torch.dtype:
        """The dtype of a tensor on a rank of the world."""
        found: torch.dtype = getattr(torch, self.plan.type_on(self._plan_ranks[rank], self.model.by_name[tensor].outputs[0].dtype))
        return found

    @cached_property
    def _plan_ranks(self) -> dict[int, int]:
        return {own: rank for rank, own in enumerate(self.world_ranks)}

    def space(self, tensor: str, num_rows: int) -> IndexSpace:
        """The index space of a micro-batch's tensor."""
        if any(stage.border_shard(tensor) for stage in self.replica.stages):
            assert self.axes is not None, f"%{tensor} crosses in parts of an axis whose place in it is not known"
            return IndexSpace(self.axes.ops[tensor].outputs[0], {**axis_sizes(self.axes), BATCH: num_rows}, self.axes.folded)
        return row_space(self.model.by_name[tensor].outputs[0], self._batch_axes.get(tensor), num_rows)

    def local_rows(self, stage: int, position: int, num_rows: int) -> tuple[int, int]:
        """Rows of a micro-batch that one device of a stage holds."""
        return self.replica.stages[stage].row_intervals(num_rows)[position]


_BACKWARD = frozenset({Kind.SEND_BACKWARD, Kind.POST_BACKWARD, Kind.RECV_BACKWARD})


def place_of(action: Action) -> Place:
    """The place of a SEND, POST or RECV."""
    assert action.stage is not None and action.micro_batch is not None
    return ("backward" if action.kind in _BACKWARD else "forward"), action.stage, action.micro_batch


@dataclass(frozen=True)
class _Form:
    """The shape of a copy, that of the rank's tensor, and the index of the copy in it (None for all)."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    index: tuple[Index, ...] | None
    sent: torch.dtype  # of the copy: that of its sender
    dtype: torch.dtype  # of the rank's tensor


@dataclass(slots=True)
class ArrivingCopy:
    """One copy in flight to this rank, or arrived."""

    copy: Copy  # which region of which tensor
    form: _Form  # its index in this rank's tensor
    wire: torch.Tensor  # the receive buffer
    work: Launched | None  # what to wait for; None once arrived
    peer: int  # the sending rank
    sender: Place  # its place


class Exchange:
    """Sends and receives tensors between the stages of one replica, for one rank."""

    def __init__(
        self,
        rank: int,
        position: int,  # of its device in its virtual device
        boundary: Boundary,
        channels: Channels,
        device: torch.device,  # where tensors are used
        waits: Waits,
        releases: Releases,  # the sends that must be done when a receive is
        watch: Watch,
    ) -> None:
        self._rank, self._position = rank, position
        self._boundary, self._channels = boundary, channels
        self._device, self._waits, self._watch = device, waits, watch
        self._parcels: dict[Place, list[ArrivingCopy]] = {}
        self._sends: dict[tuple[Place, int], list[tuple[Launched, torch.Tensor]]] = {}
        self._done_at = {(place_of(receive), sender): [place_of(send) for send in sends] for (receive, sender), sends in releases.items()}
        self._micro_batches: Sequence[tuple[int, int]] = ()
        self._local_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._own: dict[tuple[int, int, Direction], tuple[Copy, ...]] = {}
        self._forms: dict[tuple[int, int, Copy], _Form] = {}

    @property
    def passes_locally(self) -> bool:
        """Whether stages of one virtual device pass values to each other, which the schedule has no actions for."""
        return any(self._boundary.replica.is_local(edge) for edge in self._boundary.replica.edges)

    def begin(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """Starts a step with these global row intervals; drops the rest of an abandoned step."""
        self._parcels.clear()
        self._micro_batches = micro_batches

    def local_rows(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Rows of a micro-batch that this rank takes in a stage."""
        start, stop = self._micro_batches[micro_batch]
        key = (stage, stop - start)
        if key not in self._local_rows:
            self._local_rows[key] = self._boundary.local_rows(stage, self._position, stop - start)
        return self._local_rows[key]

    def post(self, sender: Place) -> None:
        """Posts the receives of what a stage on another virtual device sends to the stages of this rank."""
        for edge, copy in self._copies(sender, local=False):
            if copy.channel.target == self._rank:
                self._post(sender, _receiving(sender, edge), edge, copy)

    def _post(self, sender: Place, place: Place, edge: Edge, copy: Copy) -> None:
        form = self._form(place, edge, copy)
        wire = torch.empty(form.shape, dtype=form.sent, device=self._channels.wire_device)
        with self._waits.speaking(_name(place, "POST"), (copy.channel.source,)):
            work = self._channels.receive(as_moved(wire), copy.channel)
        self._watch.posted(sender, place, copy.channel, wire)
        self._parcels.setdefault(place, []).append(ArrivingCopy(copy, form, wire, work, copy.channel.source, sender))

    def peers(self, place: Place) -> tuple[int, ...]:
        """Ranks whose parcels for a place have not arrived."""
        return tuple(sorted({parcel.peer for parcel in self._parcels.get(place, ()) if parcel.work is not None}))

    def wait(self, place: Place) -> None:
        """Waits for the posted parcels, each once: Gloo's receives cannot be waited for again."""
        for parcel in self._parcels.get(place, ()):
            self._waits.wait(parcel.work, _name(place, "RECV"), (parcel.peer,))
            if parcel.work is not None:
                self._watch.arrived(parcel.sender, place, parcel.copy.channel)
            parcel.work = None
            for done in self._done_at.get((place, self._boundary.replica.pipeline.stage_rank[parcel.sender[1]]), ()):
                self._free_sends(done, parcel.peer)

    def take(self, place: Place) -> dict[str, torch.Tensor]:
        """The assembled tensors of a place; waits for those from the same virtual device."""
        if any(parcel.work is not None for parcel in self._parcels.get(place, ())):
            with self._watch.waiting("what was handed over"):
                self.wait(place)
        by_tensor: dict[str, list[ArrivingCopy]] = {}
        for parcel in self._parcels.pop(place, ()):
            by_tensor.setdefault(parcel.copy.tensor, []).append(parcel)
        return {tensor: self._assemble(place, parcels) for tensor, parcels in by_tensor.items()}

    def send(self, place: Place, values: Mapping[str, torch.Tensor]) -> None:
        """Starts the sends of a stage to other virtual devices.

        Args:
            place: the sending stage, forward or backward.
            values: this rank's part of each tensor, or of its gradient.
        """
        for edge, copy in self._copies(place, local=False):
            if copy.channel.source == self._rank:
                self._send(place, _receiving(place, edge), copy, self._piece(place, edge, values, copy))

    def pass_locally(self, place: Place, values: Mapping[str, torch.Tensor]) -> None:
        """Passes a stage's values on within its virtual device: to other stages of this rank, and between its ranks.

        All ranks of the virtual device call this at once, so sends and receives start in one order on all of them.
        """
        for edge, copy in self._copies(place, local=True):
            source, target = copy.channel.source, copy.channel.target
            if source == target == self._rank:
                there = _receiving(place, edge)
                parcel = ArrivingCopy(copy, self._form(there, edge, copy), self._piece(place, edge, values, copy), None, self._rank, place)
                self._parcels.setdefault(there, []).append(parcel)
            elif source == self._rank:
                self._send(place, _receiving(place, edge), copy, self._piece(place, edge, values, copy))
            elif target == self._rank:
                self._post(place, _receiving(place, edge), edge, copy)

    def _send(self, place: Place, receiver: Place, copy: Copy, piece: torch.Tensor) -> None:
        wire = piece.contiguous().to(self._channels.wire_device)
        self._watch.sent(place, receiver, copy.channel, wire)
        with self._waits.speaking(_name(place, "SEND"), (copy.channel.target,)):
            work = self._channels.send(as_moved(wire), copy.channel)
        self._sends.setdefault((place, copy.channel.target), []).append((work, wire))

    def _free_sends(self, place: Place, peer: int) -> None:
        """Waits for a stage's sends to a rank, and frees them."""
        for work, _ in self._sends.pop((place, peer), ()):
            self._waits.wait(work, _name(place, "SEND"), (peer,))

    def finish(self) -> None:
        """Waits for all sends of the step."""
        for place, peer in list(self._sends):
            self._free_sends(place, peer)
        assert not self._parcels, f"parcels that nobody took: {list(self._parcels)}"

    def _copies(self, sender: Place, *, local: bool) -> Iterator[tuple[Edge, Copy]]:
        """A stage's copies of a micro-batch to or from this rank, in the order in which both ends start them."""
        direction, stage, micro_batch = sender
        start, stop = self._micro_batches[micro_batch]
        for number, edge in enumerate(self._boundary.replica.edges):
            if (edge.source if direction == "forward" else edge.target) == stage and self._boundary.replica.is_local(edge) == local:
                key = number, stop - start, direction
                if key not in self._own:
                    self._own[key] = tuple(
                        copy for copy in self._boundary.copies(*key) if self._rank in (copy.channel.source, copy.channel.target)
                    )
                for copy in self._own[key]:
                    yield edge, copy

    def _piece(self, place: Place, edge: Edge, values: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
        value, index = values[copy.tensor].detach(), self._form(place, edge, copy).index
        return value if index is None else part(value, index)

    def _form(self, place: Place, edge: Edge, copy: Copy) -> _Form:
        """Index of a copy in this rank's tensor in a stage; worked out once per number of rows."""
        start, stop = self._micro_batches[place[2]]
        key = place[1], stop - start, copy
        known = self._forms.get(key)
        if known is None:
            space = self._boundary.space(copy.tensor, stop - start)
            held = self._boundary.held(edge, place[1], copy.tensor, self._rank, stop - start)
            shape, whole = space.shape(copy.region), space.shape(held)
            places = [as_index(runs) for runs in space.positions(copy.region, held)]
            index = on_device(places, self._device)
            dtypes = (self._boundary.dtype(copy.tensor, rank) for rank in (copy.channel.source, self._rank))
            known = self._forms[key] = _Form(shape, whole, None if shape == whole else index, *dtypes)
        return known

    def _assemble(self, place: Place, parcels: Sequence[ArrivingCopy]) -> torch.Tensor:
        """The tensor from its parcels: regions side by side; gradients of several readers added."""
        first = parcels[0]
        if len(parcels) == 1 and first.form.index is None:
            return self._read(place, first)
        adds = place[0] == "backward"
        make = torch.zeros if adds else torch.empty
        value = make(first.form.whole, dtype=first.form.dtype, device=self._device)
        for parcel in parcels:
            everything = (slice(0, size) for size in first.form.whole)
            write_part(value, parcel.form.index or tuple(everything), self._read(place, parcel), add=adds)
        return value

    def _read(self, place: Place, parcel: ArrivingCopy) -> torch.Tensor:
        """What arrived, on this rank's device and in its type."""
        value, dtype = parcel.wire.to(self._device), parcel.form.dtype
        return rounded(value, dtype) if place[0] == "forward" else value.to(dtype)


def _receiving(sender: Place, edge: Edge) -> Place:
    direction, _, micro_batch = sender
    return direction, edge.target if direction == "forward" else edge.source, micro_batch


def _name(place: Place, verb: str) -> str:
    return f"{place[1]}{verb}_{'F' if place[0] == 'forward' else 'B'}{place[2]}"
