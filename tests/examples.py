"""With how many examples each tier tries a law.

Where an example is dear the law names its own number, for the thorough tier; the others try as much less of it as of all laws.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
PROFILES = {"quick": 6, "whale": 12, "thorough": 100}
"""Examples of a law that names no number: while editing, in `make test` and `.ci/run`, and in `make laws`."""
FEWEST = 2


def slow(*values: Any, id: str | None = None) -> Any:
    """Values of a parametrized law that the quick tier leaves out, for others stay."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def further(values: Iterable[T]) -> tuple[T, ...]:
    """Values of a parametrized law that only the thorough tier tries, for others say the same in small."""
    return tuple(values) if settings().max_examples >= PROFILES["thorough"] else ()


def at_most(count: int, fewest: int = FEWEST, **more: Any) -> settings:
    """For a law of which the thorough tier tries so many examples, and any tier `fewest`; `more` are other settings of hypothesis."""
    share = settings().max_examples / PROFILES["thorough"]
    return settings(max_examples=max(min(count, fewest), round(count * share)), **more)
