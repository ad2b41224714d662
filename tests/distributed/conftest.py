"""The ranks that all tests share, and the rule by which they plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="package", autouse=True)
def plans_on_all_ranks() -> Iterator[None]:
    """What is tested is that plans on several ranks are exact; for models this small the fastest plan has few of them."""
    with mock.patch.dict(os.environ, {"WHALE_PLANNING_SEARCH": "off"}):
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four Gloo ranks; a run may ask for another number."""
    with World(4) as ranks:
        yield ranks
