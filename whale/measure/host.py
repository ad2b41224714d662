"""What this process may use of its host: memory and cores, within the limits of its container."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def host_memory(cgroup: Path = CGROUP) -> int:
    """Bytes: the host's, or the container's limit if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(cgroup / "memory.max"), _number(cgroup / "memory" / "memory.limit_in_bytes")]
    return min([physical, *(int(limit) for limit in limits if limit)])


def host_cores(cgroup: Path = CGROUP) -> float:
    """Cores that this process may run on, or the container's share of them if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_quotas(cgroup)])


def _quotas(cgroup: Path) -> list[float]:
    words = _text(cgroup / "cpu.max").split()
    pairs = [(words[0], words[1])] if len(words) == 2 else []
    pairs.append((_text(cgroup / "cpu" / "cpu.cfs_quota_us"), _text(cgroup / "cpu" / "cpu.cfs_period_us")))
    return [int(quota) / int(period) for quota, period in pairs if quota.isdecimal() and period.isdecimal() and int(quota) and int(period)]


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
