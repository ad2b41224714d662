"""Whether the plan that is predicted best among measured ones is the best: per model and number of devices.

    python examples/benchmarks/picks.py --data DIR --page docs/benchmarks/picks.md

DIR is that of `simulator.py`. A question is one model, one number of devices and one batch; its answers are the plans that were measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from predicted import SETS, Result, predict
from runs import Run

AIM = 0.03


@dataclass(frozen=True)
class Pick:
    """The answer to one question.

    Attributes:
        picked: the plan that is predicted best.
        best: the one that was measured best.
        num_plans: that were measured.
    """

    picked: Run
    best: Run
    num_plans: int

    @property
    def loss(self) -> float:
        """How much longer the picked one took, as a share of the best."""
        return self.picked.seconds / self.best.seconds - 1


def picks(results: Sequence[Result]) -> Iterator[Pick]:
    """The answers to all questions with more than one plan, of those that were not refused."""
    groups: dict[object, list[Result]] = {}
    for each in results:
        if each.predicted is not None:
            groups.setdefault(each.run.question, []).append(each)
    for own in groups.values():
        if len(own) > 1:
            picked = min(own, key=lambda each: each.predicted or 0.0)
            yield Pick(picked.run, min((each.run for each in own), key=lambda run: run.seconds), len(own))


def _asked(runs: Iterable[Run], every: int) -> Iterator[Run]:
    """The runs of every so many-th question that has several answers."""
    questions: dict[object, list[Run]] = {}
    for run in runs:
        questions.setdefault(run.question, []).append(run)
    open_ones = [own for own in questions.values() if len(own) > 1]
    return (run for own in open_ones[::every] for run in own)


def table(found: dict[str, list[Pick]]) -> Iterator[str]:
    """Rows of Markdown: per set, model and number of devices."""
    yield "| set | model | devices | batches | plans | within 3% | mean loss | worst | picked there | best there |"
    yield "|" + " --- |" * 10
    for name, own in found.items():
        models: dict[tuple[int, int, int], list[Pick]] = {}
        for pick in own:
            models.setdefault((pick.best.num_devices, pick.best.layers, pick.best.hidden), []).append(pick)
        for (devices, layers, hidden), answers in sorted(models.items()):
            losses = [pick.loss for pick in answers]
            worst = max(answers, key=lambda pick: pick.loss)
            within = f"{sum(loss <= AIM for loss in losses)} of {len(losses)}"
            figures = f"{statistics.fmean(losses):.1%} | {worst.loss:.1%}"
            plans = f"{_plan(worst.picked)} | {_plan(worst.best)}" if worst.loss > 0 else "the same | "
            count = sum(pick.num_plans for pick in answers)
            yield f"| {name} | {layers} x {hidden} | {devices} | {len(losses)} | {count} | {within} | {figures} | {plans} |"


def _plan(run: Run) -> str:
    return f"{str(run).partition(', ')[2]} of {run.batch}, {run.seconds:.3f} s"


def page(found: dict[str, list[Pick]], every: int, only: Sequence[str]) -> str:
    """The page as Markdown, of every so many-th question of one host, and of these sets alone if any are named."""
    losses = [pick.loss for own in found.values() for pick in own]
    near = sum(loss <= AIM for loss in losses)
    chosen = [*(["--every", str(every)] if every > 1 else ()), *(word for name in only for word in ("--only", name))]
    return TEMPLATE.format(
        command=shlex.join(["python", "examples/benchmarks/picks.py", "--data", "DIR", "--page", "docs/benchmarks/picks.md", *chosen]),
        table="\n".join(table(found)),
        count=len(losses),
        near=near,
        share=near / len(losses),
        mean=statistics.fmean(losses),
        worst=max(losses),
        sampled=f" Of one host of A100 every {every}th question was asked." if every > 1 else "",
    )


TEMPLATE = """# Which of the measured plans would be picked

`examples/benchmarks/picks.py` simulates all plans that others measured for one model, number of devices and batch, and takes the one
that is predicted best. How much longer did that one take than the best of them? Made by

```bash
{command}
```

{near} of {count} questions ({share:.0%}) are answered within 3 % of the best; the mean loss is {mean:.1%}, the worst {worst:.1%}. The rules
for what the sources do not tell are those of [the scoreboard](simulator.md); nothing was fitted to picks.

{table}

A plan is written as t (tensor-parallel devices), d (replicas), p (stages), b (rows of a micro-batch), what is computed again, of the rows
of the batch.{sampled}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured figures")
    parser.add_argument("--page", type=Path, help="write the page as Markdown")
    parser.add_argument("--only", action="append", choices=SETS, help="these sets alone")
    parser.add_argument("--every", type=int, default=1, help="of the host of A100, ask each so many-th question")
    parser.add_argument("--known", type=Path, help="what simulator.py wrote with --json: runs that stand there are not simulated again")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at the same time")
    options = parser.parse_args()
    known = json.loads(options.known.read_text())["rows"] if options.known else {}
    pool = ProcessPoolExecutor(options.jobs)
    found: dict[str, list[Pick]] = {}
    for name in options.only or SETS:
        file, reader, _ = SETS[name]
        runs = list(_asked(reader(options.data / file), options.every if name == "one host of A100" else 1))
        there = {(row["run"], row["measured"]): row["predicted"] for row in known.get(name, ())}
        results = [Result(run, there[key], 0.0, 0.0, False) for run in runs if (key := (str(run), run.seconds)) in there]
        for result in pool.map(predict, (run for run in runs if (str(run), run.seconds) not in there)):
            results.append(result)
            print(f"{name}: {result}", flush=True)
        if own := list(picks(results)):
            found[name] = own
    print("\n".join(table(found)))
    if options.page:
        options.page.write_text(page(found, options.every, options.only or ()))


if __name__ == "__main__":
    main()
