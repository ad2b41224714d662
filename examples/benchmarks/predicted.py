"""Runs that others measured beside what is predicted for them, set by set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runs import Run, a100_runs, megatron_runs, sequence_parallel_runs, simulate, t4_runs

from whale.errors import WhaleError
from whale.hardware import catalogue

Reader = Callable[[Path], Iterator[Run]]

SETS: dict[str, tuple[str, Reader, str]] = {
    "multi-node A100": ("a100_multi_node.csv", a100_runs, "VIA Research Group, vTrain ground truth"),
    "one host of A100": ("a100_single_node.csv", a100_runs, "the same"),
    "SC'21 Table 1": ("published.yaml", megatron_runs, "Narayanan et al., SC'21"),
    "sequence-parallel Table 5": ("published.yaml", sequence_parallel_runs, "Korthikanti et al., arXiv 2205.05198"),
    "16 T4": ("t4_sixteen.csv", t4_runs, "D. Li, AMP results"),
}


@dataclass(frozen=True)
class Result:
    """A run by both clocks.

    Attributes:
        run: what was run.
        predicted: seconds; None where it was refused.
        peak: bytes on the fullest device.
        capacity: bytes that the device has.
        fitted: whether it is one of those at which figures were fitted.
        refused: why; "" where it was not.
    """

    run: Run
    predicted: float | None
    peak: float
    capacity: float
    fitted: bool
    refused: str = ""

    @property
    def error(self) -> float:
        """Of the time."""
        assert self.predicted is not None
        return self.predicted / self.run.seconds - 1

    def __str__(self) -> str:
        told = f"{self.predicted:.3f} s, {self.error:+.1%}" if self.predicted is not None else f"refused: {self.refused}"
        return f"{self.run}: measured {self.run.seconds:.3f} s, predicted {told}"


def predict(run: Run, fitted: bool = False) -> Result:
    """Simulates a run."""
    memory = float(catalogue().devices[run.device].memory)
    try:
        found = simulate(run)
    except WhaleError as error:
        return Result(run, None, 0.0, memory, fitted, str(error))
    return Result(run, found.step_seconds, float(max(each.peak.total for each in found.devices)), memory, fitted)
