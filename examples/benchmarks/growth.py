"""Draws how the search grows with devices, layers and kinds, from what `searching.py --growth` measured.

    python examples/benchmarks/searching.py --growth --json growth.json
    python examples/benchmarks/growth.py growth.json docs/images/search_growth.svg

It needs matplotlib: ``pip install -e ".[figures]"``. The three pictures share their middle case: 96 devices of three kinds, 24 layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from searching import MIDDLE, Case, growing, growth

from whale.hardware import parse_cluster

AXES = ("devices", "layers", "kinds")
"""What grows, each alone."""


@dataclass(frozen=True)
class Point:
    """A case by what grows, and what its search took.

    Attributes:
        sizes: devices, layers and kinds of devices.
        cpu_seconds: of the search.
        num_planned: plans that were made.
    """

    sizes: tuple[int, int, int]
    cpu_seconds: float
    num_planned: int


def sizes_of(case: Case) -> tuple[int, int, int]:
    cluster = parse_cluster(f"hosts: {case.hosts}\nnetwork: {case.network}")
    return len(cluster.devices), case.model.layers, len({device.kind for device in cluster.devices})


def point(case: Case, measured: Mapping[str, object]) -> Point:
    return Point(sizes_of(case), float(str(measured["cpu_seconds"])), int(str(measured["num_planned"])))


def along(points: list[Point], axis: int) -> list[Point]:
    """Those that differ from the middle case in nothing else, the smallest first."""
    middle = sizes_of(growing(*MIDDLE))
    found = (each for each in points if all(each.sizes[other] == middle[other] for other in range(len(AXES)) if other != axis))
    return sorted(found, key=lambda each: each.sizes[axis])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, metavar="JSON", help="what `searching.py --growth --json` wrote")
    parser.add_argument("picture", type=Path, metavar="SVG", help="where to draw")
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "whale", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    measured = json.loads(options.measured.read_text())
    points = [point(case, measured[case.name]) for case in growth()]
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, (panel, what) in enumerate(zip(panels, AXES, strict=True)):
        drawn = along(points, axis)
        sizes = [each.sizes[axis] for each in drawn]
        panel.plot(sizes, [each.cpu_seconds for each in drawn], "o-", color="#1f6feb")
        for size, each in zip(sizes, drawn, strict=True):
            panel.annotate(
                f"{each.num_planned}", (size, each.cpu_seconds), xytext=(0, 6), textcoords="offset points", ha="center", color="#666666"
            )
        if what != "kinds":
            panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_xlabel(what)
        panel.margins(x=0.1)
        panel.grid(alpha=0.3)
    panels[0].set_ylim(0, 1.2 * max(each.cpu_seconds for each in points))
    panels[0].set_ylabel("CPU seconds of the search")
    figure.suptitle("One search, one core; beside each point the plans that were made", fontsize=9)
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
