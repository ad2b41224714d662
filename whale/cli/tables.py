"""Prints values as tables of at most 80 columns, or as many as the terminal has, and everything else as lines that are not folded."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PAGE_WIDTH = 80
"""Columns of text where there is no terminal to ask."""
_PIPE_WIDTH = 200


def make_console() -> Console:
    """A console on standard output; where that is no terminal, lines are wide, so that drawings in files and pipes are whole."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> None:
    """Prints a table; text is folded inside its column, numbers and headings never; ``right`` are columns of numbers."""
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    numbers = frozenset(right)
    for column in columns:
        is_number = column in numbers
        table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*row)
    print(title)
    console.print(table, width=page_width(), markup=False)


def page_width() -> int:
    return make_console().width if sys.stdout.isatty() else PAGE_WIDTH


def paragraph(start: str, text: str) -> Iterator[str]:
    """A text that is folded to the page behind what it starts with, such as its name in a list."""
    yield from textwrap.wrap(start + text, page_width(), subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False)
