"""The order of imports: a part imports only parts on lower lines, nothing makes a cycle, and planning needs no torch."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "whale"

# Highest first. Parts on one line never import one another.
LINES = (
    ("cli", "integrations"),
    ("api", "workloads"),
    ("search", "report", "dry_run"),
    ("capture", "planning", "runtime", "measure"),
    ("estimate",),
    ("schedules",),
    ("sharding", "deferred"),
    ("axes", "hardware"),
    ("comm",),
    ("config",),
    ("ir",),
    ("errors", "progress", "units"),
)
HEIGHT = {part: len(LINES) - number for number, line in enumerate(LINES) for part in line}
# Inside the largest parts, highest first: the rooms of one line never import one another; the files beside them stand on top.
ROOMS = {
    "planning": (
        ("realizing", "retarget", "simulation", "whole"),
        ("plan",),
        ("written",),
        ("explain", "verify"),
        ("replicas",),
        ("cutting",),
        ("shard",),
        ("pipeline",),
        ("strategy",),
        ("pricing", "annotations"),
        ("structure", "collecting"),
    ),
    "estimate": (
        ("step",),
        ("prices", "events"),
        ("memory",),
        ("costs",),
    ),
    "runtime": (
        ("training",),
        ("runtime",),
        ("checkpoint", "recording", "weights"),
        ("execute",),
        ("state",),
        ("program",),
    ),
}
WITHOUT_TORCH = (
    *("errors", "progress", "units", "ir", "config", "axes", "hardware"),
    *("sharding", "schedules", "estimate", "planning", "report", "search"),
)
WITH_DISTRIBUTED = ("comm", "runtime", "measure", "cli", "api", "integrations")

FILES = sorted(PACKAGE.rglob("*.py"))
OF_THE_PACKAGE = {"__init__", "__main__"}  # the face of the package: names every part, lazily


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # none of the many nodes is garbage: looking for some takes longer than parsing
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def statements(block: ast.AST) -> Iterator[ast.stmt]:
    """Every statement in it, however deep: by far fewer than there are expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(block, field, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from statements(inner)


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, and the line."""
    found = []
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found.append((node.module or "", node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]  # `from whale import ir` imports whale.ir
    return found


def check_files(faults: Callable[[Path], Iterator[str]]) -> None:
    """Fails with what is wrong in any file of the package, all at once."""
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in FILES for fault in faults(path)]
    assert not found, "\n".join(found)


def parts_imported(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        words = name.split(".")
        if words[0] == "whale" and len(words) > 1 and words[1] in HEIGHT:
            yield words[1], line


def imports_upwards(path: Path) -> Iterator[str]:
    part = part_of(path)
    if part in OF_THE_PACKAGE:
        return
    if part not in HEIGHT:
        yield f" {part} has no line in the order of imports"
        return
    for other, line in parts_imported(path):
        if other != part and HEIGHT[other] >= HEIGHT[part]:
            yield f"{line}: {part} may not import {other}"


def test_imports_go_downwards() -> None:
    check_files(imports_upwards)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[1].removesuffix(".py")


def imports_of_upper_rooms(path: Path) -> Iterator[str]:
    part = part_of(path)
    if part not in ROOMS or room_of(path) in OF_THE_PACKAGE:
        return
    room = room_of(path)
    height = {name: -number for number, line in enumerate(ROOMS[part]) for name in line}
    if room not in height:
        yield f" {part}/{room} has no line in the order of its rooms"
        return
    for name, line in imports(path):
        words = name.split(".")
        is_room = words[:2] == ["whale", part] and len(words) > 2 and words[2] in height and words[2] != room
        if is_room and height[words[2]] >= height[room]:
            yield f"{line}: {part}/{room} may not import {part}/{words[2]}"


def test_rooms_import_downwards() -> None:
    check_files(imports_of_upper_rooms)


def imports_of_torch(path: Path) -> Iterator[str]:
    part = part_of(path)
    for name, line in imports(path):
        if part in WITHOUT_TORCH and name.split(".")[0] == "torch":
            yield f"{line}: {part} may not import torch"
        if part not in WITH_DISTRIBUTED and name.startswith("torch.distributed"):
            yield f"{line}: {part} may not know torch.distributed"
        if part not in ("measure", *OF_THE_PACKAGE) and name == "pynvml":
            yield f"{line}: only measure knows pynvml"


def test_torch_stays_where_it_belongs() -> None:
    check_files(imports_of_torch)


def imports_of_torchs_tests(path: Path) -> Iterator[str]:
    for node in tree_of(path).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
        if any(name.startswith("torch.testing") for name in names):
            yield f"{node.lineno}: torch.testing is imported where it is needed alone: it registers what tests need"


def test_torchs_tests_are_not_loaded_with_the_package() -> None:
    check_files(imports_of_torchs_tests)


def modules() -> dict[str, Path]:
    names = {}
    for path in FILES:
        words = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return names


def test_no_cycles() -> None:
    """At run time: imports under TYPE_CHECKING and inside functions close none."""
    known = modules()
    reads = {name: top_level_imports(path, known) - {name} for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for other in sorted(reads[name]):
            visit(other, (*trail, name))
        done.add(name)

    for name in known:
        visit(name, ())


def top_level_imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names
            if not names <= set(known):  # `from package import file` needs the file, not the package's face
                found.add(node.module)
    return found & set(known)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_planning_leaves_torch_out() -> None:
    statement = "import whale, whale.planning, whale.estimate, whale.cli.command; whale.Config; whale.WhaleError"
    assert "torch" not in loaded_by(statement)


def test_every_public_name_is_there() -> None:
    import whale

    for name in whale.__all__:
        assert getattr(whale, name) is not None
    assert set(whale.__all__) <= set(dir(whale))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = whale.nothing_like_it


def long_or_silent(path: Path) -> Iterator[str]:
    if not ast.get_docstring(tree_of(path)):
        yield " begins with no docstring"
    for node in statements(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 80:
                yield f"{node.lineno}: {node.name} has {length} lines"


def test_functions_stay_short_and_files_say_what_they_are() -> None:
    check_files(long_or_silent)


def test_no_folder_holds_more_than_twenty_files() -> None:
    numbers = Counter(str(file.parent.relative_to(ROOT)) for file in FILES)
    assert {folder: number for folder, number in numbers.items() if number > 20} == {}
