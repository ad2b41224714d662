"""Prints values as tables on a terminal, and as lines of full width elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 200


def make_console() -> Console:
    """A console on standard output; one that is no terminal gets wide lines, so that files and pipes are not wrapped."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> Table:
    """A table of text.

    Args:
        title: printed above it.
        columns: headings.
        rows: one text per column each.
        right: the columns that hold numbers.
    """
    table = Table(title=title, title_justify="left")
    numbers = frozenset(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
