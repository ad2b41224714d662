"""Short tracebacks: an error that the user can mend shows the user's own frames; ``WHALE_DEBUG=1`` shows all, and the causes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from whale.errors import WhaleError, is_debugging

P = ParamSpec("P")
T = TypeVar("T")


def in_short(function: Callable[P, T]) -> Callable[P, T]:
    """Cuts the frames below a function that users call from what it raises as a `WhaleError`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except WhaleError as error:
            if is_debugging():
                raise
            raise error.with_traceback(None) from None

    return call
