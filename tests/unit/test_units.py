"""Quantities as people write them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.units import format_bytes, format_count, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("32 GiB", "B", 32 * 2**30),
        ("1.5GB", "B", 1.5e9),
        ("3 kB", "B", 3e3),
        ("7", "B", 7),
        (7, "B", 7),
        ("8 Gbit", "B", 1e9),
        ("25 Gbit/s", "B/s", 25e9 / 8),
        ("900 GB/s", "B/s", 900e9),
        ("1 MiB/s", "B/s", 2**20),
        ("15.7 TFLOP/s", "FLOP/s", 15.7e12),
        ("2e3 GFLOP/s", "FLOP/s", 2e12),
        ("5 us", "s", 5e-6),
        ("2 ms", "s", 2e-3),
        ("3 ns", "s", 3e-9),
        (" 4 s ", "s", 4),
        (0.25, "s", 0.25),
    ],
)
def test_reads(text: str | float, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("", "B"), ("GiB", "B"), ("32 GiB/s", "B"), ("32 GB", "B/s"), ("3 QB", "B"), ("-3 GB", "B"), ("1.2.3 GB", "B"), ("5 minutes", "s"),
        ("5 us", "B"), ("3 TFLOP", "FLOP/s"), ("3 Tbit/s", "FLOP/s"), (True, "B"), ("32 GiB more", "B"), ("nan", "B"),
    ],
)  # fmt: skip
def test_refuses(text: str | float, unit: str) -> None:
    with pytest.raises(ValueError):
        parse_quantity(text, unit)


@given(st.text(), st.sampled_from(["B", "B/s", "FLOP/s", "s"]))
def test_any_text_is_a_quantity_or_a_value_error(text: str, unit: str) -> None:
    with suppress(ValueError):
        assert parse_quantity(text, unit) >= 0


@given(st.integers(0, 2**60))
def test_bytes_are_printed_so_that_they_can_be_read(num_bytes: int) -> None:
    assert parse_quantity(format_bytes(num_bytes), "B") == pytest.approx(num_bytes, rel=0.006)


@given(st.floats(1e-6, 1e6))
def test_seconds_are_printed_so_that_they_can_be_read(seconds: float) -> None:
    assert parse_quantity(format_seconds(seconds), "s") == pytest.approx(seconds, rel=0.006)


def test_prints() -> None:
    assert format_bytes(1610612736) == "1.50 GiB"
    assert format_bytes(-2048) == "-2.00 KiB"
    assert format_bytes(12) == "12 B"
    assert format_bytes(5 * 2**50) == "5120.00 TiB"
    assert format_seconds(0.00123) == "1.23 ms"
    assert format_seconds(1234.5) == "1234 s"
    assert format_seconds(0) == format_seconds(6.94e-18) == format_seconds(-1e-17) == "0 us"
    assert format_seconds(6.94e-10) == "0.000694 us"
    assert format_count(1500000) == "1.5M"
    assert format_count(12) == "12"
