"""Waiting for communication with a limit, and saying who and what was waited for when it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from whale.errors import RuntimeFault


def wait(work: dist.Work | None, action: str, ranks: Sequence[int], timeout: timedelta) -> None:
    """Waits for one piece of communication.

    Args:
        work: what to wait for; None is done already.
        action: what it is for (``1RECV_F3``).
        ranks: the other ranks in it.
        timeout: the longest to wait.

    Raises:
        RuntimeFault: a peer died, or the limit passed.
    """
    if work is None:
        return
    try:
        work.wait(timeout)
    except (RuntimeError, dist.DistError) as error:
        raise fault(action, ranks, timeout, error) from error


def fault(action: str, ranks: Sequence[int], timeout: timedelta, error: BaseException) -> RuntimeFault:
    """The error for communication that did not complete."""
    peers = ", ".join(str(rank) for rank in ranks)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RuntimeFault(
        f"{action} with rank(s) {peers} did not complete: {reason}",
        hint=f"a peer died, or is slower than communication.timeout_seconds ({timeout.total_seconds():g}); see that rank's own output",
    )
