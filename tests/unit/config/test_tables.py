"""The reference page holds the tables that the declarations give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from whale.config import Config, parse_yaml
from whale.config.config import key_table
from whale.config.elsewhere import FOREIGN_KEYS, System, foreign_table
from whale.config.sections import EPL_KEYS, SECTIONS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "reference" / "config.md"


def test_the_reference_is_up_to_date() -> None:
    text = PAGE.read_text()
    for row in key_table().splitlines():
        assert row in text, f"docs/reference/config.md lacks {row}; see whale.config.config"
    _, _, epl = text.partition("## Keys of EPL")
    for entry in EPL_KEYS:
        assert (f"`{entry.name}`" in epl) == entry.carries, f"docs/reference/config.md, keys of EPL: {entry.name}"


@pytest.mark.parametrize("system", get_args(System))
def test_the_tables_of_other_systems_are_up_to_date(system: System) -> None:
    text = (DOCS / "coming_from.md").read_text()
    for row in foreign_table(system):
        assert row in text, f"docs/coming_from.md lacks {row}; see whale.config.elsewhere"


SETTING = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?:: ([^`]+))?`")


def test_settings_that_pages_and_tables_name_are_taken() -> None:
    texts = {f"{key.system}, {key.name}": key.note for key in FOREIGN_KEYS} | {str(page): page.read_text() for page in DOCS.rglob("*.md")}
    named = [(place, *found) for place, text in texts.items() for found in SETTING.findall(text)]
    assert len(named) > 200
    foreign = {entry.name for entry in EPL_KEYS} | {key.name for key in FOREIGN_KEYS}
    for place, name, value in named:
        if name in foreign or name.endswith((".json", ".yaml")):
            continue
        assert name in dict(Config().items()), f"{place}: {name}"
        if value:
            Config({name: parse_yaml(value, place).data})


def test_the_plan_of_megatrons_flags_is_the_file_that_its_command_names() -> None:
    plan = (DOCS.parent / "strategies" / "plans" / "megatron.yaml").read_text()
    own = "".join(line for line in plan.splitlines(keepends=True) if not line.startswith("#"))
    assert f"```yaml\n{own}```" in (DOCS / "coming_from.md").read_text()
