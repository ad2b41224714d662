"""Measured times of a model on its devices: seconds of each distinct op, and of the whole forward and backward pass."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from whale.errors import ConfigError
from whale.ir.cluster import Device
from whale.ir.figure import Figure, noise
from whale.ir.graph import Argument, ModelGraph, Op, Ref
from whale.ir.serialization import read_value


def signature(op: Op, graph: ModelGraph) -> str:
    """What determines the time of an op: its operator, its arguments with tensors as their shapes, and which of those have a gradient."""
    arguments = [_described(argument, graph) for argument in op.args] + [f"{key}={_described(value, graph)}" for key, value in op.kwargs]
    made = ", ".join(map(str, op.outputs)) or "int"
    return graph.comparable(f"{op.target}({', '.join(arguments)}) -> {made}{' with gradient' if op.requires_grad else ''}")


def _described(argument: Argument, graph: ModelGraph) -> str:
    if isinstance(argument, Ref):
        source = graph.by_name[argument.op]
        specs = ", ".join(map(str, source.outputs)) or "int"
        return f"{specs}{' with gradient' if source.requires_grad else ''}"
    if isinstance(argument, tuple):
        return f"[{', '.join(_described(item, graph) for item in argument)}]"
    return str(argument)


def model_fingerprint(graph: ModelGraph) -> str:
    """Equal for graphs that run the same ops on the same shapes, whatever the scopes and the rows of the example."""
    lines = "\n".join(signature(op, graph) for op in graph.ops)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds of one distinct op."""

    signature: str
    forward: tuple[float, ...] = ()  # per number of rows of the profile
    backward: tuple[float, ...] = ()  # the same; empty without a gradient
    spread: float = 0.0  # the largest distance of quartiles among them, as a share of the median
    reason: str = ""  # why it could not be measured; "" if it was


@dataclass(frozen=True)
class KindProfile:
    """Measurements on one kind of device."""

    device: Device  # the kind, as the cluster describes it
    machine: str  # the device's own name
    torch: str  # version
    rows: tuple[int, ...]  # numbers of rows, ascending
    ops: tuple[OpTimes, ...]  # each distinct op
    forward: tuple[Figure, ...] = ()  # the whole model's pass on one device, per number of rows; empty if it does not fit
    backward: tuple[Figure, ...] = ()  # the same; also empty if the noise was larger
    apart: tuple[float, ...] = ()  # extra seconds if weight gradients wait, per number of rows; empty if none can, or it was not measured

    @cached_property
    def by_signature(self) -> dict[str, OpTimes]:
        return {op.signature: op for op in self.ops}


@dataclass(frozen=True)
class Profile:
    """Measurements of a model (by `model_fingerprint`) per kind of device."""

    model: str
    kinds: tuple[KindProfile, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        lost = ", ".join(kind.machine for kind in self.kinds if kind.forward and not kind.backward)
        lost_pass = (
            f"the time of the backward pass is within noise ({lost}), so its ops keep their single times: measure again" if lost else ""
        )
        return tuple(filter(None, [noise(figure for kind in self.kinds for figure in (*kind.forward, *kind.backward)), lost_pass]))


def read_profile(path: str | Path) -> Profile:
    """A profile from the file that `whale profile` wrote. Raises ConfigError: it cannot be read, or holds no profile."""
    try:
        return read_value(Profile, path)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}", hint="whale profile ... --output FILE writes one") from None
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise ConfigError(f"{path} is not a profile: {error}", hint="whale profile ... --output FILE writes one") from None
