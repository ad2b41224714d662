"""What files say that their commands print: ``text`` right behind a block of a page, ``Prints:`` in a head; ``...`` is what is left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from tests.pages import FENCE, Block, block_of

LEFT_OUT = "..."
FIRST, NEXT = "# Prints:   ", "#           "
"""How the lines of a head begin that say what is printed."""


@dataclass(frozen=True)
class Quote:
    """Lines of a file that say what something prints.

    Attributes:
        file: where they stand.
        start: how many lines of the file are before them.
        first, others: what the first line of them and the others begin with before what is quoted.
        lines: what is quoted; a line ``...`` stands for any lines, and one that ends with ``...`` for all that begin so.
    """

    file: Path
    start: int
    first: str
    others: str
    lines: tuple[str, ...]

    def check(self, printed: str, *, update: bool) -> None:
        """Compares with what was printed, or writes that into the file."""
        now = renewed(self.lines, printed.rstrip("\n").splitlines())
        if update and now != self.lines:
            lines = self.file.read_text().splitlines()
            margins = itertools.chain([self.first], itertools.repeat(self.others))
            lines[self.start : self.start + len(self.lines)] = [margin + line for margin, line in zip(margins, now, strict=False)]
            self.file.write_text("\n".join(lines) + "\n")
        else:
            assert now == self.lines, f"{self.file}:{self.start + 1} is not what is printed now; write it with --update-golden"


def quotes(page: Path, *languages: str) -> list[tuple[Block, Quote]]:
    """The blocks of a page behind which the text that they print stands, with nothing between."""
    text = page.read_text()
    found = []
    for match, said in itertools.pairwise(FENCE.finditer(text)):
        if match[1] in languages and said[1] == "text" and not text[match.end() : said.start()].strip():
            start = text[: said.start(2)].count("\n")
            found.append((block_of(page, match), Quote(page, start, "", "", tuple(said[2].splitlines()))))
    return found


def head_quote(file: Path) -> Quote:
    """What the head of a strategy's file says that its first command prints."""
    lines = file.read_text().splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(FIRST)), None)
    assert start is not None, f"the head of {file} does not say what its command prints, behind {FIRST.strip()}"
    following = itertools.takewhile(lambda line: line.startswith(NEXT), lines[start + 1 :])
    return Quote(file, start, FIRST, NEXT, (lines[start][len(FIRST) :], *(line[len(NEXT) :] for line in following)))


def renewed(quoted: Sequence[str], printed: Sequence[str]) -> tuple[str, ...]:
    """The quoted lines with what is printed now in their place: the same lines where nothing has changed.

    What stands between two ``...`` is looked for by its first and its last line.
    """
    assert printed, "nothing was printed"
    found: list[str] = []
    place, num_read, is_anchored = 0, 0, True
    for is_left_out, group in itertools.groupby(quoted, lambda line: line.strip() == LEFT_OUT):
        run = list(group)
        num_read += len(run)
        if is_left_out:
            found += run
            is_anchored = False
            continue
        first = place if is_anchored else _most_alike(run[0], printed, place)
        last = len(printed) - 1
        if num_read < len(quoted):  # more is left out behind it
            last = first if len(run) == 1 else _most_alike(run[-1], printed, first + 1)
        found += _shortened(run, printed[first : last + 1])
        place = last + 1
    return tuple(found)


def _shortened(quoted: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    """Printed lines, of each as much as the quoted line in its place has."""
    for old, line in itertools.zip_longest(quoted, printed):
        if line is not None:
            cut = len(old) - len(LEFT_OUT) if old is not None and old.endswith(LEFT_OUT) else None
            yield line.rstrip() if cut is None else line[:cut] + LEFT_OUT


def _most_alike(line: str, printed: Sequence[str], start: int) -> int:
    """The first of the lines from `start` that is most like a line."""
    width = len(line) - len(LEFT_OUT) if line.endswith(LEFT_OUT) else None
    places = range(min(start, len(printed) - 1), len(printed))
    return max(places, key=lambda n: SequenceMatcher(None, line[:width], printed[n][:width].rstrip()).ratio())
