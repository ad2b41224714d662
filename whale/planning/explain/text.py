"""Why a plan is as it is, as rows of text for a table."""

from __future__ import annotations

from whale.ir.plan import Plan

COLUMNS = ("pass", "choice", "decision", "cost", "bound by", "runner-up")


def explain(plan: Plan) -> list[tuple[str, ...]]:
    """One row per choice, in the order of `COLUMNS`."""
    return [(c.pass_name, c.subject, c.decision, c.cost, c.bound, c.runner_up) for c in plan.choices]
