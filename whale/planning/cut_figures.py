"""What cutting each kind of axes costs and saves on the devices of a split group: seconds and bytes of one micro-batch.

For a kind k of alike axes, n units of it on a device, and the ops that meet it:

    not cut      the ops run whole on every device
    cut          arithmetic falls to n / size, traffic by what has the axis; results of contracted uses are reduced
                 forward, gradients of whole tensors that enter are reduced backward, once per tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whale.cost import Line, all_reduce_line, op_seconds, spec_line
from whale.cost.op_table import Floats, OpTable, is_free
from whale.ir.cluster import Device
from whale.ir.graph import Op
from whale.planning.cut_space import CutSpace, Scene
from whale.planning.pricing import Pricing, device_kind

GRID = 33
"""Times by units are computed at this many points and lie on lines between them."""


@dataclass(frozen=True)
class KindFigures:
    """What one kind of axes costs, all its axes together.

    Attributes:
        size: units of each of its axes.
        count: how many axes.
        whole: per position, seconds of its ops run whole.
        cut: per position, the same by units held, 0 to `size`.
        leaving: seconds of reducing the results of its contracted uses.
        num_bytes: of parameters and kept activations that are divided, for one device if whole.
    """

    size: int
    count: int
    whole: tuple[float, ...]
    cut: tuple[Floats, ...]
    leaving: float
    num_bytes: float


@dataclass(frozen=True)
class Figures:
    """What may be cut in a stage, priced.

    Attributes:
        kinds: per kind of the cut space.
        entering: per set of kinds (indices), seconds of reducing the gradients of the tensors that only these make enter.
        whole: seconds of the stage if nothing is cut, on the slowest position.
        num_bytes: of one device, if nothing is cut.
        capacity: bytes, per position.
    """

    kinds: tuple[KindFigures, ...]
    entering: tuple[tuple[tuple[int, ...], float], ...]
    whole: float
    num_bytes: float
    capacity: tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """Where a stage runs.

    Attributes:
        groups: the devices of each split group.
        num_rows: rows of a micro-batch that a group takes.
        in_flight: micro-batches whose activations are held.
        num_micro_batch: micro-batches of a step.
    """

    groups: tuple[tuple[str, ...], ...]
    num_rows: float
    in_flight: int
    num_micro_batch: int

    @property
    def width(self) -> int:
        return len(self.groups[0])


def price_cuts(scene: Scene, space: CutSpace, pricing: Pricing, site: Site, num_bytes: Line) -> Figures:
    """Prices what may be cut.

    Args:
        num_bytes: what one device holds if nothing is cut, by rows.
    """
    devices = _distinct_devices(pricing, site)
    total = [_whole_seconds(pricing, device, scene.ops, site.num_rows) for each in devices for device in each]
    return Figures(
        kinds=tuple(_price_kind(scene, kind, pricing, site, devices) for kind in space.kinds),
        entering=tuple(_entering(scene, space, pricing, site).items()),
        whole=max(total),
        num_bytes=num_bytes.at(site.num_rows),
        capacity=tuple(min(pricing.capacity(group[position]) for group in site.groups) for position in range(site.width)),
    )


def communication(scene: Scene, axes: frozenset[str], pricing: Pricing, site: Site) -> tuple[Line, Line]:
    """Seconds of reductions inside the split groups for one micro-batch with these axes cut, forward and backward, by rows."""
    forward = Line.sum(_made_whole(scene, op, axis, pricing, site) for axis in sorted(axes) for op in scene.members[axis])
    entering = {name for axis in sorted(axes) for op in scene.members[axis] for name in _entered(scene, op, axis, pricing)}
    return forward, Line.sum(_enter(pricing, name, site) for name in sorted(entering))


def _distinct_devices(pricing: Pricing, site: Site) -> tuple[tuple[Device, ...], ...]:
    """Per position, its devices in the groups, equal ones once."""
    return tuple(
        tuple(
            {
                device_kind(pricing.cluster.by_name[group[position]]): pricing.cluster.by_name[group[position]] for group in site.groups
            }.values()
        )
        for position in range(site.width)
    )


def _whole_seconds(pricing: Pricing, device: Device, ops: Iterable[str], num_rows: float) -> float:
    seconds = pricing.seconds(device, num_rows)
    index = np.array([pricing.table.position[name] for name in ops], dtype=np.int64)
    fixed = seconds.forward_fixed[index] + seconds.backward_fixed[index]
    return float((fixed + num_rows * (seconds.forward_per_row[index] + seconds.backward_per_row[index])).sum())


def _price_kind(scene: Scene, kind: Sequence[str], pricing: Pricing, site: Site, devices: Sequence[Sequence[Device]]) -> KindFigures:
    axis, count = kind[0], len(kind)
    size = scene.axes.by_name[axis].size
    members = scene.members[axis]
    names = [op.name for op in members]
    table = _Entries(scene, axis, pricing)
    curves = {device_kind(device): count * table.seconds(device, site.num_rows, size) for each in devices for device in each}
    wholes = {device_kind(device): count * _whole_seconds(pricing, device, names, site.num_rows) for each in devices for device in each}
    return KindFigures(
        size=size,
        count=count,
        whole=tuple(max(wholes[device_kind(device)] for device in each) for each in devices),
        cut=tuple(np.max([curves[device_kind(device)] for device in each], axis=0) for each in devices),
        leaving=count * Line.sum(_made_whole(scene, op, axis, pricing, site) for op in members).at(site.num_rows),
        num_bytes=count * _divided_bytes(scene, axis, pricing, site),
    )


class _Entries:
    """The ops that meet one axis, as a table whose work can be scaled to a part of the axis."""

    def __init__(self, scene: Scene, axis: str, pricing: Pricing) -> None:
        ops = [op for op in scene.members[axis] if not is_free(op)]
        index = np.array([pricing.table.position[op.name] for op in ops], dtype=np.int64)
        self._training = pricing.training
        self._table = _rows_of(pricing.table, index)
        lines = [_cut_traffic(scene, axis, op) for op in ops]
        self._cut_fixed = np.minimum(np.array([line.fixed for line in lines]), self._table.bytes_fixed)
        self._cut_per_row = np.minimum(np.array([line.per_row for line in lines]), self._table.bytes_per_row)

    def seconds(self, device: Device, num_rows: float, size: int) -> Floats:
        """Time of all these ops by units held, 0 to `size`."""
        shares = np.linspace(0.0, 1.0, min(GRID, size + 1))
        times = np.array([self._at(device, num_rows, float(share)) for share in shares])
        result: Floats = np.maximum.accumulate(np.interp(np.arange(size + 1) / size, shares, times))
        return result

    def _at(self, device: Device, num_rows: float, share: float) -> float:
        seconds = op_seconds(_scaled(self._table, share, self._cut_fixed, self._cut_per_row), device, num_rows)
        forward = seconds.forward_fixed + num_rows * seconds.forward_per_row
        backward = seconds.backward_fixed + num_rows * seconds.backward_per_row
        return float(forward.sum() + (backward.sum() if self._training else 0.0))


def _rows_of(table: OpTable, index: NDArray[np.int64]) -> OpTable:
    columns = ("dtype", "launches", "trains", "flops_fixed", "flops_per_row", "backward_flops_fixed", "backward_flops_per_row")
    return replace(table, **{name: getattr(table, name)[index] for name in (*columns, "bytes_fixed", "bytes_per_row")})


def _scaled(table: OpTable, share: float, cut_fixed: Floats, cut_per_row: Floats) -> OpTable:
    return replace(
        table,
        flops_fixed=table.flops_fixed * share,
        flops_per_row=table.flops_per_row * share,
        backward_flops_fixed=table.backward_flops_fixed * share,
        backward_flops_per_row=table.backward_flops_per_row * share,
        bytes_fixed=table.bytes_fixed - (1 - share) * cut_fixed,
        bytes_per_row=table.bytes_per_row - (1 - share) * cut_per_row,
    )


def _cut_traffic(scene: Scene, axis: str, op: Op) -> Line:
    """Bytes of what an op reads and writes that has the axis."""
    names = (op.name, *(name for name in op.inputs if scene.graph.by_name[name].outputs))
    specs = (spec for name in names if axis in scene.axes_in(name) for spec in scene.graph.by_name[name].outputs)
    return Line.sum(spec_line(spec, scene.graph.num_rows) for spec in specs)


def _made_whole(scene: Scene, op: Op, axis: str, pricing: Pricing, site: Site) -> Line:
    """Seconds of making an op's results whole: it contracts the axis, or they have it and are handed on."""
    payload = Line.sum(spec_line(spec, scene.graph.num_rows) for spec in op.outputs)
    if axis in scene.axes_in(op.name):
        returned = op.name in scene.handed_on or op.name in scene.graph.outputs
        return _reduce(pricing, site, payload, 1) * 0.5 if returned else Line()  # gathering is half of reducing
    role = scene.axes.ops[op.name].roles[axis]
    if role.kind != "contracted":
        return Line()
    if role.combine != "softmax":
        return _reduce(pricing, site, payload, 1)
    source = scene.graph.by_name[op.inputs[0]].outputs[0]  # the largest; then the sum and the target's logit together
    return _reduce(pricing, site, spec_line(source, scene.graph.num_rows) * (3 / scene.axes.by_name[axis].size), 2)


