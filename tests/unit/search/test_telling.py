"""What a search says while it takes long."""

from __future__ import annotations

import pytest

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.search import search
from whale.search.telling import told_if_long


def test_lines_come_after_a_second_and_then_each_time_after_twice_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((10.0, 10.5, 11.25, 11.5, 15.0, 17.0, 18.5))
    tell = told_if_long(lambda: next(times))
    for number in range(6):
        tell(f"{number} plans")
    assert capsys.readouterr().err.splitlines() == [
        "whale: still searching, for 1 s: 1 plans",
        "whale: still searching, for 5 s: 3 plans",
        "whale: still searching, for 8 s: 5 plans",
    ]


def test_a_search_tells_what_it_has_seen() -> None:
    told = list[str]()
    found = search(layers([64] * 4), made([[(1e9, GIB), (3e9, GIB)]], network=1e9), Config(), rows=8, tell=told.append)
    assert told[0].startswith(f"1 plans of {found.num_arrangements} arrangements estimated, the best so far: ")
    assert told[-1].startswith(f"{found.num_planned} plans of ") and str(found.arrangement) in told[-1]
