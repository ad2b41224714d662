"""Figures of the steps of a run: next to a loader's bar or in a line every few seconds, and as a line of JSON per step in a file.

Rank 0 alone writes. A GPU is not waited for: the figures of a step are read two steps later, when they have long been copied.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import torch

from whale.comm import World, close_at_exit, on_first_rank
from whale.config.sections import RuntimeSettings
from whale.errors import ConfigError
from whale.runtime.execute.batch import BatchView
from whale.runtime.state.host_copies import NUM_STEPS_AHEAD, LateNumber
from whale.units import format_bytes, format_count

LINE_SECONDS = 10.0
"""Between two lines."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    step: int  # its number, from 1
    loss: float | None  # of the global batch; of several in one `update` their sum, scaled; None where not finite
    seconds: float  # since the step before it ended, or since it began
    samples_per_second: float  # rows of the global batch
    tokens_per_second: float | None  # elements of the batch's first integer tensor with two dimensions or more
    learning_rates: tuple[float, ...]  # of the parameter groups, as this step used them, each value once
    gradient_norm: float | None  # before clipping; None where not computed
    peak_bytes: int  # of tensors on rank 0's GPU; on the CPU the process's resident memory
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # returned with the loss of the last batch; None where not finite

    @property
    def json(self) -> str:
        """One line; what is not known is left out."""
        return json.dumps({name: value for name, value in asdict(self).items() if name == "loss" or value not in (None, (), {})})

    def __str__(self) -> str:
        words = [f"step {self.step}", f"loss {'not finite' if self.loss is None else f'{self.loss:.4g}'}"]
        words += [f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in self.metrics.items()]
        words.append(f"{format_count(self.samples_per_second)} samples/s")
        words += [f"{format_count(self.tokens_per_second)} tokens/s"] if self.tokens_per_second is not None else []
        words += [f"norm {self.gradient_norm:.3g}"] if self.gradient_norm is not None else []
        words += [f"lr {', '.join(f'{rate:.3g}' for rate in self.learning_rates)}"] if self.learning_rates else []
        return " · ".join((*words, format_bytes(self.peak_bytes)))


@dataclass
class _Counted:
    """Batches since the last step ended: when the first began, rows, tokens, and learning rates before the step."""

    begun: float
    num_rows: int = 0
    num_tokens: int = 0
    learning_rates: tuple[float, ...] = ()


@dataclass(eq=False)
class StepLog:
    """The steps of a run; a no-op on ranks other than 0."""

    world: World
    path: Path | None  # of the lines of JSON, which are appended; None for none
    shows: bool  # whether a line is printed every few seconds
    last: StepFigures | None = None  # figures of the last known step, where they are wanted
    _progress: bool = False
    _is_wanted: bool = False
    _file: TextIO | None = None
    _counted: _Counted | None = None
    _ended: float | None = None
    _copied: deque[tuple[StepFigures, LateNumber, LateNumber | None, dict[str, LateNumber]]] = field(default_factory=deque)
    _printed: float = -math.inf
    _told: StepFigures | None = None

    @staticmethod
    def of(settings: RuntimeSettings, world: World) -> StepLog:
        """The log that rank 0's settings ask for; raises as `change`."""
        log = StepLog(world, None, shows=False)
        log.change(settings)
        if world.rank == 0:
            close_at_exit(log)
        return log

    def change(self, settings: RuntimeSettings) -> None:
        """Goes on with other settings; all ranks call it.

        Raises:
            ConfigError: the file cannot be written. Nothing has changed.
        """
        on_first_rank(self.world, lambda: self._change(None if settings.log_file is None else Path(settings.log_file), settings.progress))

    def _change(self, path: Path | None, shows: bool) -> None:
        if path != self.path:
            file = None if path is None else _opened(path)
            self._read(0)
            if self._file is not None:
                self._file.close()
            self.path, self._file = path, file
        if shows != self._progress:
            self.shows = self._progress = shows
        self._is_wanted |= shows or path is not None  # a bar may ask for figures, too

    def with_bar(self) -> Callable[[], str]:
        """Computes figures for a bar, which asks for them; where standard error is no terminal, lines are printed too."""
        if self.world.rank == 0:
            self._is_wanted, self.shows = True, not sys.stderr.isatty()
        return lambda: "" if self.last is None else str(self.last)

    def begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._is_wanted:
            counted = self._counted = self._counted or _Counted(time.perf_counter() if self._ended is None else self._ended)
            groups = [] if optimizer is None else optimizer.param_groups
            counted.learning_rates = tuple(dict.fromkeys(float(group["lr"]) for group in groups if "lr" in group))

    def add(self, view: BatchView) -> None:
        if self._counted is not None:
            self._counted.num_rows += view.num_rows
            self._counted.num_tokens += _num_tokens(view)

    def end(self, step_number: int, loss: torch.Tensor, norm: torch.Tensor | None, metrics: Mapping[str, torch.Tensor]) -> None:
        """After a step; loss, norm of the gradients (None where not computed) and metrics are 0-dim."""
        counted, self._counted, now = self._counted, None, time.perf_counter()
        if counted is None:
            return
        seconds, self._ended = max(1e-9, now - counted.begun), now
        tokens = counted.num_tokens / seconds if counted.num_tokens else None
        rates, num_bytes = counted.learning_rates, _peak_bytes(self.world.device)
        figures = StepFigures(step_number, None, seconds, counted.num_rows / seconds, tokens, rates, None, num_bytes)
        others = {name: LateNumber.of(value) for name, value in metrics.items()}
        self._copied.append((figures, LateNumber.of(loss), None if norm is None else LateNumber.of(norm), others))
        self._read(0 if loss.device.type == "cpu" else NUM_STEPS_AHEAD)

    def _read(self, num_left: int) -> None:
        while len(self._copied) > num_left:
            figures, loss, norm, others = self._copied.popleft()
            found = None if norm is None else _finite(norm.read())
            metrics = {name: _finite(value.read()) for name, value in others.items()}
            self.last = replace(figures, loss=_finite(loss.read()), gradient_norm=found, metrics=metrics)
            if self._file is not None:
                print(self.last.json, file=self._file, flush=True)
            if self.shows and time.monotonic() - self._printed >= LINE_SECONDS:
                self._print()

    def _print(self) -> None:
        self._printed, self._told = time.monotonic(), self.last
        print(f"whale: {self.last}", file=sys.stderr, flush=True)

    def lose_peers(self) -> None:
        """Writes the steps whose figures are here: a GPU may wait for ever for the rest."""
        while self._copied:
            _, loss, norm, others = self._copied[0]
            if not all(copy is None or copy.has_arrived for copy in (loss, norm, *others.values())):
                break
            self._read(len(self._copied) - 1)
        self._copied.clear()

    def close(self) -> None:
        self._read(0)
        if self.shows and self.last is not None and self.last is not self._told:
            self._print()
        if self._file is not None:
            self._file.close()
        self._file, self._is_wanted, self.shows = None, False, False


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise ConfigError(
            f"cannot write the log of steps {path}: {error.strerror}", hint="--log or runtime.log_file names the file"
        ) from error


def _num_tokens(view: BatchView) -> int:
    for name, leaf in view.leaves.items():
        if name in view.with_rows and leaf.ndim > 1 and not leaf.is_floating_point() and leaf.dtype != torch.bool:
            return view.num_rows * math.prod(leaf.shape[1:])
    return 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
