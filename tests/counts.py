"""What a run of the tests has forked and captured, counted where ``WHALE_TEST_COUNTS`` names a file; else nothing is done.

Each event is a line of it, such as `gw0 captures`: also those of forked ranks and launchers, which add to it by themselves.
`sort FILE | uniq -c` is the table; `totals` has it without the workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

VARIABLE = "WHALE_TEST_COUNTS"


def count(what: str, number: int = 1) -> None:
    """Notes that so many of these have been made by this worker."""
    if path := os.environ.get(VARIABLE):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        with open(path, "ab", buffering=0) as file:  # one write, so that lines of several processes stay whole
            file.write(f"{worker} {what}\n".encode() * number)


PAGE = Path(__file__).parent / "golden" / "suite.json"
MOST = 1.03
"""How much more than on the page there may be, of what does not depend on which worker runs which file."""


def main() -> None:
    """Prints what a run of all tests has made; fails where it is more than the page says."""
    found, then = totals(Path(sys.argv[1])), json.loads(PAGE.read_text())
    print("; ".join(f"{what}: {number:,}" for what, number in found.items()))
    grown = [f"{what}: {then[what]:,} -> {found[what]:,}" for what in then if found.get(what, 0) > MOST * then[what]]
    if grown:
        raise SystemExit(f"the tests fork more than tests/golden/suite.json says: {'; '.join(grown)}; update it, and say why")


def totals(path: Path) -> dict[str, int]:
    """How many of each there have been, by all workers."""
    return dict(sorted(Counter(line.split(" ", 1)[1] for line in path.read_text().splitlines()).items()))


if __name__ == "__main__":
    main()
