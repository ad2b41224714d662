"""Measured times of ops, piecewise linear in the rows, which replace computed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from whale.errors import ConfigError
from whale.estimate.costs.line import Floats, Line
from whale.estimate.costs.op_table import is_free
from whale.ir.cluster import NO_HANDLING, Cluster, Device
from whale.ir.figure import Figure
from whale.ir.graph import ModelGraph
from whale.ir.profile import KindProfile, OpTimes, Profile, model_fingerprint, signature
from whale.units import format_count


@dataclass(frozen=True, eq=False)
class KindTimes:
    """Times on one device type."""

    rows: Floats  # numbers of rows, ascending
    forward: Floats  # seconds, ``[ops, rows]``; NaN where not measured
    backward: Floats  # the same
    apart: Floats = field(default_factory=lambda: np.zeros(0))  # by rows, extra seconds with deferred weight gradients


@dataclass(frozen=True, eq=False)
class Measured:
    """The times of a graph's ops, by device type."""

    kinds: Mapping[Device, KindTimes]

    def lines(self, device: Device, ops: NDArray[np.int64], shares: Floats, num_rows: float, *, backward: bool) -> tuple[Floats, Floats]:
        """Seconds per op as ``fixed + per_row x rows`` about a number of rows; NaN where not measured.

        Args:
            ops: their positions in the graph.
            shares: of each op that is computed; a part takes as long as the whole op with that share of the rows.
        """
        known = self.kinds[device.kind]
        fixed, per_row = _lines(known.rows, (known.backward if backward else known.forward)[ops], num_rows * shares)
        return fixed * device.slowdown, per_row * shares * device.slowdown

    def apart(self, device: Device, num_rows: float) -> Line | None:
        """Extra seconds of the whole graph with deferred weight gradients, about a number of rows; None where not measured."""
        known = self.kinds[device.kind]
        if not len(known.apart):
            return None
        (fixed,), (per_row,) = _lines(known.rows, known.apart[None], np.array([num_rows]))
        return Line(float(fixed), float(per_row)) * device.slowdown


def _lines(rows: Floats, seconds: Floats, at: Floats) -> tuple[Floats, Floats]:
    """The piece of each op's curve at a number of rows; the outermost pieces extend, and none decreases."""
    if len(rows) == 1:
        return np.zeros_like(at), np.broadcast_to(seconds[:, 0] / rows[0], at.shape)
    piece = np.clip(np.searchsorted(rows, at) - 1, 0, len(rows) - 2)
    every = np.arange(at.shape[-1])
    low, high = seconds[every, piece], seconds[every, piece + 1]
    slope = np.maximum(high - low, 0.0) / (rows[piece + 1] - rows[piece])
    value = np.maximum(low + slope * (at - rows[piece]), 0.0)
    return np.maximum(value - slope * at, 0.0), np.minimum(slope, value / np.maximum(at, 1e-9))


def measured(profile: Profile, graph: ModelGraph, cluster: Cluster, *, fused: bool = False) -> Measured:
    """The times that a profile has for a graph's ops on the devices of a cluster.

    Args:
        fused: whether a compiler puts several ops into one kernel: the times of these, measured one by one, do not count then.

    Raises:
        ConfigError: the profile is of another model, or lacks a device of the cluster.
    """
    found = model_fingerprint(graph)
    if profile.model != found:
        raise ConfigError(
            f"the profile was measured on another model (profile: {profile.model}, this model: {found})",
            hint="the model, its sizes or its loss have changed: whale profile measures it again",
        )
    kinds = {device.kind: device.name for device in cluster.devices}
    exact = {kind.device.kind: kind for kind in profile.kinds}
    alike = {_speed(kind): own for kind, own in exact.items()}
    times, joined = dict[Device, KindTimes](), _joined(graph) if fused else frozenset[str]()
    for kind, name in kinds.items():
        own = exact.get(kind) or alike.get(_speed(kind))
        if own is None:
            raise ConfigError(
                f"the profile has no times for device {name} ({_told(kind)}); it was measured on {', '.join(map(_told, exact))}",
                hint="whale profile ... --cluster with this cluster file, on that machine, adds it",
            )
        times[kind] = _times(own, graph, joined)
    return Measured(times)


def _speed(kind: Device) -> Device:
    """The device type without what does not change op times: memory, handling of messages, slowdown."""
    return replace(kind, memory=0, handling=NO_HANDLING, slowdown=1.0)


def _told(kind: Device) -> str:
    return f"{kind.model} with {format_count(kind.peak_flops('float32'))}FLOP/s and {format_count(kind.bandwidth)}B/s"


def _joined(graph: ModelGraph) -> frozenset[str]:
    """The ops that a compiler puts into a kernel with others."""
    from whale.estimate.costs.fusion import fused  # needed here alone

    kernels = fused(graph).of
    sizes = Counter(kernels.values())
    return frozenset(name for name, number in kernels.items() if sizes[number] > 1)


def _times(profile: KindProfile, graph: ModelGraph, joined: Collection[str]) -> KindTimes:
    priced = np.array([not is_free(op) for op in graph.ops])
    trained = priced & np.array([op.requires_grad for op in graph.ops])
    unknown, known = OpTimes(""), profile.by_signature
    found = [unknown if op.name in joined else known.get(signature(op, graph), unknown) for op in graph.ops]
    nothing = (np.nan,) * len(profile.rows)
    forward, backward = (
        np.array([times or nothing for times in each]) for each in zip(*((op.forward, op.backward) for op in found), strict=True)
    )
    return KindTimes(
        np.array(profile.rows, dtype=np.float64),
        _adding_up(forward, priced, profile.forward),
        _adding_up(backward, trained, profile.backward),
        np.array(profile.apart),
    )


def _adding_up(seconds: Floats, counted: NDArray[np.bool_], passes: Sequence[Figure]) -> Floats:
    """Scales the times of ops to the measured time of the whole pass, which includes what lies between ops.

    Unchanged where the pass, or an op that counts, was not measured.
    """
    if not passes or np.isnan(seconds[counted]).any():
        return seconds
    scaled: Floats = seconds * (np.array([each.value for each in passes]) / seconds[counted].sum(axis=0))
    return scaled
