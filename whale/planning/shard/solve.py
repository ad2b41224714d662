"""The best labels of a sharding problem: by elimination where that settles it, else by the integer program."""

from __future__ import annotations

from collections.abc import Collection

from whale.planning.shard.integer import solve_integer
from whale.planning.shard.program import Program, Selection
from whale.planning.shard.settle import Unsettled, settle


def solve(program: Program, other_than: Collection[int] | None = None) -> Selection | None:
    """The best labels.

    Args:
        program: the problem.
        other_than: a set of kinds that is not to be found again, for the runner-up.

    Returns:
        None where there are none.
    """
    try:
        return settle(program, other_than)
    except Unsettled:
        return solve_integer(program, other_than)
