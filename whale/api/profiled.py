"""What to know of measured times before a plan is priced by them: those that scatter, or were taken with another torch."""

from __future__ import annotations

import torch

from whale.errors import warn
from whale.ir.profile import read_profile


def warn_of_profile(file: str | None) -> None:
    """Warns of what makes a profile less than it seems.

    Args:
        file: of the profile; None for no profile.

    Raises:
        ConfigError: the file cannot be read, or holds no profile.
    """
    if file is None:
        return
    profile = read_profile(file)
    for warning in profile.warnings:
        warn(warning)
    for version in sorted({kind.torch for kind in profile.kinds} - {torch.__version__}):
        warn(f"the profile {file} was measured with torch {version} (here: {torch.__version__}); whale profile measures it again")
