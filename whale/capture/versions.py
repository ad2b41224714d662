"""Which versions of torch a capture was tested with: it reads what torch says of itself, and that changes between them."""

from __future__ import annotations

from whale.errors import CaptureError

TESTED = ("2.13",)
"""Minor versions that all tests were run with."""


def check_version(version: str) -> None:
    """Lets the tested versions of torch pass.

    Args:
        version: torch's, such as "2.13.0+cpu".

    Raises:
        CaptureError: another one.
    """
    if ".".join(version.split(".")[:2]) in TESTED:
        return
    raise CaptureError(
        f"models are captured with a version of torch that Whale was tested with ({', '.join(TESTED)}; this is {version})",
        hint=f"pip install 'torch=={TESTED[-1]}.*'",
    )
