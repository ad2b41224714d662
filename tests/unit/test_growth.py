"""The picture of how searches grow (examples/benchmarks/growth.py): each of its lines changes one size alone."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import growth
from searching import MIDDLE, growing


def measured() -> dict[str, dict[str, float]]:
    """Figures made by hand: the k-th case took k seconds and k plans."""
    return {case.name: {"cpu_seconds": float(number), "num_planned": number} for number, case in enumerate(growth.growth(), start=1)}


def test_each_line_changes_one_size_alone() -> None:
    told, middle = measured(), growth.sizes_of(growing(*MIDDLE))
    points = [growth.point(case, told[case.name]) for case in growth.growth()]
    drawn = set()
    for axis in range(len(growth.AXES)):
        line = growth.along(points, axis)
        assert len(line) > 2 and middle in [each.sizes for each in line]
        assert all(one.sizes[axis] < other.sizes[axis] for one, other in pairwise(line))
        drawn.update(line)
    assert drawn == set(points), "every case that is measured is on a line"


def test_the_picture_has_the_plans_of_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (figures := tmp_path / "growth.json").write_text(json.dumps(measured()))
    picture = tmp_path / "growth.svg"
    monkeypatch.setattr(sys, "argv", ["growth.py", str(figures), str(picture)])
    growth.main()
    text = picture.read_text()
    assert all(f">{each['num_planned']}</text>" in text for each in measured().values()) and "CPU seconds of the search" in text
