"""Which models just work: a zoo of tiny models with random weights, each under four plans, against the plain loop.

    pip install .[test,zoo]
    python examples/benchmarks/models.py --jobs 2 --json models.json --page models.md
    python examples/benchmarks/models.py --only 'timm/*' --json models.json       # these anew, the others as the file has them
    python examples/benchmarks/models.py --operators tests/golden/zoo_operators.txt      # of which a test lists those without an entry

data parallel   a copy of the model on either of two ranks
uneven          the same, with three times as many rows on the second rank
pipeline        two stages, found by the planner, and two micro-batches
split           every layer divided over both ranks, as the planner chooses

The plain loop trains the unmodified model for two steps on the whole batch in one process. A cell is

exact     both losses, every gradient and every weight and buffer at the end are those of the plain loop
warned    they differ, and a warning said so
refused   an error of Whale's, with its reason
raised    another error, or no end
WRONG     they differ, and nothing was said
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests, whose ranks and oracle this uses

from zoo import LIBRARIES, entries_of
from zoo.cell import Cell
from zoo.cells import SETTINGS, capture_entry, captured, cell_of, failed, one_line, plain_rank
from zoo.page import page

from tests.distributed.world import RankFailure, World

Row = dict[str, Cell]
"""The cells of a model, by plan."""


@dataclass
class Progress:
    """What has been found so far, written after every model so that nothing is lost."""

    rows: dict[str, Row]
    file: Path | None

    def add(self, name: str, row: Row, seconds: float) -> None:
        self.rows[name] = row
        cells = "  ".join(f"{plan}: {cell.kind}" for plan, cell in row.items())
        print(f"{name:<45} {cells}   {seconds:.0f} s", flush=True)
        for reason in dict.fromkeys(cell.reason for cell in row.values() if cell.reason):
            print(f"    {reason}", flush=True)
        if self.file is not None:
            rows = {name: {plan: asdict(cell) for plan, cell in row.items()} for name, row in sorted(self.rows.items())}
            self.file.write_text(json.dumps(rows, indent=1) + "\n")


def row_of(world: World, name: str, plans: list[str], seconds: float) -> Row:
    """Trains one model by the plain loop and under every plan.

    Raises:
        RankFailure: the plain loop failed, so the entry is no model.
    """
    (expected,) = world.run(plain_rank, name, num_ranks=1, timeout=seconds)
    try:
        world.prepare(capture_entry, name, timeout=seconds)
    except Exception as error:
        failure = (
            error if isinstance(error, RankFailure) else RankFailure({0: error}, {0: f"{type(error).__name__}: {one_line(str(error))}"})
        )
        return dict.fromkeys(plans, failed(failure))
    return {plan: cell_of(world, name, plan, expected, seconds) for plan in plans}


def run_all(names: list[str], options: argparse.Namespace, progress: Progress) -> list[str]:
    """Runs the models by as many worlds as there are jobs; gives the entries whose plain loop failed."""
    pending: SimpleQueue[str] = SimpleQueue()
    for name in names:
        pending.put(name)

    def work() -> list[str]:
        broken = []
        with World(2) as world:
            while not pending.empty():
                name, begin = pending.get(), time.monotonic()
                try:
                    progress.add(name, row_of(world, name, options.plan or list(SETTINGS), options.timeout), time.monotonic() - begin)
                except RankFailure as failure:
                    print(f"{name}: the plain loop fails\n{failure}", flush=True)
                    broken.append(name)
        return broken

    with ThreadPoolExecutor(options.jobs) as pool:
        return [name for found in [pool.submit(work) for _ in range(options.jobs)] for name in found.result()]


def operators_of(names: list[str]) -> list[str]:
    """The operators of torch's that the captures of some models call."""
    found: set[str] = set()
    for name in names:
        try:
            graph, _ = captured(name).capture()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {one_line(str(error))}", flush=True)
        else:
            found |= {op.target for op in graph.ops if op.outputs and op.target.startswith("aten.")}
    return sorted(found)


def known_rows(file: Path | None) -> dict[str, Row]:
    """The rows that a file has from earlier runs."""
    if file is None or not file.exists():
        return {}
    return {name: {plan: Cell(**cell) for plan, cell in row.items()} for name, row in json.loads(file.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="models whose name matches, as library/model; repeatable")
    parser.add_argument("--failing", action="store_true", help="models that --json has a cell of which is not exact, or none")
    parser.add_argument("--plan", action="append", choices=SETTINGS, help="one plan only; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, each on two ranks")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="of a cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here; models that do not run keep those it has")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of all results here")
    parser.add_argument("--operators", type=Path, metavar="FILE", help="capture only, and write what operators are called")
    options = parser.parse_args()
    progress = Progress(known_rows(options.json), options.json)
    names = [name for library in LIBRARIES for name in entries_of(library) if any(fnmatch(name, each) for each in options.only or ["*"])]
    if options.failing:
        names = [name for name in names if any(cell.kind != "exact" for cell in progress.rows.get(name, {"": Cell("raised")}).values())]
    if options.operators is not None:
        options.operators.write_text("\n".join(operators_of(names)) + "\n")
        return 0
    broken = run_all(names, options, progress)
    if options.page is not None:
        options.page.write_text(page(progress.rows))
    return 1 if broken or any(cell.kind in ("raised", "WRONG") for row in progress.rows.values() for cell in row.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
