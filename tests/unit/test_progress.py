"""Work that goes on for long is told, with the last of what was said of it."""

from __future__ import annotations

import threading

import pytest

import whale.progress
from whale.progress import progress

QUICK = 1e-3
NEVER = 1e6


class Lines:
    """A standard error that can be waited for."""

    def __init__(self) -> None:
        self.text, self.changed = "", threading.Condition()

    def write(self, text: str) -> None:
        with self.changed:
            self.text += text
            self.changed.notify_all()

    def flush(self) -> None:
        pass

    def wait_for(self, text: str) -> bool:
        """Whether that was written within a minute."""
        with self.changed:
            return self.changed.wait_for(lambda: text in self.text, 60)


def listen(monkeypatch: pytest.MonkeyPatch, first_seconds: float) -> Lines:
    """What goes to standard error from here on, if work is told after so long."""
    lines = Lines()
    monkeypatch.setattr("sys.stderr", lines)
    monkeypatch.setattr(whale.progress, "FIRST_SECONDS", first_seconds)
    return lines


@pytest.mark.parametrize("on_first", [True, False])
def test_long_work_is_told_on_one_rank(monkeypatch: pytest.MonkeyPatch, on_first: bool) -> None:
    lines = listen(monkeypatch, QUICK)
    with progress("capturing the model", on_first=on_first):
        assert not on_first or lines.wait_for(" s)\n")
    assert lines.text.startswith("whale: capturing the model (0 s)\n" if on_first else "")
    assert on_first or lines.text == ""


def test_quick_work_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = listen(monkeypatch, NEVER)
    with progress("planning") as tell:
        tell("3 plans")
    assert lines.text == ""


def test_what_was_said_last_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = listen(monkeypatch, QUICK)
    with progress("planning") as tell:
        tell("3 plans")
        tell("4 plans")
        assert lines.wait_for(": 4 plans\n")
