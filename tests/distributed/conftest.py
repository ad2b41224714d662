"""The ranks that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four Gloo ranks; a run may ask for another number."""
    with World(4) as ranks:
        yield ranks
