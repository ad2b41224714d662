"""The GPU tier: every test here is marked, and skipped where there is no CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def plans_on_all_ranks() -> Iterator[None]:
    """Each test takes all ranks that it asks for."""
    with mock.patch.dict(os.environ, {"WHALE_PLANNING_SEARCH": "off"}):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
