"""Verbs that all ranks call together: one that fails on this rank alone does not leave the others waiting."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from whale.errors import RuntimeFault
from whale.runtime.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="HasRuntime")


class Turn:
    """Whose thread an engine works for.

    Attributes:
        holder: the verb under way, and its thread.
    """

    def __init__(self) -> None:
        self.holder = ""
        self._lock = threading.RLock()

    @contextmanager
    def taken(self, verb: str) -> Iterator[None]:
        """Around a verb.

        Raises:
            RuntimeFault: another thread is inside one.
        """
        own = f"{verb} in thread {threading.current_thread().name}"
        if not self._lock.acquire(blocking=False):
            raise RuntimeFault(
                f"an engine does one thing at a time (called: {own}; under way: {self.holder})",
                hint="call the engine from one thread; others may make batches (a DataLoader's workers, a queue)",
            )
        outer, self.holder = self.holder, own
        try:
            yield
        finally:
            self.holder = outer
            self._lock.release()


class HasRuntime(Protocol):
    """What a plan is at work for."""

    runtime: Runtime
    turn: Turn


def in_company(verb: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Tells the other ranks at once where a verb ends in an error that they know nothing of (`whale.comm.World.in_company`).

    Arguments that the verb does not take are the caller's error before anything has begun: the engine goes on.
    """
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        signature.bind(self, *args, **kwargs)
        with self.turn.taken(verb.__name__), self.runtime.roster.world.in_company():
            return verb(self, *args, **kwargs)

    return call
