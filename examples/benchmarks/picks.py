"""Whether the plan that is predicted best among measured ones is the best: per model and number of devices, and what stands in the way.

    python examples/benchmarks/picks.py --data DIR --page picks.md

DIR is that of `simulator.py`. A question is one model, one number of devices and one batch; its answers are the plans that were measured.
What repeated runs scatter by, and what the same simulation answers once its times are set right by runs of other depths, stand beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from predicted import SETS, Result, predict
from runs import Run
from scipy.optimize import nnls

AIM = 0.03
ERRORS = (0.01, 0.03, 0.05)
"""Standard deviations of predictions that err by chance alone."""

NUM_DRAWS = 200


@dataclass(frozen=True)
class Pick:
    """The answer to one question.

    Attributes:
        picked: the plan that is predicted best.
        best: the one that was measured best.
        num_plans: that were measured.
    """

    picked: Result
    best: Result
    num_plans: int

    @property
    def loss(self) -> float:
        """How much longer the picked one took, as a share of the best."""
        return self.picked.run.seconds / self.best.run.seconds - 1


def picks(results: Sequence[Result]) -> Iterator[Pick]:
    """The answers to all questions with more than one plan, of those that were not refused."""
    groups: dict[object, list[Result]] = {}
    for each in results:
        if each.predicted is not None:
            groups.setdefault(each.run.question, []).append(each)
    for own in groups.values():
        if len(own) > 1:
            yield Pick(min(own, key=lambda each: each.predicted or 0.0), min(own, key=lambda each: each.run.seconds), len(own))


def calibrated(results: Sequence[Result]) -> list[Result]:
    """The predictions, each times the median of measured / predicted of the runs of other depths that are alike in what a block computes.

    Alike are the sizes of the model, the tensor-parallel devices and the rows of a micro-batch: no run of the same depth is looked at, so
    none of the same question. Where there is none that is alike, the prediction stays.
    """
    ran = [each for each in results if each.predicted is not None]
    found = []
    for each in ran:
        ratios = [1 / (1 + other.error) for other in _of_other_depths(each, ran)]
        found.append(replace(each, predicted=(each.predicted or 0.0) * (statistics.median(ratios) if ratios else 1.0)))
    return found


def by_blocks(results: Sequence[Result]) -> list[Result]:
    """The runs by times of their blocks, of which runs of other depths tell: no prediction of ours is in them.

    Of m micro-batches in p equal stages in one direction, a block a, the rest of the last stage b and of a step, per layer, c:

        a (m + p - 1) layers / p  +  b m  +  c layers

    Where fewer than three such runs are alike, the prediction is that of `calibrated`.
    """
    found = []
    for each in calibrated(results):
        known = [other for other in _of_other_depths(each, results) if "schedule" not in other.run.plan]
        if len(known) >= len(_terms(each.run)) and "schedule" not in each.run.plan:
            shares = np.array([[term / other.run.seconds for term in _terms(other.run)] for other in known])
            seconds, _ = nnls(shares, np.ones(len(known)))  # errors relative to what was measured
            each = replace(each, predicted=float(seconds @ _terms(each.run)))
        found.append(each)
    return found


def _terms(run: Run) -> tuple[float, float, float]:
    stages = run.plan["num_stages"]
    micro_batches = run.batch / run.plan["replicas"] / run.plan["micro_batch_rows"]
    return (micro_batches + stages - 1) * run.layers / stages, micro_batches, float(run.layers)


def _of_other_depths(result: Result, others: Sequence[Result]) -> list[Result]:
    """Those of the others whose blocks compute the same in another number of layers."""
    run = result.run
    return [other for other in others if _block(other.run) == _block(run) and other.run.layers != run.layers]


def _block(run: Run) -> Hashable:
    """Equal for runs whose blocks compute the same on each device."""
    sizes = run.hidden, run.heads, run.sequence, run.device, run.network
    return *sizes, run.plan.get("split", 1), run.plan["micro_batch_rows"], run.plan["recompute"]


def repeats(runs: Sequence[Run]) -> list[float]:
    """By how much each of some runs is off the geometric mean of those that differ from it in the number of replicas alone.

    Of two replicas and more, with the batch in proportion: all devices do the same work but for the sum of gradients.
    """
    groups: dict[object, list[float]] = {}
    for run in runs:
        replicas = run.plan["replicas"]
        if replicas > 1:
            key = _block(run), run.layers, run.plan["num_stages"], str(run.plan.get("blocks")), run.batch // replicas
            groups.setdefault(key, []).append(run.seconds)
    return [each / statistics.geometric_mean(own) - 1 for own in groups.values() if len(own) > 1 for each in own]


def by_chance(results: Sequence[Result], deviation: float, seed: int = 0) -> tuple[float, float]:
    """Questions answered within the aim, and the mean loss, where predictions are what was measured with an error by chance.

    Args:
        deviation: standard deviation of the logarithm of the error.
    """
    chance = random.Random(seed)
    draws = []
    for _ in range(NUM_DRAWS):
        drawn = [replace(each, predicted=each.run.seconds * math.exp(chance.gauss(0, deviation))) for each in results]
        draws.append([pick.loss for pick in picks(drawn)])
    return statistics.fmean(map(_near, draws)), statistics.fmean(map(statistics.fmean, draws))


def _near(losses: Sequence[float]) -> int:
    return sum(loss <= AIM for loss in losses)


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
            run = pick.best.run
            models.setdefault((run.num_devices, run.layers, run.hidden), []).append(pick)
        for (devices, layers, hidden), answers in sorted(models.items()):
            losses = [pick.loss for pick in answers]
            worst = max(answers, key=lambda pick: pick.loss)
            within = f"{_near(losses)} of {len(losses)}"
            figures = f"{statistics.fmean(losses):.1%} | {worst.loss:.1%}"
            plans = f"{_plan(worst.picked.run)} | {_plan(worst.best.run)}" if worst.loss > 0 else "the same | "
            count = sum(pick.num_plans for pick in answers)
            yield f"| {name} | {layers} x {hidden} | {devices} | {len(losses)} | {count} | {within} | {figures} | {plans} |"


def _plan(run: Run) -> str:
    return f"{str(run).partition(', ')[2]} of {run.batch}, {run.seconds:.3f} s"


def missed(found: dict[str, list[Pick]]) -> Iterator[str]:
    """Rows of Markdown: the questions that are not answered within the aim, by what is picked."""
    yield "| picked | model | devices | rows | took | error | best | took | error | loss |"
    yield "|" + " --- |" * 10
    for pick in sorted((pick for own in found.values() for pick in own if pick.loss > AIM), key=lambda pick: (_kind(pick), -pick.loss)):
        run, sides = pick.best.run, (pick.picked, pick.best)
        plans = [f"{_degrees(each.run)} | {each.run.seconds:.3f} s | {each.error:+.0%}" for each in sides]
        yield f"| {plans[0].split(' | ')[0]} | {run.layers} x {run.hidden} | {run.num_devices} | {run.batch} | " + " | ".join(
            [plans[0].partition(" | ")[2], plans[1], f"{pick.loss:.1%} |"]
        )


def _kind(pick: Pick) -> str:
    """The tensor-parallel devices and the rows of a micro-batch of what is picked: what a device computes at once."""
    plan = pick.picked.run.plan
    return f"t{plan.get('split', 1)} b{plan['micro_batch_rows']}"


def _degrees(run: Run) -> str:
    return str(run).split(", ")[1]


def limits(results: dict[str, list[Result]]) -> Iterator[str]:
    """Rows of Markdown: what other predictions would answer."""
    yield "| predictions | within 3% | mean loss |"
    yield "| --- | --- | --- |"
    fixed = {
        "as they are": [list(picks(own)) for own in results.values()],
        "set right by runs of other depths": [list(picks(calibrated(own))) for own in results.values()],
        "times of blocks from runs of other depths": [list(picks(by_blocks(own))) for own in results.values()],
    }
    for name, answers in fixed.items():
        losses = [pick.loss for own in answers for pick in own]
        yield f"| {name} | {_near(losses)} of {len(losses)} | {statistics.fmean(losses):.2%} |"
    for deviation in ERRORS:
        near, loss = by_chance([each for own in results.values() for each in own], deviation)
        yield f"| as measured, {deviation:.0%} off by chance | {near:.1f} of {len(losses)} | {loss:.2%} |"


def page(found: dict[str, list[Pick]], results: dict[str, list[Result]], every: int, only: Sequence[str]) -> str:
    """The page as Markdown, of every so many-th question of one host, and of these sets alone if any are named."""
    losses = [pick.loss for own in found.values() for pick in own]
    near = _near(losses)
    offs = repeats([each.run for own in results.values() for each in own])
    kinds = Counter(_kind(pick) for own in found.values() for pick in own if pick.loss > AIM)
    chosen = [*(["--every", str(every)] if every > 1 else ()), *(word for name in only for word in ("--only", name))]
    return TEMPLATE.format(
        command=shlex.join(["python", "examples/benchmarks/picks.py", "--data", "DIR", "--page", "picks.md", *chosen]),
        table="\n".join(table(found)),
        count=len(losses),
        near=near,
        share=near / len(losses),
        mean=statistics.fmean(losses),
        worst=max(losses),
        missed="\n".join(missed(found)),
        kinds=", ".join(f"{kind} of {count}" for kind, count in kinds.most_common()),
        limits="\n".join(limits(results)),
        num_repeats=len(offs),
        scatter=math.sqrt(statistics.fmean(off**2 for off in offs)) if offs else 0.0,
        off=max(map(abs, offs), default=0.0),
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

## What is missed

Picked were {kinds}. Errors are (predicted - measured) / measured.

{missed}

## What could be reached

{num_repeats} runs have others that differ from them in the number of replicas alone, which changes little but the sum of gradients:
they are {scatter:.2%} off each other's mean (root mean square; {off:.1%} at most). The data can be ordered:

{limits}

*Set right by runs of other depths*: each prediction times the median of measured / predicted of runs with other numbers of layers, of the
same hidden size, tensor-parallel devices and rows of a micro-batch. *Times of blocks*: three times for each of these, a block, what else a
micro-batch takes, and the step, by least squares from such runs alone, in the closed form of 1F1B. No run of the same question is among
them. Where no other depth was measured (other sets than one host of A100), the prediction stays as it is.
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
    all_results: dict[str, list[Result]] = {}
    for name in options.only or SETS:
        file, reader, _ = SETS[name]
        runs = list(reader(options.data / file))
        if options.every > 1 and name == "one host of A100":
            runs = list(_asked(runs, options.every))
        there = {(row["run"], row["measured"]): row["predicted"] for row in known.get(name, ())}
        results = [Result(run, there[key], 0.0, 0.0, False) for run in runs if (key := (str(run), run.seconds)) in there]
        for result in pool.map(predict, (run for run in runs if (str(run), run.seconds) not in there)):
            results.append(result)
            print(f"{name}: {result}", flush=True)
        if own := list(picks(results)):
            found[name], all_results[name] = own, results
    print("\n".join(table(found)))
    if options.page:
        options.page.write_text(page(found, all_results, options.every, options.only or ()))


if __name__ == "__main__":
    main()
