"""The files of ``strategies/``: they load, say what they are, and name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whale.config import load_config
from whale.hardware import load_cluster

ROOT = Path(__file__).parents[3] / "strategies"
CLUSTERS = sorted((ROOT / "clusters").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_clusters_load(path: Path) -> None:
    assert load_cluster(path).devices


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_load(path: Path) -> None:
    config = load_config(path, environment={})
    assert config.explicit
    if config.cluster.file is not None:
        assert load_cluster(config.cluster.file).devices


@pytest.mark.parametrize("path", CLUSTERS + RECIPES, ids=lambda path: path.name)
def test_headers_say_what_when_how_and_what_to_expect(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    words = [match[1] for line in header if (match := re.match(r"# (\w+): ", line))]
    assert [word for word in words if word != "Prints"] == ["What", "When", "Command", "Expected"]
    for file in re.findall(r"[\w./]+\.(?:yaml|py)\b", "\n".join(header)):
        assert (ROOT.parent / file).exists() or (path.parent / file).exists(), file
