"""What recording a step costs: a pipeline of two ranks with each step recorded, beside the same without, pair by pair.

    python examples/benchmarks/tracing.py --pairs 7

Two figures are the recorded and the plain engine's time per step. That of the recorded one has all in it that a recorded step brings: the
notes of each action, the comparison of clocks before it, and what rank 0 gathers and writes behind it, which grows with the steps that
are recorded (three in a run, by default).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from overhead import Step, measure, whale_step
from ranks import Result, on_ranks

PIPELINE: dict[str, object] = {"pipeline.schedule": "1f1b"}
WITHOUT_END = 1_000_000


def sides(options: argparse.Namespace, folder: str) -> tuple[Step, Step]:
    """The recorded engine's step and the plain one's."""
    plain = PIPELINE | {"pipeline.num_micro_batch": options.micro_batches}
    traced = plain | {"trace.directory": folder, "trace.first_step": 0, "trace.num_steps": WITHOUT_END}
    return whale_step(options, 2, traced), whale_step(options, 2, plain)


def run(options: argparse.Namespace) -> Result:
    """On each rank; rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(*sides(options, folder), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = {"pairs": 7, "steps": 1, "warmup": 3, "layers": 4, "width": 128, "context": 64, "rows": 16, "micro-batches": 4}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    found = on_ranks(2, run, options)
    more, cpu_more = (1e3 * (found[f"whale_{what}"] - found[f"peer_{what}"]) for what in ("seconds", "cpu_seconds"))
    recorded, alone = (1e3 * found[f"{side}_seconds"] for side in ("whale", "peer"))
    print(
        f"recorded {recorded:.1f} ms, plain {alone:.1f} ms per step ({found['num_pairs']} pairs): "
        f"{more:.1f} ms more, {cpu_more:.1f} ms of CPU of all ranks"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
