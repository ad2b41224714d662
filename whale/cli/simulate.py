"""``whale simulate``: what a step of a plan costs before anything is rented: time, memory, bubbles, communication, and the straggler.

With ``--dry-run`` the memory of a step of the runtime's own program, on tensors without contents, is printed next to the prediction.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from whale.cli.against import compare
from whale.cli.inputs import PUBLISHED, build_model, is_function, keywords_for, read_settings, types_of
from whale.cli.planned import Planned, add_planning_verb, headline, planned
from whale.cli.tables import paragraph, print_table
from whale.config import Config
from whale.errors import ConfigError, first_few, raise_faults
from whale.estimate import DeviceEstimate, Faults, Goodput, StepEstimate, faults_of, with_copies, with_copying
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.planning import EvenShares, Simulation, even_shares
from whale.search.objective import format_cost
from whale.units import counted, format_bytes, format_duration, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from whale.api.mode import CapturedMode
    from whale.dry_run import DryRun


RESTART_SECONDS = 120.0
"""From a fault to the next step, where not measured: to notice it, to start processes, to load a checkpoint."""

_BOUNDS = {
    "evenly": "all compute, divided evenly",
    "slowest": "the busiest device",
    "schedule": "the schedule without communication",
    "links": "the busiest link",
}


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = add_planning_verb(
        verbs, "simulate", run, says="predict the time and memory of a step", json="print the figures as JSON, device by device"
    )
    parser.add_argument(
        "--against",
        action="append",
        metavar="FILE",
        help="compare with FILE in place of this command's own: a plan, a cluster file or a recipe; repeatable, one of each",
    )
    parser.add_argument("--even", action="store_true", help="also predict a step with equal shares of rows, layers and cuts")
    parser.add_argument("--dry-run", action="store_true", help="also run each distinct rank on fake tensors, and count its memory")
    parser.add_argument("--faults", type=_rate, metavar="RATE", help="print the goodput at this many faults per device and day")
    parser.add_argument(
        "--restart",
        type=_rate,
        metavar="SECONDS",
        default=RESTART_SECONDS,
        help="with --faults: seconds from a fault to the next step (default %(default)g)",
    )


def _rate(text: str) -> float:
    """A number above 0 on the command line."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.against:
        alone = [flag for flag in ("even", "dry_run", "faults") if getattr(arguments, flag)]
        raise_faults([ConfigError(f"--{flag.replace('_', '-')} has no effect with --against, which compares plans") for flag in alone])
        compare(arguments)
        return 0
    mode = read_mode(arguments.source, arguments.arg, arguments.blocks, *read_settings(arguments)) if arguments.dry_run else None
    made = planned(arguments, graph=None if mode is None else mode.graph)
    even = even_shares(made.plan, made.graph, made.cluster, made.config) if arguments.even else None
    found = Simulation(made.plan, made.step, even)
    dry = None if mode is None else run_dry(made.plan, mode, made.config)
    faults = faults_of(made.step, made.cluster, arguments.faults, arguments.restart) if arguments.faults else None
    if arguments.json:
        data = found.as_data() | {"cost_per_sample": made.cost_per_sample}
        data |= {} if made.plan.rounds is None else {"averaging_seconds": made.step.averaging}
        data |= {} if made.step.redundancy is None else {"redundancy": asdict(made.step.redundancy)}
        data |= {} if faults is None else {"faults": _fault_data(faults, made.step)}
        print(json.dumps(data if dry is None else dry_run_data(data, dry), indent=1))
    else:
        print_simulation(found, made)
        if dry is not None:
            print_dry_run(dry, made.plan, made.step)
        if faults is not None:
            _print_faults(faults, found)
    return 0


def print_simulation(found: Simulation, made: Planned) -> None:
    """Prints the figures; devices that do the same share a line."""
    plan, step = found.plan, found.step
    print("\n".join(headline(plan)))
    slow = step.straggler
    print(f"step time              {format_seconds(step.step_seconds)}")
    print(f"samples per second     {format_rate(found.samples_per_second)}")
    if (cost := made.cost_per_sample) is not None:
        print(f"cost                   {format_cost(cost)}")
    print(f"bubble rate            {step.bubble_rate:.3f}")
    print(f"exposed communication  {format_seconds(slow.exposed)}")
    idle = format_seconds(step.idle(slow))
    if plan.rounds is not None:
        averages = f"{plan.describe_sync()}; averages take {format_seconds(step.averaging)} of a step"
        print("\n".join(paragraph("rounds                 ", averages)))
    if step.redundancy is not None:
        print("\n".join(paragraph("redundancy             ", str(step.redundancy))))
    print("\n".join(paragraph("straggler              ", f"{slow.name}: computes longest, waits {idle} for other devices")))
    columns = ("devices", "stage", "busy", "compute", "messages", "waits", "memory", "filled with")
    rows = [_row(each, step.step_seconds) for each in sorted(step.devices, key=lambda each: plan.rank_of[each.devices[0]])]
    print_table("", columns, rows, ("busy", "compute", "messages", "waits", "memory"))
    for name, seconds in found.bounds.items():
        print(f"bound  {format_seconds(seconds):>8}  {_BOUNDS[name]}")
    if found.even is not None:
        print("\n".join(paragraph("even   ", _even(found, found.even))))


def _even(found: Simulation, even: EvenShares) -> str:
    """What equal shares would cost, and whether they would run."""
    if even.step_seconds is None:
        return f"equal shares would not run: {even.reason}"
    text = f"{format_seconds(even.step_seconds):>8}  with equal shares: the balanced plan is {found.speedup:.2f} x as fast"
    return f"{text}; they would not run: {even.reason}" if even.reason else text


