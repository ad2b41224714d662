"""Hearing SIGTERM: several listeners of one process, in any order of leaving, and other threads."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from itertools import permutations
from threading import Thread

import pytest

from whale.comm.notice import Notice


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    before = signal.getsignal(signal.SIGTERM)
    yield before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("order", permutations(range(3)))
def test_all_listeners_hear_until_they_leave(order: tuple[int, ...]) -> None:
    notices = [Notice() for _ in order]
    for notice in notices:
        notice.listen()
        notice.listen()
    signal.raise_signal(signal.SIGTERM)
    assert all(notice.has_come for notice in notices)
    for number in order:
        notices[number].leave()
        notices[number].leave()


def test_a_handler_of_the_scripts_own_is_told_once() -> None:
    first, last = Notice(), Notice()
    first.listen()
    last.listen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.check()
        last.check()
    listening = signal.signal(signal.SIGTERM, lambda *_: None)
    with pytest.warns(UserWarning, match=r"SIGTERM is handled by .*lambda.*, set after whale\.parallelize: nothing is saved") as said:
        last.check()
        last.check()
    assert len(said) == 1
    signal.signal(signal.SIGTERM, listening)
    last.leave()
    first.leave()


def test_another_thread_is_warned() -> None:
    thread = Thread(target=Notice().listen, name="aside")
    with pytest.warns(UserWarning, match=r"runtime\.save_on_sigterm has no effect: .* in thread aside, .* main thread"):
        thread.start()
        thread.join()
