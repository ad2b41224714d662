"""Doing a thing on every rank such that all succeed or all raise: no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from whale.comm.world import World
from whale.errors import RuntimeFault, WhaleError

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Runs an action on every rank.

    Returns:
        This rank's result.

    Raises:
        Exception: this rank's own error; where only others failed, the first one's as a `WhaleError` that names its rank.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    for rank, other in enumerate(world.gather_objects(None if error is None else _portable(error))):
        if isinstance(other, WhaleError):
            raise error or type(other)(f"rank {rank}: {other.message}", where=other.where, hint=other.hint)
    return result


def _portable(error: Exception) -> WhaleError:
    """An error that can travel: other libraries' exceptions may not."""
    return error if isinstance(error, WhaleError) else RuntimeFault(f"{type(error).__name__}: {error}")


def on_first_rank(world: World, action: Callable[[], T]) -> T:
    """Runs an action on rank 0 and gives its result to all.

    Raises:
        Exception: what rank 0 raised, on all ranks.
    """
    outcome: object = None
    error: Exception | None = None
    if world.rank == 0:
        try:
            outcome = action()
        except Exception as raised:
            error = raised
            outcome = _portable(raised)
    outcome = world.broadcast_object(outcome)
    if isinstance(outcome, WhaleError):
        raise error or outcome
    return outcome  # type: ignore[return-value]