def _row(each: DeviceEstimate, step_seconds: float) -> tuple[str, ...]:
    return (
        each.name,
        ", ".join(map(str, each.stages)),
        format_share(each.busy / step_seconds),
        format_seconds(each.busy),
        format_seconds(each.communicating),
        format_seconds(each.exposed),
        f"{format_bytes(round(each.peak.total))} ({format_share(each.peak.total / each.capacity)})",
        ", ".join(_filling(each)),
    )


def _filling(each: DeviceEstimate) -> Iterator[str]:
    """What most of its memory is filled with."""
    for name, num_bytes in sorted(each.peak.parts, key=lambda part: -part[1])[:2]:
        yield f"{name} {format_share(num_bytes / each.peak.total)}"


def _goodputs(faults: Faults, step: StepEstimate) -> Iterator[Goodput]:
    """With the best interval between checkpoints, and with a quarter of it and four times it."""
    step_seconds = step.step_seconds
    best = faults.best_interval(least=step_seconds)
    for interval in sorted({max(step_seconds, best / 4), best, 4 * best}):
        yield with_copying(faults.goodput(interval), step)


def _fault_data(faults: Faults, step: StepEstimate) -> dict[str, Any]:
    step_seconds, copied = step.step_seconds, with_copies(faults, step)
    return asdict(faults) | {
        "with_copies": None if copied is None else asdict(copied),
        "best_interval_seconds": faults.best_interval(least=step_seconds),
        "young_interval_seconds": faults.young_interval,
        "goodput": [asdict(each) for each in _goodputs(faults, step)],
    }


def _print_faults(faults: Faults, found: Simulation) -> None:
    """Prints what a run with faults gets done, for three intervals between checkpoints."""
    step_seconds = found.step.step_seconds
    best = faults.best_interval(least=step_seconds)
    print(
        f"a fault every {format_duration(faults.mean_seconds)} on {counted(len(found.plan.devices), 'device')}, "
        f"restart in {format_duration(faults.restart_seconds)}, a checkpoint stops training for {format_seconds(faults.save_seconds)}"
    )
    intervals = [
        (f"{format_duration(each.interval_seconds)}{' (best)' if each.interval_seconds == best else ''}", each)
        for each in _goodputs(faults, found.step)
    ]
    copied, redundancy = with_copies(faults, found.step), found.step.redundancy
    if copied is not None and redundancy is not None:
        intervals.append((f"copies (one {redundancy.survives} lost at once)", copied))
    copying = 0.0 if redundancy is None else redundancy.step_seconds
    rate = found.samples_per_second * step_seconds / (step_seconds - copying)  # of steps without copies
    rows = [
        (
            interval,
            f"{each.useful:.2%}",
            f"{each.useful * rate:.4g}",
            f"{each.saving:.2%}",
            f"{each.repeated:.2%}",
            f"{each.restarting:.2%}",
        )
        for interval, each in intervals
    ]
    columns = ("checkpoint every", "goodput", "samples/s", "saving", "repeated", "restarts")
    print_table("", columns, rows, columns[1:])


def read_mode(source: str, pairs: Sequence[str], blocks: int | None, config: Config, cluster: Cluster) -> CapturedMode:
    """The captured training of the model on a command line, with the program that ranks run.

    Args:
        source: ``FILE.py:FUNCTION`` or ``gpt:KEY=VALUE,...``.
        pairs: its arguments, each ``KEY=VALUE``.
        blocks: to which number its blocks were to be repeated.
        config, cluster: for whose types it is captured.

    Raises:
        ConfigError: there is only a graph.
        CaptureError: the model cannot be built or captured.
    """
    name, _, sizes = source.partition(":")
    if not (is_function(source) or name == PUBLISHED) or blocks is not None:
        raise ConfigError(
            f"--dry-run cannot run {source}{'' if blocks is None else ' with --blocks'}, which is a graph without a program",
            hint="name FILE.py:FUNCTION with --arg for its sizes, or gpt:layers=...",
        )
    from whale.api.mode import CapturedMode

    if name == PUBLISHED:
        from whale.workloads import GPT

        model, batch, loss = GPT(**keywords_for(GPT, name, sizes, pairs)).built()
        return CapturedMode(model, batch, loss, "train")
    model, batch, loss, batch_dims = build_model(source, pairs)
    device, precision = types_of(config, cluster)
    return CapturedMode(model, batch, loss, "train", batch_dims, device=device, precision=precision)


def run_dry(plan: Plan, mode: CapturedMode, config: Config) -> DryRun:
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
    """Prints, for each rank that was run, its peak next to the predicted one."""
    others = ", the others are equal" if found.num_run < len(plan.devices) else ""
    title = f"dry run: {found.num_run} of {counted(len(plan.devices), 'rank')}{others}"
    rows = []
    for devices, peak in found.peaks:
        use = step.of(devices[0]).peak
        predicted = use.total - use.communicators  # a dry run opens none
        rows.append((
            first_few(devices, 2),
            format_bytes(round(predicted)),
            format_bytes(peak.num_bytes),
            f"{predicted / peak.num_bytes - 1:+.1%}",
            f"{peak.action}, after {peak.op}",
        ))  # fmt: skip
    print_table(title, ("devices", "predicted", "dry run", "error", "peak in"), rows, ("predicted", "dry run", "error"))
