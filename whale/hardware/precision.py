"""The dtype that ops compute in on the devices of a cluster, from ``precision.dtype``."""

from __future__ import annotations

from collections.abc import Mapping

from whale.config import Config
from whale.errors import ConfigError, first_few
from whale.hardware.catalogue import CPU
from whale.ir.cluster import Cluster
from whale.ir.precision import Precision

HALVES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}  # the settings that cast, and their dtypes
FULL = "float32"


def compute_type(config: Config, cluster: Cluster) -> Precision | None:
    """The dtype to which autocast casts; None for the dtypes of the model. Raises ConfigError: a device lacks the requested one."""
    asked = config.precision.dtype
    by_name = () if isinstance(asked, str) else asked
    dtype = _half(asked if isinstance(asked, str) else next((each for _, each in asked if each != FULL), FULL), cluster)
    return None if dtype is None else Precision(dtype, tuple((pattern, each == FULL) for pattern, each in by_name))


def _half(asked: str, cluster: Cluster) -> str | None:
    accelerators = [device for device in cluster.devices if device.model != CPU]
    lacking = {setting: [device for device in accelerators if dtype not in dict(device.flops)] for setting, dtype in HALVES.items()}
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
            hint=f"precision.dtype: {other}, which all devices have; or leave these devices out (cluster.devices)",
        )
    return HALVES[asked]
