"""Plans as golden texts: without times, which change whenever a cost does."""

from __future__ import annotations

import re

from whale.ir.plan import Plan

_TIME = re.compile(r"\b\d[\d.]* (?:ns|us|ms|s|min|h)\b|\bbubble rate [\d.]+")


def plan_text(plan: Plan) -> str:
    """A plan with the reasons for it; every time is ``#``."""
    choices = (" | ".join((c.pass_name, c.subject, c.decision, c.cost, c.bound, c.runner_up)) for c in plan.choices)
    return _TIME.sub("#", "\n".join([str(plan), "", *choices]))
