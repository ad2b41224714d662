"""The page of all results: the shares, why what is not exact is not, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby

from zoo import LIBRARIES
from zoo.cell import Cell

INTRODUCTION = """\
# Which models just work

`examples/benchmarks/models.py` trains tiny models with random weights, that were not written for Whale, under four plans on two Gloo ranks,
and holds every number against the plain loop: the unmodified model on the whole batch in one process, two steps of gradient descent
with momentum, dropout at zero. This page is written by the command; a row is of its model's last run:

```bash
pip install .[test,zoo]
python examples/benchmarks/models.py --jobs 2 --json models.json --page models.md
python examples/benchmarks/models.py --only 'timm/*' --json models.json
```

| plan | what it is |
|---|---|
| data parallel | a copy of the model on either rank |
| uneven | the same, with three times as many rows on the second rank |
| pipeline | two stages, cut where the planner finds best, and two micro-batches |
| split | every layer divided over both ranks, as the planner chooses |

| cell | means |
|---|---|
| exact | both losses, all gradients, weights and buffers are those of the plain loop, to 1e-5 of the largest (1e-4 in float32) |
| warned | they differ, and a warning said so, with its line |
| refused | an error of Whale's says what the model does that is not supported |
| raised | another error, or no end within the time: a defect |
| WRONG | they differ, and nothing was said: a defect |
"""


def page(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """The page, from the cells of each model by plan."""
    parts = [INTRODUCTION, "## The shares\n", *shares(rows), "", *reasons(rows), "## The table\n", *table(rows)]
    return "\n".join(parts).rstrip() + "\n"


def just_works(plan: str, cell: Cell) -> bool:
    """Whether a model is trained as asked: with the numbers of the plain loop, or, in micro-batches, with others that a warning told of."""
    return cell.kind == "exact" or (plan == "pipeline" and cell.kind == "warned")


def shares(rows: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """How many models just work, and what became of all cells under each plan."""
    just = sum(all(just_works(plan, cell) for plan, cell in row.items()) for row in rows.values())
    exact = sum(all(cell.kind == "exact" for cell in row.values()) for row in rows.values())
    cells = [cell for row in rows.values() for cell in row.values()]
    in_cells = sum(cell.kind == "exact" for cell in cells)
    yield (
        f"Of {len(rows)} models {just} ({just / len(rows):.0%}) just work under every plan: exact, or, where samples depend on one "
        "another and a pipeline takes them in micro-batches, warned of before the first step.\n"
    )
    yield (
        f"{exact} models ({exact / len(rows):.0%}) are exact under all four plans; of {len(cells)} cells "
        f"{in_cells} ({in_cells / len(cells):.0%}) are.\n"
    )
    kinds = ("exact", "warned", "refused", "raised", "WRONG")
    yield f"| plan | {' | '.join(kinds)} |"
    yield "|---" * (1 + len(kinds)) + "|"
    for plan in next(iter(rows.values())):
        found = [row[plan].kind for row in rows.values()]
        yield f"| {plan} | {' | '.join(str(found.count(kind)) for kind in kinds)} |"
    yield ""
    yield f"With {', '.join(versions())}, on CPU ranks."


def versions() -> Iterator[str]:
    """The libraries that are here."""
    for library in LIBRARIES:
        try:
            yield f"{library} {version(library)}"
        except PackageNotFoundError:
            continue


def reasons(rows: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """What was said where a model is not exact, each reason once, with its models and plans."""
    said = sorted((cell.kind, name, cell.reason, plan) for name, row in rows.items() for plan, cell in row.items() if cell.kind != "exact")
    if not said:
        return
    yield "## What is not exact, and why\n"
    yield "| model | plans | cell | what was said |"
    yield "|---|---|---|---|"
    for (kind, name, reason), group in groupby(said, key=lambda each: each[:3]):
        plans = [plan for *_, plan in group]
        which = "all" if len(plans) == len(rows[name]) else ", ".join(sorted(plans))
        yield f"| {name} | {which} | {kind} | {escaped(reason)} |"
    yield ""


def table(rows: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """A line for every model."""
    plans = list(next(iter(rows.values())))
    yield f"| model | {' | '.join(plans)} |"
    yield "|---" * (1 + len(plans)) + "|"
    ordered = sorted(rows, key=lambda name: (list(LIBRARIES).index(name.partition("/")[0]), name))
    for name in ordered:
        yield f"| {name} | {' | '.join(cell.kind for cell in rows[name].values())} |"


def escaped(text: str) -> str:
    """Text for a cell of a table, where a bar would end it and angle brackets would vanish."""
    return text.replace("|", "\\|").replace("<", "&lt;")
