"""The GPUs of this host in words: clocks, and what joins them, as NVML tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from os import environ
from typing import Any

from whale.measure.gpus import in_nvml, name_of, visible

NVLINKS = 18
"""As many links as a GPU may have."""
ANCESTORS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "the link between processors",
}
"""What is passed between two GPUs without NVLink, by NVML's levels of topology."""


def gpu_notes(environment: Mapping[str, str] = environ) -> tuple[str, ...]:
    """A line for each visible GPU, and for each two of them that have no NVLink; none where there is no NVML."""
    with in_nvml() as nvml:
        return () if nvml is None else tuple(_notes(nvml, visible(nvml, environment)))


def _notes(nvml: Any, handles: list[Any]) -> Iterator[str]:
    linked = [_num_nvlinks(nvml, handle) for handle in handles]
    for index, handle in enumerate(handles):
        links = f"{linked[index]} NVLinks" if linked[index] else "no NVLink"
        yield f"GPU {index}, {name_of(nvml, handle)}: " + ", ".join([links, *_asked(nvml, _pcie, handle), *_asked(nvml, _clock, handle)])
    for first, second in combinations(range(len(handles)), 2):
        if not (linked[first] and linked[second]):
            way = _asked(nvml, _way, handles[first], handles[second]) or ["what the driver does not tell"]
            yield f"GPU {first} - GPU {second}: through {way[0]}"


def _num_nvlinks(nvml: Any, handle: Any) -> int:
    return sum(state for link in range(NVLINKS) for state in _asked(nvml, _nvlink, handle, link))


def _nvlink(nvml: Any, handle: Any, link: int) -> int:
    return int(nvml.nvmlDeviceGetNvLinkState(handle, link))


def _pcie(nvml: Any, handle: Any) -> str:
    return f"PCIe {nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}"


def _clock(nvml: Any, handle: Any) -> str:
    kind = nvml.NVML_CLOCK_SM
    return f"{nvml.nvmlDeviceGetClockInfo(handle, kind)} of {nvml.nvmlDeviceGetMaxClockInfo(handle, kind)} MHz"


def _way(nvml: Any, first: Any, second: Any) -> str:
    return ANCESTORS[nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)]


def _asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The answer; none where the driver, or this model of GPU, has none."""
    try:
        return [question(nvml, *arguments)]
    except (nvml.NVMLError, KeyError):
        return []
