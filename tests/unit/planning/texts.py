"""Plans as golden texts: without times, which change whenever a cost does."""

from __future__ import annotations

import re

from whale.ir.plan import Plan
from whale.planning.explain import explain

_TIME = re.compile(r"\b\d[\d.]* (?:ns|us|ms|s|min|h)\b|\bbubble rate [\d.]+")


def plan_text(plan: Plan) -> str:
    """A plan with the reasons for it; every time is ``#``."""
    return _TIME.sub("#", "\n".join([str(plan), "", *(" | ".join(row) for row in explain(plan))]))
