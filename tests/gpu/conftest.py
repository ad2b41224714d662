"""The GPU tier: every test here is marked, and runs on a GPU where there is one, else on the stand-in device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu.gpu import Gpu, gpu_or_stand_in


@pytest.fixture(scope="package", autouse=True)
def plans_on_all_ranks() -> Iterator[None]:
    """Each test takes all ranks that it asks for."""
    with mock.patch.dict(os.environ, {"WHALE_PLANNING_SEARCH": "off"}):
        yield


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The device on which whale computes during a test."""
    with gpu_or_stand_in() as device:
        yield device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
