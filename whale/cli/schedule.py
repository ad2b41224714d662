"""``whale schedule``: prints a pipeline schedule as a timeline with its figures, or verifies one from a file."""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whale.cli.tables import make_console
from whale.errors import ConfigError, ScheduleError, WhaleError, raise_faults
from whale.estimate import ActionTimes, bubble, bubble_rate, simulate
from whale.estimate.events.drawing import draw
from whale.ir.schedule import Schedule
from whale.ir.timeline import Timeline
from whale.schedules import BUILDERS, build, insert_communication, insert_recompute, recomputes, verify
from whale.units import counted

_COLOURS = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "R": "magenta", "SYNC": "red"}
_TIMES = (
    ("forward", "one forward of one chunk"),
    ("backward-input", "the input part of one backward; without --backward-weight the whole backward"),
    ("backward-weight", "the weight part of one backward"),
    ("recompute", "one recomputation; schedules without get one before each backward, those with take as long as a forward by default"),
    ("transfer", "the latency of a hop between ranks, which occupies no device"),
    ("sync", "the all-reduce of all gradients of one rank"),
)


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "schedule",
        help="print a pipeline schedule and its figures",
        description="Prints the order of a pipeline schedule as a timeline and, with times, its figures. "
        "Times are in any one unit; without them F = I = W = 1.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(BUILDERS))
    parser.add_argument("--file", metavar="schedule.txt", help="verify and show a schedule written as --text prints it")
    parser.add_argument("--stages", type=int, metavar="p", help="pipeline ranks; each runs one stage, or one per chunk")
    parser.add_argument("--micro-batches", type=int, metavar="m", help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, metavar="v", help="stages per rank (default 1; zb_v always has 2)")
    parser.add_argument("--group", type=int, metavar="g", help="group size of interleaving (default: the number of ranks)")
    for word, meaning in _TIMES:
        parser.add_argument(f"--{word}", type=_duration, metavar="T", help=f"time of {meaning}")
    parser.add_argument("--communication", action="store_true", help="insert the communication of a chain of stages")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print the schedule as text that --file reads")
    form.add_argument("--json", action="store_true", help="print figures and actions as JSON")
    parser.set_defaults(run=run)


def _duration(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"time {text} is not a number") from None
    if not 0 <= time < inf:
        raise argparse.ArgumentTypeError(f"time {text} is negative or not finite")
    return time


def run(arguments: argparse.Namespace) -> int:
    schedule, places = _read(arguments.file) if arguments.file is not None else (_build(arguments), ())
    if arguments.file is not None:
        _refuse_words_of_build(arguments)
    if arguments.communication:
        schedule = insert_communication(schedule, ((stage, stage + 1) for stage in range(schedule.num_stages - 1)))
    verify(schedule, places=places)
    if arguments.text:
        print(schedule)
        return 0
    timeline = simulate(schedule, _costs(arguments, schedule))
    if arguments.json:
        print(json.dumps(_figures(schedule, timeline)))
    else:
        _print(schedule, timeline, with_times=any(_time(arguments, word) is not None for word, _ in _TIMES))
    return 0


def _build(arguments: argparse.Namespace) -> Schedule:
    words = {"NAME": arguments.name, "--stages": arguments.stages, "--micro-batches": arguments.micro_batches}
    raise_faults([ConfigError(f"{word} or --file is missing") for word, value in words.items() if value is None])
    schedule = build(
        arguments.name,
        num_ranks=arguments.stages,
        num_micro_batch=arguments.micro_batches,
        num_chunks=1 if arguments.chunks is None else arguments.chunks,
        group_size=arguments.group,
    )
    return insert_recompute(schedule) if arguments.recompute and not recomputes(schedule) else schedule


def _refuse_words_of_build(arguments: argparse.Namespace) -> None:
    words = {"NAME": "name", "--stages": "stages", "--micro-batches": "micro_batches", "--chunks": "chunks", "--group": "group"}
    given = [word for word, name in words.items() if getattr(arguments, name) is not None]
    raise_faults([ConfigError(f"{word} cannot be given together with --file, which has the whole schedule") for word in given])


def _read(path: str) -> tuple[Schedule, tuple[str, ...]]:
    """A schedule from a file, and where each rank's actions stand in it."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule cannot be read: {error}", where=path) from None
    try:
        schedule = Schedule.parse(text)
    except ValueError as error:
        line, _, message = str(error).partition(": ")
        raise ScheduleError(message, where=f"{path}:{line.removeprefix('line ')}") from None
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    return schedule, tuple(f"{path}:{number}" for number in lines[1:])


def _time(arguments: argparse.Namespace, word: str) -> float | None:
    time: float | None = getattr(arguments, word.replace("-", "_"))
    return time


def _costs(arguments: argparse.Namespace, schedule: Schedule) -> ActionTimes:
    """Durations: one action each, except SYNC, which is divided over the stages of its rank."""
    forward, inputs, weights, recompute, transfer, sync = (_time(arguments, word) for word, _ in _TIMES)
    faults: list[WhaleError] = []
    if (forward is None) != (inputs is None):
        faults.append(ConfigError("--forward and --backward-input must be given together"))
    if inputs is None and weights is not None:
        faults.append(ConfigError("--backward-weight needs --backward-input"))
    if arguments.file is not None and recompute and not recomputes(schedule):
        faults.append(ConfigError("--recompute has no effect: the schedule in the file has no R actions", where=arguments.file))
    raise_faults(faults)
    if forward is None or inputs is None:
        forward = inputs = weights = 1.0
    shared = [len(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))]
    return ActionTimes(
        forward,
        inputs,
        weights or 0.0,
        forward if recompute is None else recompute,
        [(sync or 0.0) / shared[rank] for rank in schedule.stage_rank],
        transfer or 0.0,
    )


def _figures(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    return {
        "makespan": timeline.makespan,
        "bubble_rate": bubble_rate(timeline),
        "peak_in_flight": list(timeline.peak_in_flight),
        "exposed_sync": timeline.exposed_sync,
        "ranks": [[str(action) for action in actions] for actions in schedule.ranks],
    }


def _print(schedule: Schedule, timeline: Timeline, *, with_times: bool) -> None:
    console = make_console()
    placement = " ".join(str(rank) for rank in schedule.stage_rank)
    _print_line(console, Text(f"{schedule.name}: {counted(schedule.num_micro_batch, 'micro-batch')}, stages on ranks {placement}"))
    lines = draw(timeline)
    for line in lines:
        text = Text(line)
        for kind, colour in _COLOURS.items():
            text.highlight_regex(rf"(?<![A-Za-z])\d*{kind}\d*-*", colour)
        _print_line(console, text)
    widest = max(map(len, lines))
    if widest > console.width:
        _print_line(console, Text(f"(the first {console.width} of {widest} columns)", "dim"))
    if with_times:
        _print_line(console, Text(f"makespan        {timeline.makespan:g}"))
        _print_line(console, Text(f"bubble          {bubble(timeline):g}, {bubble_rate(timeline):.4f} of the longest span"))
        _print_line(console, Text(f"exposed sync    {timeline.exposed_sync:g}"))
    _print_line(console, Text(f"peak in flight  {' '.join(map(str, timeline.peak_in_flight))}"))


def _print_line(console: Console, text: Text) -> None:
    console.print(text, no_wrap=True, overflow="crop")
