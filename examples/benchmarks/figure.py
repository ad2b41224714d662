"""A figure of a paper beside what is predicted for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One published figure.

    Attributes:
        what: it is.
        published, predicted: in the same unit; `published` is None where there is no number to set beside the prediction.
        bound: whether the paper gives no figure but a bound: ``at least`` or ``up to`` so much.
    """

    what: str
    published: float | None
    predicted: float
    bound: str = ""

    @property
    def error(self) -> float | None:
        """Of the prediction."""
        return None if self.published is None else self.predicted / self.published - 1

    def __str__(self) -> str:
        """A row of a table."""
        if self.published is None or self.error is None:
            return f"| {self.what} | - | {self.predicted:.4g} | - |"
        said = f"{self.bound} {self.published:.4g}".strip()
        return f"| {self.what} | {said} | {self.predicted:.4g} | {self.error:+.1%} |"
