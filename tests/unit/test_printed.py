"""Quoted output: what is left out is not compared, all else is, and it is written anew where it stood."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.printed import Quote, head_quote, quotes, renewed

PRINTED = ("plan: 5 ms", "stage 0: a", "stage 1: b", "idle: c", "end")


@pytest.mark.parametrize(
    "quoted",
    [PRINTED, ("plan: 5 ms", "..."), ("...", "stage 1: b", "idle: c", "..."), ("  ...", "end"), ("plan...", "...", "idle: c", "end")],
)
def test_what_is_printed_may_be_shortened(quoted: tuple[str, ...]) -> None:
    assert renewed(quoted, PRINTED) == quoted


@pytest.mark.parametrize(
    ("quoted", "now"),
    [
        (("plan: 4 ms", "..."), ("plan: 5 ms", "...")),
        (("plan: 5 ms", "stage 0: a", "idle: c", "..."), ("plan: 5 ms", "stage 0: a", "stage 1: b", "idle: c", "...")),
        (PRINTED[:3], PRINTED),
        (("...", "stage 1: x"), ("...", *PRINTED[2:])),
        (("plum...", "..."), ("plan...", "...")),
    ],
)
def test_what_has_changed_is_renewed(quoted: tuple[str, ...], now: tuple[str, ...]) -> None:
    assert renewed(quoted, PRINTED) == now


def test_a_quote_is_written_where_it_stood(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nwhale\n```\n\n```text\none\n...\n```\n\n```bash\nwhale\n```\n\nprose\n\n```text\nother\n```\n")
    [(block, quote)] = quotes(page, "bash")
    assert (block.line, quote) == (2, Quote(page, 5, "", "", ("one", "...")))
    with pytest.raises(AssertionError, match=r"page\.md:6 is not what is printed now"):
        quote.check("two\nthree\n", update=False)
    quote.check("two\nthree\n", update=True)
    assert page.read_text().startswith("```bash\nwhale\n```\n\n```text\ntwo\n...\n```\n")


def test_a_head_says_what_its_command_prints(tmp_path: Path) -> None:
    file = tmp_path / "head.yaml"
    file.write_text("# What:     it\n# Command:  whale\n# Prints:   one\n#           two\n# Expected: good\nkey: 1\n")
    quote = head_quote(file)
    quote.check("one\ntwo\n", update=False)
    quote.check("one\nthree\n", update=True)
    assert file.read_text() == "# What:     it\n# Command:  whale\n# Prints:   one\n#           three\n# Expected: good\nkey: 1\n"
