"""The pages of the documentation: their code blocks, and how a reader runs them, one after another."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from whale.cli import inputs
from whale.ir.graph import ModelGraph

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text()):
        if match[1] in languages:
            yield block_of(page, match)


def block_of(page: Path, match: re.Match[str]) -> Block:
    """The block that was found in a page's text."""
    return Block(page, match.string[: match.start(2)].count("\n") + 1, match[1], match[2])


def run_python(page: Path, after: Callable[[Block], None] = lambda block: None) -> None:
    """Runs the Python of a page as one script, in a context of its own; `after` each block something may be done."""
    torch.set_num_threads(1)
    namespace: dict[str, object] = {"__name__": "__main__"}

    def run() -> None:
        for block in blocks(page, "python"):
            # Blank lines before it give the code its line numbers in the page.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
            after(block)

    contextvars.copy_context().run(run)


@cache
def _captured(folder: Path, source: str, pairs: tuple[str, ...], *how: Any) -> ModelGraph:
    assert folder == Path.cwd(), "what a name of a file means depends on it"
    return _capture(source, pairs, *how)


_capture = inputs._graph_of


@contextmanager
def captures_kept() -> Iterator[None]:
    """Inside of it commands that work on the same model of the examples, in the same folder, capture it once."""

    def graph_of(source: str, pairs: Sequence[str], *how: Any) -> ModelGraph:
        if not source.startswith("examples/"):
            return _capture(source, pairs, *how)
        return _captured(Path.cwd(), source, tuple(pairs), *how)

    with mock.patch.object(inputs, "_graph_of", graph_of):
        yield
