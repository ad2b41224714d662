"""The errors a user can meet: every message with its rule, place and hint."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


class WhaleError(Exception):
    """A fault that the user can mend.

    Args:
        message: the rule that was broken, with both values (``split over 3 devices needs at least 3 heads (attn.heads: 2)``).
        where: the user's line; prints as ``file:line``.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message]
        if self.where is not None:
            lines.append(f"  at {self.where}")
        if self.hint is not None:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, None if self.where is None else str(self.where), self.hint)


def _rebuild(kind: type[WhaleError], message: str, where: str | None, hint: str | None) -> WhaleError:
    return kind(message, where=where, hint=hint)


class AnnotationError(WhaleError):
    """Scopes that cannot be honoured."""


class CaptureError(WhaleError):
    """A model that cannot be captured as one graph without losing something."""


class ClusterError(WhaleError):
    """A cluster description that is not one."""


class ConfigError(WhaleError):
    """A configuration key or value that means nothing, or does not fit the model."""


class PlanError(WhaleError):
    """No plan exists for this model, cluster and configuration, or a plan is not consistent."""


class OutOfMemory(PlanError):
    """A plan needs more memory than devices, or hosts, have."""


class ScheduleError(WhaleError):
    """A schedule that is incomplete, out of order, or would deadlock."""


class BatchError(WhaleError):
    """A batch that cannot be divided as the plan says, or that differs between ranks."""


class InitializationError(WhaleError):
    """Initial weights that nothing provides."""


class CheckpointError(WhaleError):
    """A checkpoint that is incomplete, damaged or of another model."""


class RuntimeFault(WhaleError):
    """A rank died, a wait timed out, or something was found wrong, during a run.

    Attributes:
        lost_peers: whether peers have died or failed, or a wait for them timed out.
    """

    lost_peers = False


class OpFault(RuntimeFault):
    """An op of the model failed on this rank alone, by its operands, or the model itself refuses them."""


PREEMPTED_CODE = 128 + signal.SIGTERM  # the exit code of a process that SIGTERM has ended, as in shells


class Preempted(SystemExit):
    """A rank received SIGTERM, and the state of the training is saved. Not caught, it ends the process with exit code 143.

    Attributes:
        path: of the checkpoint; empty if ranks keep the state in memory for those that restart.
    """

    def __init__(self, path: str) -> None:
        super().__init__(PREEMPTED_CODE)
        self.path = path


def is_debugging() -> bool:
    """Whether ``WHALE_DEBUG=1`` asks for whole tracebacks, with their causes."""
    return os.environ.get("WHALE_DEBUG", "0") not in ("", "0")


def first_few(names: Sequence[str], most: int = 3, *, separator: str = ", ", count: int | None = None) -> str:
    """A list as messages show it: ``a, b, c and 5 more``; `count` is the whole number if `names` are only the first."""
    more = (len(names) if count is None else count) - len(names[:most])
    return separator.join(names[:most]) + (f" and {more} more" if more else "")


def raise_faults(faults: Sequence[WhaleError]) -> None:
    """Raises all faults of a pass, each once: one unchanged, several as one error of their common class with a numbered list."""
    told = list({str(fault): fault for fault in faults}.values())
    if not told:
        return
    if len(told) == 1:
        raise told[0]
    _raise_together(told)


def _raise_together(faults: Sequence[WhaleError]) -> NoReturn:
    kind = next(kind for kind in type(faults[0]).__mro__ if all(isinstance(fault, kind) for fault in faults))
    listing = "\n".join(f"{number}. {fault}" for number, fault in enumerate(faults, start=1))
    raise kind(f"{len(faults)} faults\n{listing}")


def warn(text: str) -> None:
    """Warns at the line of the user's code that called Whale, directly or through torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and str(frame.f_globals.get("__name__", "torch.fx")).startswith(("whale.", "torch.")):  # fx names no module
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
