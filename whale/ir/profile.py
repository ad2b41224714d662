"""What was measured of a model on its devices: seconds of each distinct op, and of the whole forward and backward pass."""

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
    """What decides how long an op takes: its operator, its arguments with tensors as their shapes, and which of those have a gradient."""
    arguments = [_told(argument, graph) for argument in op.args] + [f"{key}={_told(value, graph)}" for key, value in op.kwargs]
    made = ", ".join(map(str, op.outputs)) or "int"
    return f"{op.target}({', '.join(arguments)}) -> {made}{' with gradient' if op.requires_grad else ''}"


def _told(argument: Argument, graph: ModelGraph) -> str:
    if isinstance(argument, Ref):
        source = graph.by_name[argument.op]
        specs = ", ".join(map(str, source.outputs)) or "int"
        return f"{specs}{' with gradient' if source.requires_grad else ''}"
    if isinstance(argument, tuple):
        return f"[{', '.join(_told(item, graph) for item in argument)}]"
    return str(argument)


def model_fingerprint(graph: ModelGraph) -> str:
    """Equal for graphs that run the same ops on the same shapes, whatever the scopes and the rows of the example."""
    lines = "\n".join(signature(op, graph) for op in graph.ops)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds of one distinct op.

    Attributes:
        signature: which op it is.
        forward, backward: per number of rows of the profile; of an op without a gradient, backward is empty.
        spread: the largest distance of quartiles among them, as a share of the median.
        reason: why it could not be measured; "" where it was.
    """

    signature: str
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    spread: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class KindProfile:
    """What was measured on one kind of device.

    Attributes:
        device: the kind, as the cluster describes it.
        machine: what the device calls itself.
        torch: the version that ran.
        rows: numbers of rows, ascending.
        ops: each distinct op.
        forward, backward: the whole model's passes on one device, per number of rows; empty where it does not fit there. The backward
            pass is empty, too, where the noise was larger than it.
        apart: by which the passes take longer where weight gradients wait, per number of rows; empty where none can, or nobody measured it.
    """

    device: Device
    machine: str
    torch: str
    rows: tuple[int, ...]
    ops: tuple[OpTimes, ...]
    forward: tuple[Figure, ...] = ()
    backward: tuple[Figure, ...] = ()
    apart: tuple[float, ...] = ()

    @cached_property
    def by_signature(self) -> dict[str, OpTimes]:
        """The ops to look up."""
        return {op.signature: op for op in self.ops}


@dataclass(frozen=True)
class Profile:
    """What was measured of a model.

    Attributes:
        model: `model_fingerprint` of its graph.
        kinds: per kind of device.
    """

    model: str
    kinds: tuple[KindProfile, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What who plans with these times should know."""
        lost = ", ".join(kind.machine for kind in self.kinds if kind.forward and not kind.backward)
        untold = f"the backward pass was lost in noise ({lost}), and its ops keep the times of each alone: measure again" if lost else ""
        return tuple(filter(None, [noise(figure for kind in self.kinds for figure in (*kind.forward, *kind.backward)), untold]))


def read_profile(path: str | Path) -> Profile:
    """A profile from the file that `whale profile` wrote.

    Raises:
        ConfigError: the file cannot be read, or holds no profile.
    """
    try:
        return read_value(Profile, path)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}", hint="whale profile ... --output FILE writes one") from None
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise ConfigError(f"{path} is not a profile: {error}", hint="whale profile ... --output FILE writes one") from None
