"""The Python of the pages runs on two ranks as it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.world import World
from tests.pages import PAGES, ROOT, blocks, run_python

CODE = [page for page in PAGES if any(blocks(page, "python"))]


def run_in(rank: int, num_ranks: int, folder: str, page: str) -> None:
    os.chdir(folder)
    torch.manual_seed(rank)  # as in processes of their own: what a page draws without a seed differs
    run_python(Path(page))


@pytest.mark.parametrize("page", CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs_on_two_ranks(page: Path, world: World, tmp_path: Path) -> None:
    for folder in ("examples", "strategies"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    world.run(run_in, str(tmp_path), str(page), num_ranks=2)
