"""With its usual effort the search finds what is as good as the best (examples/benchmarks/regret.py draws more, and larger ones)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "benchmarks"))

from regret import outcome


@pytest.mark.slow
def test_little_is_given_away() -> None:
    regrets = [outcome(number, 2).regret for number in range(6)]
    assert max(regrets) <= 0.05 and sum(regrets) / len(regrets) <= 0.005, regrets
