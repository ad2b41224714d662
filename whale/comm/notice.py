"""SIGTERM as a notice: spot machines, Slurm and Kubernetes send it some time before SIGKILL."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from whale.errors import warn


@dataclass(eq=False)
class Notice:
    """A handler of SIGTERM that replaces the default; it also calls other notices of this process."""

    has_come: bool = False  # whether the signal has come since `listen`
    _listens: bool = False
    _has_told: bool = False
    _before: Any = field(default=signal.SIG_DFL, repr=False)

    def listen(self) -> None:
        """Installs the handler.
        Warns, and changes nothing, if this is not the main thread, the only one that receives signals.
        """
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            warn(
                f"runtime.save_on_sigterm has no effect: whale.parallelize was called in thread {threading.current_thread().name}, and "
                "only the main thread receives signals"
            )
            return
        self._before = signal.signal(signal.SIGTERM, self._hear)
        signal.siginterrupt(signal.SIGTERM, False)  # system calls in progress, also those of libraries, go on
        self._listens = True

    def check(self) -> None:
        """Warns, once, where the script has set a handler of its own since `listen`: the signal may not come here any more."""
        heard_by = signal.getsignal(signal.SIGTERM)
        if not self._listens or self._has_told or heard_by == self._hear:
            return
        behind = _behind(heard_by)
        while behind is not None and behind is not self:
            behind = _behind(behind._before)
        if behind is None:
            self._has_told = True
            warn(
                f"SIGTERM is handled by {getattr(heard_by, '__qualname__', heard_by)}, set after whale.parallelize: nothing is saved when "
                "it comes, unless that calls the handler that signal.signal returned; set it before whale.parallelize, or leave it out"
            )

    def leave(self) -> None:
        """Removes the handler and restores the one before it, unless that has left too."""
        self._listens = False
        with suppress(ValueError):  # the last engine is released by another thread: the signal stays ignored
            heard_by = signal.getsignal(signal.SIGTERM)
            while (other := _behind(heard_by)) is not None and not other._listens:
                heard_by = other._before
                signal.signal(signal.SIGTERM, heard_by)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if (other := _behind(self._before)) is not None:
            other._hear(number, frame)


def _behind(handler: object) -> Notice | None:
    """The notice whose method a handler is; None for other handlers."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Notice) else None
