"""The documentation holds: its Python runs, its commands parse and plan, its files and links are there."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.pages import FENCE, PAGES, ROOT, Block, blocks, captures_kept, run_python
from tests.printed import quotes
from whale.cli import main
from whale.cli.against import kind_of
from whale.cli.command import make_parser
from whale.cli.launch import make_parser as make_run_parser
from whale.config import load_config, read_plan
from whale.hardware import load_cluster

LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
CHEAP = ("advise", "capture", "doctor", "plan", "schedule", "simulate")


def commands(page: Path) -> Iterator[tuple[Block, list[str]]]:
    """The commands of a page's shell blocks, as words, comments and continuation lines resolved."""
    for block in blocks(page, "bash", "console", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield block, words


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def furnish(folder: Path) -> Path:
    """An empty folder with the repository's data and examples in it, so that nothing is written beside them."""
    for name in ("examples", "strategies"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def place_of_commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages: a capture has the places of its ops."""
    return furnish(tmp_path_factory.mktemp("workplace"))


class Printed:
    """What the blocks of a page have printed, beside what the page says of it."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *, update: bool) -> None:
        self._capsys, self._update = capsys, update
        self._texts: dict[Block, str] = {}

    def take(self, block: Block) -> str:
        """Takes what was printed since the last time for a block's."""
        text = self._capsys.readouterr().out
        self._texts[block] = self._texts.get(block, "") + text
        return text

    def check(self, page: Path, language: str) -> None:
        """Compares the texts of the page, from the last on: writing one anew moves those behind it."""
        for block, quote in reversed(quotes(page, language)):
            if block in self._texts:
                quote.check(self._texts[block], update=self._update)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Printed:
    return Printed(capsys, update=request.config.getoption("--update-golden"))


RUN = [pytest.param(p, marks=[] if p.name == "README.md" else pytest.mark.slow) for p in PAGES if any(blocks(p, "python"))]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_python_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    monkeypatch.chdir(furnish(tmp_path))
    run_python(page, printed.take)
    printed.check(page, "python")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse_and_their_files_exist(page: Path) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block, words in commands(page):
        where = f"{name_of(page)}:{block.line}: {shlex.join(words)}"
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), where
        if words[:2] == ["whale", "run"]:
            make_run_parser().parse_args(words[2:])
        elif words[0] == "whale":
            make_parser().parse_args(words[1:])
        for word in words:
            path = word.partition(":")[0]
            if re.match(r"(examples|strategies|whale|tests|\.ci)/", path):
                assert (ROOT / path).exists(), where


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(w[:1] == ["whale"] for _, w in commands(p))], ids=name_of)
def test_planning_commands_print_what_the_page_says(
    page: Path, place_of_commands: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.chdir(place_of_commands)
    torch.set_num_threads(1)
    missing: set[str] = set()  # what commands make that take ranks or minutes, and are not run here
    quoted = {block for block, _ in quotes(page, "bash")}
    for block, words in commands(page):
        if block.language != "bash" or words[0] != "whale":
            continue
        if words[1] not in CHEAP or "--largest" in words:
            missing |= {file for word, file in itertools.pairwise(words) if word == "--output"}
        elif missing.isdisjoint(words):
            short = {} if block in quoted else {"WHALE_PLANNING_EFFORT": "2"}  # what nobody quotes may be any plan
            with captures_kept(), mock.patch.dict(os.environ, short):
                assert main(words[1:]) == 0, f"{name_of(page)}:{block.line}: {shlex.join(words)}"
            assert printed.take(block) or "--output" in words
    printed.check(page, "bash")


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page, "yaml")], ids=lambda block: f"{name_of(block.page)}:{block.line}"
)
def test_yaml_is_read(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(block.text)
    readers = {"cluster": load_cluster, "plan": read_plan, "recipe": lambda path: load_config(path, environment={})}
    readers[kind_of(str(file))](file)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
