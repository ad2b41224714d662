"""The ranks that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four Gloo ranks; a run may use the first few of them."""
    with World(4) as ranks:
        yield ranks
