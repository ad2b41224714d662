"""What becomes of a model under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["exact", "warned", "refused", "raised", "WRONG"]
"""exact: all numbers are those of the plain loop. warned: they differ, and it said so. refused: an error of Whale's, with its
reason. raised: another error, or no end. WRONG: they differ, and nothing was said."""


@dataclass(frozen=True)
class Cell:
    """What became of a model under a plan.

    Attributes:
        kind: see `Kind`.
        reason: one line.
        error: the largest relative error, where there are numbers.
        details: the whole message, or the traceback.
    """

    kind: Kind
    reason: str = ""
    error: float | None = None
    details: str = ""
