"""Measured figures: medians, quartiles, and the warning about those that scatter."""

from __future__ import annotations

import pytest

from whale.ir.figure import NAMED, Figure, noise


def test_a_figure_is_the_median_with_its_quartiles() -> None:
    figure = Figure.of("host cpu: memory", "B/s", [4e9, 1e9, 2e9, 3e9, 100e9])
    assert (figure.value, figure.low, figure.high, figure.num_samples) == (3e9, 2e9, 4e9, 5)
    assert str(figure) == "host cpu: memory: 3 GB/s (quartiles 2 GB/s to 4 GB/s of 5 samples)"


def test_one_measurement_has_no_spread() -> None:
    figure = Figure.of("x", "s", [2.0])
    assert figure.spread == 0.0 and str(figure) == "x: 2 s (1 sample)"


def test_a_measurement_that_takes_no_time_cannot_be() -> None:
    with pytest.raises(AssertionError):
        Figure.of("x", "s", [0.0])


def test_the_warning_names_the_worst() -> None:
    figures = [Figure(f"f{number}", "s", 1.0, 1.0, 1.0 + number / 10, 9) for number in range(8)]
    said = noise(figures)
    assert [name for name in ("f7", "f6", "f5", "f4") if f"{name}: " in said] == ["f7", "f6", "f5"][:NAMED]
    assert "and 2 more" in said
    assert noise(figures[:2]) == ""
