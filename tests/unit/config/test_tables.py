"""The reference page holds the tables that the declarations give."""

from __future__ import annotations

from pathlib import Path

from whale.config.config import epl_table, key_table

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def test_the_reference_is_up_to_date() -> None:
    text = PAGE.read_text()
    for table in (key_table(), epl_table()):
        for row in table.splitlines():
            assert row in text, f"docs/reference/config.md lacks {row}; see whale.config.config"
