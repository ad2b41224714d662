"""Why something in a plan is as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision of a planner pass, for `whale explain`.

    Attributes:
        pass_name: the pass that decided (``balance``).
        subject: what was decided (``rows of replica 0``).
        decision: the outcome.
        cost: what it costs, in words with units.
        bound: what bound it (``memory of host1/0``, ``the slowest device``); "" where nothing did.
        runner_up: the next best and its cost; "" where there was no other.
    """

    pass_name: str
    subject: str
    decision: str
    cost: str = ""
    bound: str = ""
    runner_up: str = ""
