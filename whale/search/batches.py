"""Which number of rows of a range is best: a search for each, compared by what a sample takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.errors import WhaleError
from whale.ir.plan import Choice
from whale.search.result import SearchResult
from whale.units import counted


def numbers_of_rows(low: int, high: int) -> tuple[int, ...]:
    """The least of a range, twice, four times ... as many, and the most."""
    doubled = (low << exponent for exponent in range((high // low).bit_length()))
    return tuple(dict.fromkeys((*doubled, high)))


def best_batch(low: int, high: int, searched: Callable[[int], SearchResult]) -> SearchResult:
    """The outcome with the number of rows whose samples are best by the objective; its plan says what the others come to.

    Ctrl-C ends it with the best so far, if there is one.

    Args:
        low, high: the range.
        searched: searches with a number of rows.

    Raises:
        WhaleError: there is a plan for none of them; that of the fewest rows.
    """
    found, faults, is_whole = dict[int, SearchResult](), dict[int, WhaleError](), True
    for rows in numbers_of_rows(low, high):
        try:
            found[rows] = searched(rows)
        except WhaleError as fault:
            faults[rows] = fault
            continue
        except KeyboardInterrupt:
            if not found:
                raise
            is_whole = False
        if not is_whole or found[rows].was_interrupted:
            is_whole = False
            break
    if not found:
        raise next(iter(faults.values()))
    rows = min(found, key=lambda rows: found[rows].of_sample)
    others = [*(f"{other}: {_speed(each)}" for other, each in found.items() if other != rows), *(f"{other}: no plan" for other in faults)]
    interrupted = "" if is_whole else "; the search was interrupted: the best so far"
    choice = Choice(
        "search",
        "rows",
        f"{counted(rows, 'row')} of {low}..{high}, {_speed(found[rows])}",
        bound=f"a power of two times {low}, or {high}{interrupted}",
        runner_up="; ".join(others),
    )
    best = found[rows]
    return replace(best, plan=replace(best.plan, choices=(choice, *best.plan.choices)))


def _speed(found: SearchResult) -> str:
    return f"{found.plan.planned_rows / found.step.step_seconds:.4g} samples/s"