def _entering(scene: Scene, space: CutSpace, pricing: Pricing, site: Site) -> dict[tuple[int, ...], float]:
    """Seconds of the entrances, by the kinds that need them."""
    kind_of = {axis: index for index, kind in enumerate(space.kinds) for axis in kind}
    users: dict[str, set[int]] = {}
    for axis, kind in kind_of.items():
        for op in scene.members[axis]:
            for name in _entered(scene, op, axis, pricing):
                users.setdefault(name, set()).add(kind)
    found: dict[tuple[int, ...], float] = {}
    for name, kinds in users.items():
        key = tuple(sorted(kinds))
        found[key] = found.get(key, 0.0) + _enter(pricing, name, site).at(site.num_rows)
    return found


def _entered(scene: Scene, op: Op, axis: str, pricing: Pricing) -> Iterator[str]:
    """Whole tensors with a gradient that an op reads beside its parts; what is added after a contraction does not enter.

    A tensor received from another stage is whole, whether or not it has the axis.
    """
    if not pricing.training or not op.requires_grad:
        return
    contracted = scene.axes.ops[op.name].roles[axis].kind == "contracted"
    for name in op.inputs:
        source = scene.graph.by_name[name]
        is_part = axis in scene.axes_in(name) and name not in scene.received
        if source.requires_grad and source.outputs and not is_part and not (contracted and source.kind == "parameter"):
            yield name


