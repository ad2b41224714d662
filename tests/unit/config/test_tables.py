"""The reference page holds the tables that the declarations give."""

from __future__ import annotations

from pathlib import Path

from whale.config.config import key_table
from whale.config.sections import EPL_KEYS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def test_the_reference_is_up_to_date() -> None:
    text = PAGE.read_text()
    for row in key_table().splitlines():
        assert row in text, f"docs/reference/config.md lacks {row}; see whale.config.config"
    _, _, epl = text.partition("## Keys of EPL")
    for entry in EPL_KEYS:
        assert (f"`{entry.name}`" in epl) == entry.carries, f"docs/reference/config.md, keys of EPL: {entry.name}"
