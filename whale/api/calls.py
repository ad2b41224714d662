"""Around what users call: errors show the user's frames, inference mode is left, and all ranks are in the same call of an engine."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from whale.errors import RuntimeFault, WhaleError, is_debugging
from whale.runtime.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="HasRuntime")


def user_call(function: Callable[P, T]) -> Callable[P, T]:
    """For a function that users call.

    Errors that the user can fix, and Ctrl-C, show the user's own frames; ``WHALE_DEBUG=1`` shows all, and the causes.
    `torch.inference_mode` is left while the function runs: in that mode optimizers write to weights unseen by autograd.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            if not torch.is_inference_mode_enabled():
                return function(*args, **kwargs)
            with torch.inference_mode(False):
                return function(*args, **kwargs)
        except (WhaleError, KeyboardInterrupt) as error:
            if is_debugging():
                raise
            raise error.with_traceback(None) from None

    return call


class Turn:
    """Which thread is inside an engine; ``holder`` names the method and the thread."""

    def __init__(self) -> None:
        self.holder = ""
        self._lock = threading.RLock()

    @contextmanager
    def taken(self, method: str) -> Iterator[None]:
        """Around a method.

        Raises:
            RuntimeFault: another thread is inside one.
        """
        own = f"{method} in thread {threading.current_thread().name}"
        if not self._lock.acquire(blocking=False):
            raise RuntimeFault(
                f"{own} was called while {self.holder} is running",
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

    def lose_peers(self) -> None:
        """Keeps what this rank holds for ranks that start again, where that is set: its peers are lost."""


def all_ranks(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """For a method that all ranks call together: an error that the others do not know of reaches them at once.

    Arguments that the method does not take are an error before anything has begun: the engine goes on.
    """
    signature, taken = inspect.signature(method), set[tuple[object, ...]]()

    @user_call
    @functools.wraps(method)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        form = len(args), *kwargs  # all that decides whether they fit
        if form not in taken:
            signature.bind(self, *args, **kwargs)
            taken.add(form)
        with self.turn.taken(method.__name__), self.runtime.roster.world.all_ranks():
            try:
                return method(self, *args, **kwargs)
            except RuntimeFault as fault:
                if fault.lost_peers:  # else the fault may be in what this rank holds
                    self.lose_peers()
                raise

    return call
