"""The table of parts in tests/golden/architecture.md: every room of the package, its size, and what it imports."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_layers import FILES, HEIGHT, OF_THE_PACKAGE, PACKAGE, ROOMS, imports

PAGE = Path(__file__).parents[1] / "golden" / "architecture.md"
HEAD = "| part | modules | lines | imports |\n|---|---|---|---|\n"


@cache
def room(path: Path) -> str:
    """The room that a file is in: its part, or in the largest parts the folder (or file) there."""
    words = path.relative_to(PACKAGE).with_suffix("").parts
    if words[0] in ROOMS and len(words) > 1 and words[1] not in OF_THE_PACKAGE:
        return f"{words[0]}/{words[1]}"
    return words[0]


def rooms() -> list[str]:
    """Highest first."""
    found = {room(path) for path in FILES} - OF_THE_PACKAGE
    return sorted(found, key=lambda name: (-HEIGHT[name.split("/")[0]], name))


@cache
def imported(name: str) -> list[str]:
    """The other rooms that a room imports, of its own part by the room, of others by the part."""
    found = []
    part = name.split("/")[0]
    for path in FILES:
        if room(path) != name:
            continue
        for module, _ in imports(path):
            words = module.split(".")
            if words[0] != "whale" or len(words) < 2 or words[1] not in HEIGHT:
                continue
            other = f"{part}/{words[2]}" if words[1] == part and part in ROOMS and len(words) > 2 else words[1]
            if other not in (name, part) and (other.split("/")[0] != part or other in ALL):
                found.append(other)
    return found


ALL = frozenset(rooms())


def row(name: str) -> tuple[str, int, int, str]:
    own = [path for path in FILES if room(path) == name]
    others = sorted(set(imported(name)), key=lambda other: (-HEIGHT[other.split("/")[0]], other))
    return name, len(own), sum(len(path.read_text().splitlines()) for path in own), ", ".join(others)


def table() -> str:
    lines = []
    for name in rooms():
        _, modules, count, others = row(name)
        lines.append(f"| {name} | {modules} | {round(count, -2) or 100} | {others} |\n")
    return HEAD + "".join(lines)


def written() -> str:
    text = PAGE.read_text()
    return text[text.index(HEAD) :]


def test_the_table_is_true(request: pytest.FixtureRequest) -> None:
    """Rooms and imports to the letter; sizes to a tenth, so that not every change of code is one of the page."""
    if request.config.getoption("--update-golden"):
        PAGE.write_text(PAGE.read_text().replace(written(), table()))
    rows = [tuple(cell.strip() for cell in line.strip("|\n").split("|")) for line in written().splitlines()[2:]]
    assert [cells[0] for cells in rows] == rooms()
    for name, modules, lines, others in rows:
        _, true_modules, true_lines, true_others = row(name)
        assert others == true_others, f"{name} imports {true_others}; the table says {others} (pytest --update-golden writes it)"
        assert int(modules) == true_modules, f"{name} has {true_modules} modules; the table says {modules}"
        assert abs(int(lines) - true_lines) <= max(100, true_lines // 10), f"{name} has {true_lines} lines; the table says {lines}"


def test_no_part_imports_what_stands_beside_or_above_it() -> None:
    for name in rooms():
        for other in imported(name):
            assert HEIGHT[other.split("/")[0]] < HEIGHT[name.split("/")[0]] or other.split("/")[0] == name.split("/")[0], (name, other)
