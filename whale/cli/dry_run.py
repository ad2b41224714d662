"""``--dry-run``: the memory of a step from the runtime's own program on tensors without contents, beside what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whale.cli.inputs import PUBLISHED, build_model, is_function, keywords_for
from whale.cli.tables import print_table
from whale.config import Config
from whale.errors import ConfigError
from whale.estimate import StepEstimate
from whale.ir.plan import Plan
from whale.units import counted, format_bytes

if TYPE_CHECKING:
    from whale.api.mode import CapturedMode
    from whale.dry_run import DryRun


def read_mode(source: str, pairs: Sequence[str], blocks: int | None) -> CapturedMode:
    """The captured training of a model that a command line names, with the program that ranks run.

    Args:
        source: ``FILE.py:FUNCTION`` or ``gpt:KEY=VALUE,...``.
        pairs: its arguments, each ``KEY=VALUE``.
        blocks: to which number its blocks were to be repeated.

    Raises:
        ConfigError: there is a graph only.
        CaptureError: the model cannot be built or captured.
    """
    name, _, sizes = source.partition(":")
    if not (is_function(source) or name == PUBLISHED) or blocks is not None:
        raise ConfigError(
            "--dry-run runs the program of the model (a model.json, and blocks that --blocks repeats, are a graph only)",
            hint="name FILE.py:FUNCTION with --arg for its sizes, or gpt:layers=...",
        )
    from whale.api.mode import CapturedMode

    if name == PUBLISHED:
        from whale.workloads import GPT

        model, batch, loss = GPT(**keywords_for(GPT, name, sizes, pairs)).built()
        return CapturedMode(model, batch, loss, "train")
    model, batch, loss, batch_dims = build_model(source, pairs)
    return CapturedMode(model, batch, loss, "train", batch_dims)


def run_dry(plan: Plan, mode: CapturedMode, config: Config) -> DryRun:
    """Runs the distinct ranks of a plan.

    Raises:
        WhaleError: as `whale.dry_run.dry_run`.
    """
    from whale.dry_run import dry_run

    return dry_run(plan, mode, config)


def dry_run_data(data: dict[str, Any], found: DryRun) -> dict[str, Any]:
    """The figures of a simulation with those of its dry run in them."""
    devices = [
        each | {"dry_run_peak_bytes": peak.num_bytes, "dry_run_peak_at": {"action": peak.action, "op": peak.op}}
        for each in data["devices"]
        for peak in [found.of[each["name"]]]
    ]
    return data | {"devices": devices, "dry_run": {"num_ranks_run": found.num_run}}


def print_dry_run(found: DryRun, plan: Plan, step: StepEstimate) -> None:
    """Prints, for each rank that was run, its peak beside the predicted one."""
    others = ", the others are like them" if found.num_run < len(plan.devices) else ""
    title = f"dry run: {found.num_run} of {counted(len(plan.devices), 'rank')}{others}"
    rows = []
    for devices, peak in found.peaks:
        predicted = step.of(devices[0]).peak.total
        others = f" and {len(devices) - 1} like it" if len(devices) > 1 else ""
        rows.append((
            f"{devices[0]}{others}",
            format_bytes(round(predicted)),
            format_bytes(peak.num_bytes),
            f"{predicted / peak.num_bytes - 1:+.1%}",
            f"{peak.action}, after {peak.op}",
        ))  # fmt: skip
    print_table(title, ("devices", "predicted", "dry run", "error", "fullest in"), rows, ("predicted", "dry run", "error"))
