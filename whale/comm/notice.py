"""A notice that this process is about to be ended: SIGTERM, by which spot machines, Slurm and Kubernetes say that SIGKILL follows."""

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
    """Hears SIGTERM in place of what would end the process; others that listen in this process hear it too.

    Attributes:
        has_come: whether it has, since this listens.
    """

    has_come: bool = False
    _listens: bool = False
    _before: Any = field(default=signal.SIG_DFL, repr=False)

    def listen(self) -> None:
        """Listens from now on.

        Warns:
            UserWarning: this is not the main thread, the only one that Python tells of signals; SIGTERM then does what it did.
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
        signal.siginterrupt(signal.SIGTERM, False)  # system calls under way, those of libraries too, go on
        self._listens = True

    def leave(self) -> None:
        """Listens no longer: what was there before listens again, unless it has left too."""
        self._listens = False
        with suppress(ValueError):  # another thread lets go of the last engine: the signal stays unheard
            heard_by = signal.getsignal(signal.SIGTERM)
            while (other := _behind(heard_by)) is not None and not other._listens:
                heard_by = other._before
                signal.signal(signal.SIGTERM, heard_by)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if (other := _behind(self._before)) is not None:
            other._hear(number, frame)


def _behind(handler: object) -> Notice | None:
    """The notice that a handler is of; None for other handlers."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Notice) else None
