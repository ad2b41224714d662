"""Tensors between stages, forward and backward: parcels posted early, waited for in their place, put together once.

A parcel is the part of a tensor that one rank hands to another for one micro-batch. Where one parcel is the whole of
what is needed its buffer is the value; otherwise parcels are written side by side (activations, gradients of rows) or
added (gradients from several readers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.comm import Channels, wait
from whale.ir.graph import ModelGraph
from whale.ir.plan import BatchAxis, Edge
from whale.runtime.execute.boundary import Boundary, Copy, Direction, piece_shape, rows_slice, write_rows

Place = tuple[Direction, int, int]
"""Direction, stage and micro-batch."""


@dataclass(frozen=True)
class Parcel:
    """One copy on its way to this rank, or here already.

    Attributes:
        copy: which rows of which tensor.
        wire: what it arrives in.
        work: what to wait for; None where this rank handed it to itself.
        peer: the rank it comes from.
    """

    copy: Copy
    wire: torch.Tensor
    work: dist.Work | None
    peer: int


class Exchange:
    """Hands tensors between the stages of one replica, for one rank.

    Args:
        rank: this rank in the world.
        position: of its device in its virtual device.
        boundary: the copies of its replica.
        model: specs of the tensors.
        channels: between ranks.
        device: where tensors are used.
        timeout: the longest wait.
    """

    def __init__(
        self,
        rank: int,
        position: int,
        boundary: Boundary,
        model: ModelGraph,
        channels: Channels,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._rank, self._position = rank, position
        self._boundary, self._model, self._channels = boundary, model, channels
        self._device, self._timeout = device, timeout
        self._axes: dict[str, BatchAxis] = dict(boundary.plan.batch_axes)
        self._parcels: dict[Place, list[Parcel]] = {}
        self._sends: list[tuple[dist.Work, torch.Tensor, int, str]] = []
        self._micro_batches: Sequence[tuple[int, int]] = ()
        self._local_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._tensor_rows: dict[tuple[int, int, str], tuple[int, int]] = {}

    @property
    def hands_over_at_once(self) -> bool:
        """Whether stages of one virtual device hand values to one another, for which no action stands in the schedule."""
        return any(self._boundary.replica.is_local(edge) for edge in self._boundary.replica.edges)

    def begin(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """Starts a step whose micro-batches take these global rows; forgets what a step that was given up has left."""
        self._parcels.clear()
        self._micro_batches = micro_batches

    def local_rows(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Rows of a micro-batch that this rank takes in a stage."""
        start, stop = self._micro_batches[micro_batch]
        key = (stage, stop - start)
        if key not in self._local_rows:
            self._local_rows[key] = self._boundary.local_rows(stage, self._position, stop - start)
        return self._local_rows[key]

    def _rows_of(self, tensor: str, place: Place) -> tuple[int, int]:
        """Rows of a micro-batch that this rank has of a tensor in a stage."""
        start, stop = self._micro_batches[place[2]]
        key = (place[1], stop - start, tensor)
        if key not in self._tensor_rows:
            self._tensor_rows[key] = self._boundary.tensor_rows(place[1], tensor, self._position, stop - start)
        return self._tensor_rows[key]

    def post(self, sender: Place) -> None:
        """Starts to receive what a stage on another virtual device hands to the stages of this rank."""
        for edge, copy in self._copies(sender, local=False):
            if copy.lane.target == self._rank:
                self._post(_receiving(sender, edge), copy)

    def _post(self, place: Place, copy: Copy) -> None:
        wire = self._buffer(place, copy)
        work = self._channels.receive(_bytes(wire), copy.lane)
        self._parcels.setdefault(place, []).append(Parcel(copy, wire, work, copy.lane.source))

    def peers(self, place: Place) -> tuple[int, ...]:
        """Ranks that parcels of a place are still to come from."""
        return tuple(sorted({parcel.peer for parcel in self._parcels.get(place, ()) if parcel.work is not None}))

    def wait(self, place: Place) -> None:
        """Waits for the parcels that have been posted, each once: Gloo's receives cannot be waited for again."""
        parcels = self._parcels.get(place, [])
        for parcel in parcels:
            wait(parcel.work, _name(place, "RECV"), (parcel.peer,), self._timeout)
        parcels[:] = [replace(parcel, work=None) for parcel in parcels]

    def take(self, place: Place) -> dict[str, torch.Tensor]:
        """The tensors of a place, put together; what was handed over on this virtual device is waited for here."""
        self.wait(place)
        by_tensor: dict[str, list[Parcel]] = {}
        for parcel in self._parcels.pop(place, ()):
            by_tensor.setdefault(parcel.copy.tensor, []).append(parcel)
        return {tensor: self._assemble(place, tensor, parcels) for tensor, parcels in by_tensor.items()}

    def send(self, place: Place, values: Mapping[str, torch.Tensor]) -> None:
        """Starts to send what a stage hands to other virtual devices.

        Args:
            place: the stage that hands on (forward) or back (backward).
            values: this rank's part of each tensor, or of its gradient.
        """
        for _, copy in self._copies(place, local=False):
            if copy.lane.source == self._rank:
                self._send(place, copy, self._piece(place, values, copy))

    def hand_over(self, place: Place, values: Mapping[str, torch.Tensor]) -> None:
        """Passes a stage's values on within its virtual device: to other stages of this rank, and between its ranks.

        All ranks of the virtual device come here at once, so sends and receives are started in one order on all of them.
        """
        for edge, copy in self._copies(place, local=True):
            source, target = copy.lane.source, copy.lane.target
            if source == target == self._rank:
                parcel = Parcel(copy, self._piece(place, values, copy), None, self._rank)
                self._parcels.setdefault(_receiving(place, edge), []).append(parcel)
            elif source == self._rank:
                self._send(place, copy, self._piece(place, values, copy))
            elif target == self._rank:
                self._post(_receiving(place, edge), copy)

    def _send(self, place: Place, copy: Copy, piece: torch.Tensor) -> None:
        wire = piece.contiguous().to(self._channels.wire_device)
        self._sends.append((self._channels.send(_bytes(wire), copy.lane), wire, copy.lane.target, _name(place, "SEND")))

    def finish(self) -> None:
        """Waits until everything sent in the step has left."""
        for work, _, peer, name in self._sends:
            wait(work, name, (peer,), self._timeout)
        self._sends.clear()
        assert not self._parcels, f"parcels that nobody took: {list(self._parcels)}"

    def _copies(self, sender: Place, *, local: bool) -> Iterator[tuple[Edge, Copy]]:
        """What a stage hands over for a micro-batch, in the order in which both ends start it."""
        direction, stage, micro_batch = sender
        start, stop = self._micro_batches[micro_batch]
        for edge, copies in self._boundary.copies(stop - start, direction):
            if (edge.source if direction == "forward" else edge.target) == stage and self._boundary.replica.is_local(edge) == local:
                for copy in copies:
                    yield edge, copy

    def _piece(self, place: Place, values: Mapping[str, torch.Tensor], copy: Copy) -> torch.Tensor:
        value = values[copy.tensor].detach()
        if copy.start is None or copy.stop is None:
            return value
        low = self._rows_of(copy.tensor, place)[0]
        return rows_slice(value, self._axes[copy.tensor], copy.start - low, copy.stop - low)

    def _shape(self, place: Place, copy: Copy) -> tuple[int, ...]:
        spec = self._model.by_name[copy.tensor].outputs[0]
        if copy.start is None or copy.stop is None:
            low, high = self._rows_of(copy.tensor, place)
            return self._narrowed(spec.shape_at(high - low), place, copy.tensor)
        return self._narrowed(piece_shape(spec, self._axes[copy.tensor], copy.stop - copy.start), place, copy.tensor)

    def _narrowed(self, shape: tuple[int, ...], place: Place, tensor: str) -> tuple[int, ...]:
        return self._boundary.narrowed(shape, place[1], tensor, self._position)

    def _buffer(self, place: Place, copy: Copy) -> torch.Tensor:
        dtype = getattr(torch, self._model.by_name[copy.tensor].outputs[0].dtype)
        return torch.empty(self._shape(place, copy), dtype=dtype, device=self._channels.wire_device)

    def _assemble(self, place: Place, tensor: str, parcels: Sequence[Parcel]) -> torch.Tensor:
        low, high = self._rows_of(tensor, place)
        first = parcels[0].copy
        if len(parcels) == 1 and (first.start is None or (first.start, first.stop) == (low, high)):
            return parcels[0].wire.to(self._device)
        adds = place[0] == "backward"
        spec = self._model.by_name[tensor].outputs[0]
        axis = self._axes.get(tensor) if first.start is not None else None
        shape = self._narrowed(piece_shape(spec, axis, high - low), place, tensor)
        make = torch.zeros if adds else torch.empty
        value = make(shape, dtype=parcels[0].wire.dtype, device=self._device)
        for parcel in parcels:
            piece = parcel.wire.to(self._device)
            if axis is None or parcel.copy.start is None:
                value.add_(piece)
            else:
                write_rows(value, axis, parcel.copy.start - low, piece, add=adds)
        return value


def _receiving(sender: Place, edge: Edge) -> Place:
    direction, _, micro_batch = sender
    return direction, edge.target if direction == "forward" else edge.source, micro_batch


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Booleans travel as bytes: not every backend knows them."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _name(place: Place, verb: str) -> str:
    return f"{place[1]}{verb}_{'F' if place[0] == 'forward' else 'B'}{place[2]}"