def _enter(pricing: Pricing, name: str, site: Site) -> Line:
    op = pricing.graph.by_name[name]
    payload = Line.sum(spec_line(spec, pricing.graph.num_rows) for spec in op.outputs)
    line = _reduce(pricing, site, payload, 1)
    return line * (1 / site.num_micro_batch) if op.kind == "parameter" else line


def _reduce(pricing: Pricing, site: Site, payload: Line, num_messages: int) -> Line:
    lines = (all_reduce_line(pricing.cluster, group, payload, num_messages) for group in site.groups)
    return max(lines, key=lambda line: line.at(site.num_rows))


def _divided_bytes(scene: Scene, axis: str, pricing: Pricing, site: Site) -> float:
    held: dict[str, None] = {}
    kept: dict[str, None] = {}
    for op in scene.members[axis]:
        for name in op.inputs:
            source = scene.graph.by_name[name]
            if source.kind in ("parameter", "buffer") and axis in scene.axes_in(name):
                held[scene.graph.parameter_by_name[source.target].name] = None
        kept |= dict.fromkeys(name for name in pricing.kept.get(op.name, ()) if axis in scene.axes_in(name))
    activations = Line.sum(spec_line(spec, scene.graph.num_rows) for name in kept for spec in scene.graph.by_name[name].outputs)
    return sum(pricing.parameter_bytes(name) for name in held) + site.in_flight * activations.at(site.num_rows)
