"""What following the speeds of devices brings: one of two ranks is cut to a share of a core in mid-run, and later let go.

    python examples/benchmarks/rebalance.py --json rebalance.json

undisturbed   steps before it
throttled     steps from the cut to the move of `runtime.rebalance: on`, which finds it by itself
moved         then blocks of steps of three runs side by side, in turn: the run that has moved, one that was planned for the cut from its
              start, and one that stays under the first plan
lifted        steps from the end of the cut until the run moves back

With --following: what following costs by itself, on this machine's first device and in the process that runs it: of a pass that is
measured, and of a look at the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import whale
from whale.ir.cluster import Cluster
from whale.ir.health import WINDOW, Health
from whale.ir.schedule import Action, Kind
from whale.runtime.recording.meter import Meter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from miniature import slowed
from mixed_cluster import OPTIMIZER, make_batch
from ranks import cost_of, meet, on_ranks

THROTTLED = 1
"""The rank that is cut."""


@dataclass(frozen=True)
class Result:
    """One run; seconds per step are medians.

    Attributes:
        steps_to_move, steps_back: from the cut, and from its end, until the plan is another; None where it never was.
        undisturbed_seconds: of a step before the cut.
        throttled_seconds: from the cut to the move.
        moved_seconds, planned_seconds, stayed_seconds: of the blocks in turn.
        of_planned: throughput after the move by that of the run planned for it, the median over the blocks.
        against_staying: the same by that of the run that stays.
        rows: of the two ranks, before the cut and after the move.
        load: of the machine, at the end: above the number of ranks others have computed beside them.
    """

    steps_to_move: int | None
    steps_back: int | None
    undisturbed_seconds: float
    throttled_seconds: float
    moved_seconds: float
    planned_seconds: float
    stayed_seconds: float
    of_planned: float
    against_staying: float
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    load: float


def engine_of(options: argparse.Namespace, mode: str, cluster: Cluster | None = None) -> whale.Engine:
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, 8, options.context, options.stages, 1)
    config = {"planning.search": "off", "runtime.rebalance": mode}
    return whale.parallelize(
        model, loss=loss_fn, optimizer=OPTIMIZER, batch=make_batch(options, options.rows), config=config, cluster=cluster
    )


def rows_of(engine: whale.Engine, rows: int) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in engine.plan.replica_rows(rows))


def until_moved(engine: whale.Engine, step: Callable[[], object], most: int) -> tuple[int | None, float]:
    """Steps until the plan is another, and the median of their seconds; None where it stays."""
    before, seconds = engine.plan.replicas, list[float]()
    for number in range(1, most + 1):
        begun = time.perf_counter()
        step()
        if engine.plan.replicas != before:
            return number, statistics.median(seconds)
        seconds.append(time.perf_counter() - begun)
    return None, statistics.median(seconds)


def run_ranks(options: argparse.Namespace) -> Result:
    batch, is_cut = make_batch(options, options.rows), dist.get_rank() == THROTTLED
    engine = engine_of(options, "on")
    step, first = partial(engine.step, batch), engine.opening.attachment.cluster
    seconds = [cost_of(step, 1).seconds for _ in range(options.before)]
    rows = rows_of(engine, options.rows)
    with ExitStack() as cut:
        cut.enter_context(slowed([os.getpid()], [options.share]) if is_cut else nullcontext())
        meet()
        steps_to_move, throttled = until_moved(engine, step, options.most)
        moved_rows = rows_of(engine, options.rows)
        known = first.slowed({first.devices[THROTTLED].name: options.slowdown or 1 / options.share})
        others = [engine_of(options, "off", known), engine_of(options, "off", first)]
        sides = [step, *(partial(other.step, batch) for other in others)]
        for each in sides:
            cost_of(each, 1)
        blocks = []
        for number in range(options.blocks):
            order = [(number + place) % 3 for place in range(3)]
            found = {side: cost_of(sides[side], options.steps).seconds for side in order}
            blocks.append([found[side] for side in range(3)])
        for other in others:
            other.close()
    meet()
    steps_back, _ = until_moved(engine, step, options.most)
    engine.close()
    moved, planned, stayed = (statistics.median(side) for side in zip(*blocks, strict=True))
    return Result(
        steps_to_move,
        steps_back,
        statistics.median(seconds[2:]),
        throttled,
        moved,
        planned,
        stayed,
        statistics.median(planned / own for own, planned, _ in blocks),
        statistics.median(stayed / own for own, _, stayed in blocks),
        (rows, moved_rows),
        os.getloadavg()[0],
    )


def following(num_passes: int = 64, num_runs: int = 50) -> dict[str, float]:
    """Microseconds of the host: of a pass that is measured, and of a look at the last steps of 2, 8 and 1,000 devices."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meter, action = Meter(device), Action(Kind.FORWARD, 0, 0)

    def run() -> None:
        meter.run_begins()
        for _ in range(num_passes):
            meter.begin(action)
            meter.end()
        meter.run_ends()
        meter.busy_seconds()

    def timed(call: Callable[[], object]) -> float:
        found = []
        for _ in range(num_runs):
            begun = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun)
        return 1e6 * statistics.median(found)

    found = {"pass": timed(run) / num_passes}
    for num in (2, 8, 1000):
        names, busy = tuple(map(str, range(num))), (0.1,) * num
        steps = [(number, busy) for number in range(WINDOW)]
        found[f"look_{num}"] = timed(lambda names=names, busy=busy, steps=steps: Health.of(steps, names, busy, {}))  # type: ignore[misc]
    return found


def show(found: Result) -> None:
    print(f"rows {found.rows[0]}; cut found after {found.steps_to_move} steps, rows {found.rows[1]}; back after {found.steps_back} steps")
    print(
        f"per step: {1e3 * found.undisturbed_seconds:.0f} ms undisturbed, {1e3 * found.throttled_seconds:.0f} ms throttled, "
        f"{1e3 * found.moved_seconds:.0f} ms moved, {1e3 * found.planned_seconds:.0f} ms planned for it, "
        f"{1e3 * found.stayed_seconds:.0f} ms staying"
    )
    print(f"throughput after the move: {found.of_planned:.2f} of the run planned for it, {found.against_staying:.2f} x staying")
    print(f"load {found.load:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"before": 20, "most": 40, "blocks": 5, "steps": 2, "layers": 2, "width": 256, "context": 64, "rows": 32, "stages": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--share", type=float, default=0.33, help="of a core, that one rank is cut to (default 0.33)")
    parser.add_argument(
        "--slowdown", type=float, metavar="N", help="that the second run is planned for (default 1 / share: of a machine with idle cores)"
    )
    parser.add_argument("--following", action="store_true", help="measure what following costs by itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    if options.following:
        data: dict[str, object] = dict(following())
        print(", ".join(f"{name} {value:.2f} us" for name, value in data.items()))
    else:
        result = on_ranks(2, run_ranks, options, shares=(1.0, 1.0))
        show(result)
        data = asdict(result)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
