"""Short tracebacks: an error that the user can mend shows the user's own frames; ``WHALE_DEBUG=1`` shows all, and the causes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from whale.errors import WhaleError

P = ParamSpec("P")
T = TypeVar("T")

DEBUG_VARIABLE = "WHALE_DEBUG"


def in_short(function: Callable[P, T]) -> Callable[P, T]:
    """Cuts the frames below a function that users call from what it raises as a `WhaleError`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except WhaleError as error:
            if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
                raise
            raise error.with_traceback(None) from None

    return call
