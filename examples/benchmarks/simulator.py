"""The scoreboard of the simulator: predicted beside measured times of runs that others published.

    python examples/benchmarks/simulator.py --data DIR --json simulator.json --page simulator.md

DIR holds a100_multi_node.csv, a100_single_node.csv, t4_sixteen.csv and published.yaml. Error = (predicted - measured) / measured.
The figures of the catalogue were fitted on some rows of each set, named in `FITTED`; the errors of the others are told apart. Beside them
stands what one constant share of the peak (MFU), the best one for the very same rows, gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from picks import picks
from predicted import SETS, Result, predict
from runs import RULES, Run

FITTED = {
    "multi-node A100": slice(0, None, 5),
    "one host of A100": slice(0, None, 14),
    "SC'21 Table 1": slice(1, None, 3),
    "sequence-parallel Table 5": slice(0, 6),
    "16 T4": slice(0, None, 2),
}
"""The rows of each file at which the figures of the catalogue were fitted."""


def score(results: Sequence[Result]) -> dict[str, object]:
    """The figures of one set."""
    ran = [each for each in results if each.predicted is not None]
    errors = [abs(each.error) for each in ran]
    parts = {name: [abs(each.error) for each in ran if each.fitted == fitted] for name, fitted in (("fitted", True), ("tested", False))}
    losses = [pick.loss for pick in picks(ran)]
    return {
        "rows": len(results),
        "refused": len(results) - len(ran),
        "over_memory": sum(each.peak > each.capacity for each in ran),
        "mean_error": statistics.fmean(errors),
        "median_error": statistics.median(errors),
        "worst_error": max((each.error for each in ran), key=abs),
        "bias": statistics.fmean(each.error for each in ran),
        "mean_error_fitted": statistics.fmean(parts["fitted"]) if parts["fitted"] else None,
        "mean_error_tested": statistics.fmean(parts["tested"]) if parts["tested"] else None,
        "rank_correlation": rank_correlation([each.predicted or 0.0 for each in ran], [each.run.seconds for each in ran]),
        "constant_mfu_error": constant_mfu_error([each.run for each in ran]),
        "picks": len(losses),
        "mean_loss_of_picks": statistics.fmean(losses) if losses else None,
        "worst_loss_of_picks": max(losses) if losses else None,
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; None of fewer than two."""
    if len(first) < 2:
        return None
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each among all; equal ones share theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def constant_mfu_error(runs: Sequence[Run]) -> float:
    """The mean error of the one share of the peak that makes it least."""
    shares = [run.constant_mfu_seconds / run.seconds for run in runs]  # the sum of errors bends at these alone
    return min(statistics.fmean(abs(run.constant_mfu_seconds / share / run.seconds - 1) for run in runs) for share in shares)


def page(found: dict[str, list[Result]], scores: dict[str, dict[str, object]], command: str) -> str:
    """The scoreboard as Markdown."""
    head = (
        "| set | rows | refused | over memory | mean error | fitted | others | median | worst | bias | rank correlation | constant MFU "
        "| best picked within |"
    )
    lines = [head, "|" + " --- |" * 13]
    for name, own in scores.items():
        counts = [str(own[key]) for key in ("rows", "refused", "over_memory")]
        errors = [
            _percent(own[key]) for key in ("mean_error", "mean_error_fitted", "mean_error_tested", "median_error", "worst_error", "bias")
        ]
        correlation = "-" if own["rank_correlation"] is None else f"{own['rank_correlation']:.3f}"
        picks = (
            "-"
            if own["worst_loss_of_picks"] is None
            else f"{_percent(own['mean_loss_of_picks'])}, worst {_percent(own['worst_loss_of_picks'])}"
        )
        lines.append("| " + " | ".join([name, *counts, *errors, correlation, _percent(own["constant_mfu_error"]), picks]) + " |")
    sources = [f"- {name}: {SETS[name][2]}." for name in found]
    worst = ["| set | run | measured | predicted | error |", "| --- | --- | --- | --- | --- |"]
    for name, results in found.items():
        ran = sorted((each for each in results if each.predicted is not None), key=lambda each: -abs(each.error))
        for each in ran[:5]:
            worst.append(f"| {name} | {each.run} | {each.run.seconds:.3f} s | {each.predicted:.3f} s | {_percent(each.error)} |")
    return TEMPLATE.format(command=command, table="\n".join(lines), sources="\n".join(sources), rules=RULES, worst="\n".join(worst))


def _percent(value: object) -> str:
    return "-" if value is None else f"{100 * float(value):.1f}%"  # type: ignore[arg-type]


TEMPLATE = """# What the simulator is worth on published runs

`examples/benchmarks/simulator.py` simulates runs that others measured, each as it was run, and sets the two times side by side. Made by

```bash
{command}
```

{table}

Error = (predicted - measured) / measured. *Fitted*: the rows at which figures of the catalogue were fitted (`FITTED` in the script);
*others*: all that were not. *Constant MFU*: the mean error of the one share of the peak that is best for the same rows. *Best picked
within*: of plans for one model, batch and number of devices, how much longer the one predicted best took than the best. *Over memory*: rows
whose predicted peak is more than the device has, though they ran.

{sources}

{rules}

The worst rows of each set:

{worst}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured figures")
    parser.add_argument("--json", type=Path, help="write all results")
    parser.add_argument("--page", type=Path, help="write the scoreboard as Markdown")
    parser.add_argument("--only", action="append", choices=SETS, help="these sets alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at the same time")
    parser.add_argument("--every", type=int, default=1, help="of the host of A100, simulate each so many-th row")
    options = parser.parse_args()
    found: dict[str, list[Result]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in options.only or SETS:
            file, reader, _ = SETS[name]
            runs = list(reader(options.data / file))
            fitted = set(range(len(runs))[FITTED[name]])
            every = options.every if name == "one host of A100" else 1
            found[name] = []
            chosen = range(len(runs))[::every]
            for result in pool.map(predict, (runs[index] for index in chosen), (index in fitted for index in chosen)):
                found[name].append(result)
                print(f"{name}: {result}", flush=True)
    scores = {name: score(results) for name, results in found.items()}
    print(json.dumps(scores, indent=1))
    if options.json:
        rows = {
            name: [
                {"run": str(each.run), "measured": each.run.seconds, "predicted": each.predicted, "peak_bytes": each.peak} for each in own
            ]
            for name, own in found.items()
        }
        options.json.write_text(json.dumps({"scores": scores, "rows": rows}, indent=1))
    if options.page:
        every = f" --every {options.every}" if options.every > 1 else ""
        options.page.write_text(
            page(
                found,
                scores,
                f"python examples/benchmarks/simulator.py --data DIR --json simulator.json --page simulator.md{every}",
            )
        )


if __name__ == "__main__":
    main()
