"""The page about axes names the families of operators."""

from __future__ import annotations

from pathlib import Path

from whale.axes.operators import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "axes.md"


def test_the_page_names_the_families() -> None:
    _, _, listed = PAGE.read_text().partition("## Operators with a rule")
    assert [family for family in FAMILIES if family not in listed] == []
