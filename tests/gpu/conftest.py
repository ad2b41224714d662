"""The GPU tier: every test here is marked, and skipped where there is no CUDA device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ["WHALE_PLANNING_SEARCH"] = "off"  # each test takes all ranks that it asks for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
