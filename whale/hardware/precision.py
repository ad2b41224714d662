"""The dtype that ops compute in on the devices of a cluster, from ``precision.dtype``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from whale.config import Config
from whale.errors import ConfigError, first_few
from whale.hardware.catalogue import CPU
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.precision import HALF, Precision

HALVES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}  # the settings that cast, and their dtypes
FULL = "float32"
BY_DEVICE = "half"
WORTHWHILE = 0.5  # of float16's rate, below which a device that is measured in bfloat16 only emulates it, and is said not to have it


def compute_type(config: Config, cluster: Cluster) -> Precision | None:
    """The dtype to which autocast casts; None for the dtypes of the model. Raises ConfigError: a device lacks the requested one.

    Where each device has its own, it is the one that stands for all in a graph.
    """
    asked = config.precision.dtype
    by_name = () if isinstance(asked, str) else asked
    setting = asked if isinstance(asked, str) else next((each for _, each in asked if each != FULL), FULL)
    patterns = tuple((pattern, each == FULL) for pattern, each in by_name)
    if setting == BY_DEVICE:
        of_devices(cluster.devices)
        return Precision(HALF, patterns, by_device=True)
    dtype = _half(setting, cluster)
    return None if dtype is None else Precision(dtype, patterns)


def half_type(device: Device) -> str | None:
    """The half-precision dtype of a device with ``precision.dtype: half``: bfloat16, else float16; None if it has neither."""
    return next((dtype for dtype in HALVES.values() if device.model == CPU or _has(device, dtype)), None)


def of_devices(devices: Iterable[Device]) -> tuple[str, ...]:
    """The half-precision dtype of each device. Raises ConfigError: one has none."""
    found = [(device, half_type(device)) for device in devices]
    if lacking := [device for device, dtype in found if dtype is None]:
        names = first_few([f"{device.name} ({device.model})" for device in lacking])
        have = "; ".join(dict.fromkeys(f"{device.model} has {', '.join(dict(device.flops))}" for device in lacking))
        raise ConfigError(
            f"precision.dtype: half finds neither bfloat16 nor float16 on {names}: {have}",
            hint="leave these devices out (cluster.devices); where they have one, state its speed in the cluster file (flops: "
            "{float16: ...}); or precision.dtype: float32",
        )
    return tuple(dtype for _, dtype in found if dtype is not None)


def half_types(graph: ModelGraph, cluster: Cluster, devices: Iterable[str]) -> tuple[str, ...]:
    """The half-precision dtypes of the devices of a plan, by rank; empty where the graph's types are those of all devices.

    Raises ConfigError: a device has none.
    """
    return of_devices(cluster.by_name[name] for name in devices) if graph.half_by_device else ()


def _has(device: Device, dtype: str, worthwhile: float = WORTHWHILE) -> bool:
    """Whether a device has a half-precision dtype, and at this part of float16's rate at least."""
    rates = {each: device.reached_flops(each) for each, _ in device.flops}
    return dtype in rates and rates[dtype] >= worthwhile * rates.get("float16", 0.0)


def _half(asked: str, cluster: Cluster) -> str | None:
    accelerators = [device for device in cluster.devices if device.model != CPU]
    least = WORTHWHILE if asked == "auto" else 0.0  # what is asked for by name runs, however slowly
    lacking = {setting: [device for device in accelerators if not _has(device, dtype, least)] for setting, dtype in HALVES.items()}
    if asked == "auto":
        found = [dtype for setting, dtype in HALVES.items() if not lacking[setting] and len(accelerators) == len(cluster.devices)]
        return found[0] if found else None
    if asked not in HALVES:
        return None
    if lacking[asked]:
        devices = first_few([f"{device.name} ({device.model})" for device in lacking[asked]])
        other = next((setting for setting in HALVES if setting != asked and not lacking[setting]), "float32")
        raise ConfigError(
            f"precision.dtype: {asked} is not supported by {devices}",
            hint=f"precision.dtype: {other}, which all devices have; half, with which each has its own; or leave these devices out "
            "(cluster.devices)",
        )
    return HALVES[asked]
