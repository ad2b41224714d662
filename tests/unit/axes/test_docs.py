"""The page about axes lists the operators that have a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.axes.operators import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "axes.md"
OMITTED = {"Factories", "Pointwise"}
START, END = "<!-- table -->\n", "<!-- end of table -->"


def render() -> str:
    """The table in Markdown: a row for each family that the page does not describe in a word."""
    lines = ["| family | operators |", "|---|---|"]
    for family, entries in FAMILIES.items():
        if family in OMITTED:
            continue
        names = sorted({name.partition(".")[0] for known, entry in entries.items() if entry.axes is not None for name in known.split()})
        lines.append(f"| {family} | {', '.join(f'`{name}`' for name in names if not name.startswith('_'))} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_the_table(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(START)
    listed, _, after = rest.partition(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + START + render() + END + after)
    else:
        assert listed == render()
