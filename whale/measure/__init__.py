"""The devices of this machine: GPUs by NVML, otherwise the host's cores and memory."""

from whale.measure.devices import devices_at_hand, rank_profiles

__all__ = ["devices_at_hand", "rank_profiles"]
