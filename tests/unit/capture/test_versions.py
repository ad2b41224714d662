"""The versions of torch that are taken, and what is said of others."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
import torch

from whale.capture.versions import TESTED, check_version
from whale.errors import CaptureError


def test_this_one_is_tested() -> None:
    check_version(torch.__version__)


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0", "2.130.0", "3.0.0a0"])
def test_others_are_named(version: str) -> None:
    with pytest.raises(CaptureError, match=f"tested with .*this is {version}"):
        check_version(version)


def test_what_is_installed_is_what_was_tested() -> None:
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[3] / "setup.cfg")
    required = [line for line in settings["options"]["install_requires"].split() if line.startswith("torch")]
    newest = int(TESTED[-1].split(".")[1])
    assert required == [f"torch>={TESTED[0]},<2.{newest + 1}"]
