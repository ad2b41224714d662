"""Fixtures and options that all tiers share: golden texts, and how many examples of each law are tried."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import whale
from tests import counts
from tests.examples import PROFILES

for name, count in PROFILES.items():
    # A busy machine is no fault of the code.
    settings.register_profile(name, max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale")

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    """The quick tier tries fewer examples of each law; ``--hypothesis-profile`` says otherwise.

    Hypothesis draws constants of the modules that are loaded: with a seed all of them are, so that examples do not depend on earlier tests.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):  # it runs no test itself, and workers wait for it
        return
    if counts.VARIABLE in os.environ:
        from tests import captures

        captures.count_all()
    if config.getoption("markexpr") == "not slow" and config.getoption("hypothesis_profile") is None:
        settings.load_profile("quick")
    if config.getoption("hypothesis_seed") is not None:
        for module in pkgutil.walk_packages(whale.__path__, "whale."):
            if not module.name.endswith("__main__") and not module.name.startswith("whale.integrations."):  # which need other libraries
                importlib.import_module(module.name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays until the end: the collector of garbage need not look at it again and again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts with what the code prints now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with ``tests/golden/NAME``, or writes it there under ``--update-golden``."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n")
        assert path.exists(), f"no golden text {name}; write it with --update-golden"
        assert text.rstrip("\n") + "\n" == path.read_text()

    return compare
