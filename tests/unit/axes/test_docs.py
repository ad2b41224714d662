"""The page about axes lists the table of rules as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.axes.law import Law
from tests.unit.axes.test_rules_alone import CASES
from whale.axes.operators import FAMILIES, Rule, operator_of

PAGE = Path(__file__).parents[3] / "docs" / "axes.md"
START, END = "<!-- table -->\n", "<!-- end of table -->"


def render() -> str:
    """The table in Markdown; operators that share a rule share a row."""
    lines = []
    for family, entries in FAMILIES.items():
        lines += [f"### {family}", "", "| operator | rule |", "|---|---|"]
        shared: dict[Rule, list[str]] = {}
        for known, entry in entries.items():
            if entry.axes is not None:
                shared.setdefault(entry.axes, []).extend(known.split())
        lines += [f"| {', '.join(f'`{name}`' for name in names)} | {_rule(rule, names)} |" for rule, names in shared.items()]
        lines.append("")
    return "\n".join(lines)


def _rule(rule: Rule, names: list[str]) -> str:
    """Its notation, or that of one call of it; the first sentence about it where it is code."""
    if isinstance(rule, str):
        return f"`{rule}`"
    for case in CASES:
        if case.target in names or case.target.split(".")[0] in names:
            law = Law(case)
            written = rule(law.op, law.reading) if operator_of(law.op).axes is rule else None
            if isinstance(written, str):
                return f"`{written}`"
    return (rule.__doc__ or "").partition("\n")[0].replace("``", "`")


def test_the_page_lists_the_table(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(START)
    listed, _, after = rest.partition(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + START + render() + END + after)
    else:
        assert listed == render()
