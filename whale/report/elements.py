"""Small pieces of HTML: escaped text, tables, tiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        caption: what it is a table of.
        columns: headings.
        rows: one text per column each.
        right: the columns that hold numbers.
    """
    number = ' class="number"'
    styles = [number if column in right else "" for column in columns]
    head = "".join(f'<th scope="col"{style}>{escape(column)}</th>' for column, style in zip(columns, styles, strict=True))
    body = "".join(f"<tr>{_cells(row, styles)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _cells(row: Sequence[str], styles: Sequence[str]) -> str:
    first, *others = zip(row, styles, strict=True)
    return f'<th scope="row"{first[1]}>{escape(first[0])}</th>' + "".join(f"<td{style}>{escape(text)}</td>" for text, style in others)


def tile(name: str, value: str, note: str = "") -> str:
    """One figure with its name."""
    below = f'<dd class="note">{escape(note)}</dd>' if note else ""
    return f'<div class="tile"><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>{below}</div>\n'


def section(name: str, heading: str, body: str) -> str:
    """A part of the page under a heading.

    Args:
        name: its id.
        body: HTML.
    """
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n{body}</section>\n'


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>\n"
