"""Faults in a run of four ranks on two "hosts" (launchers of `whale run --elastic`): what each costs, and whether losses stay the same.

    python examples/benchmarks/faults.py --faults 10 --json faults.json

A rank drawn by the seed is killed (SIGKILL), stopped (SIGSTOP) or told to end (SIGTERM), at a step drawn by it. The losses are held to
those of one rank that nothing happens to. The seconds from a fault to the next new step fall into:

    end       until ranks have begun anew: the loss is noticed, survivors leave what they hold and end, launchers meet
    import    of torch and whale
    open      capture (kept on disk), plan, process groups, weights
    state     from memory of the survivors, or the newest checkpoint
    first     the step itself
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

HOW = ("SIGKILL", "SIGSTOP", "SIGTERM")
PARTS = ("end", "import", "open", "state", "first")
NUM_RANKS = 4
BEGUN = time.time()


def train(folder: Path, num_steps: int) -> None:
    """What each rank does: it tells each event with its time; after the last step it waits for nobody."""
    import torch
    import torch.distributed as dist

    import whale

    imported = time.time()
    torch.manual_seed(0)
    samples = list(torch.randn(4096, 64, dtype=torch.float64))
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    engine = whale.parallelize(
        torch.nn.Sequential(*layers).double(),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch=torch.stack(samples[:64]),
    )
    opened = time.time()
    loader = engine.loader(samples, global_batch_size=64, shuffle=True)
    engine.resume(folder / "checkpoints")
    resumed = time.time()
    rank = dist.get_rank() if dist.is_initialized() else 0
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    while engine.step_number < num_steps:
        for batch in loader:
            loss = float(engine.step(batch))
            if rank == 0:
                times = {"begun": BEGUN, "imported": imported, "opened": opened, "resumed": resumed, "stepped": time.time()}
                with open(folder / "steps.jsonl", "a") as file:
                    file.write(json.dumps({"step": engine.step_number, "loss": loss, **times}) + "\n")
            if engine.step_number % 50 == 0:
                engine.save(folder / "checkpoints" / f"step_{engine.step_number}", keep=2)
            if engine.step_number == num_steps:
                break
            time.sleep(0.02)  # a step of some size
    engine.close()


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has told."""
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def await_step(folder: Path, step: int, after: float, limit: float) -> dict[str, Any]:
    """The first telling of a step of at least this number, by ranks that have begun after a time."""
    until = time.time() + limit
    while time.time() < until:
        for told in steps_in(folder):
            if told["step"] >= step and told["begun"] >= after:
                return told
        time.sleep(0.02)
    raise TimeoutError(f"no step {step} within {limit:g} s")


def measure(folder: Path, faults: int, seed: int, gap: int, limit: float) -> dict[str, Any]:
    """A run with its faults, and the comparison."""
    from torch.distributed import TCPStore

    draw, store = random.Random(seed), TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    num_steps = (faults + 1) * (gap + 5)
    place = ["--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", "is_host=0", "--local-addr", "localhost"]
    words = [__file__, "--rank-of", str(folder), "--steps", str(num_steps)]
    command = [sys.executable, "-m", "whale", "run", "--elastic", "2", *place, "--ranks", "2", *words]
    environment = {**os.environ, "WHALE_PLANNING_SEARCH": "off"}
    with open(folder / "log", "w") as log:
        launchers = [subprocess.Popen(command, stderr=log, env=environment) for _ in range(2)]
    found = []
    try:
        told = await_step(folder, 1, 0.0, limit)
        for _ in range(faults):
            step, how, rank = told["step"] + draw.randint(2, gap), draw.choice(HOW), draw.randrange(NUM_RANKS)
            told = await_step(folder, step, 0.0, limit)
            when, before = time.time(), max(each["step"] for each in steps_in(folder))
            os.kill(int((folder / f"pid_{rank}").read_text()), signal.Signals[how])
            told = await_step(folder, before + 1, when, limit)
            marks = [when, *(told[name] for name in ("begun", "imported", "opened", "resumed", "stepped"))]
            parts = {name: stop - start for name, start, stop in zip(PARTS, marks, marks[1:], strict=False)}
            found.append({"how": how, "rank": rank, "step": before, "seconds": marks[-1] - when, **parts})
            print(f"{how} to rank {rank} after step {before}: {marks[-1] - when:.1f} s, goes on with step {told['step']}", flush=True)
        codes = [launcher.wait(limit) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    alone = folder / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, __file__, "--rank-of", str(alone), "--steps", str(num_steps)], check=True)
    losses, undisturbed = ({each["step"]: each["loss"] for each in steps_in(place)} for place in (folder, alone))
    worst = max(abs(losses[step] / loss - 1) for step, loss in undisturbed.items())
    lost = [int(number) for number in re.findall(r"lost: [\d.]+ s, (\d+) step", (folder / "log").read_text())]
    medians = {name: statistics.median(each[name] for each in found) for name in ("seconds", *PARTS)}
    return {"seed": seed, "exit_codes": codes, "worst_loss_error": worst, "steps_lost": sum(lost), "median": medians, "faults": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--faults", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--gap", type=int, default=20, help="most steps from one fault to the next")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a run that stands still is given up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        train(options.rank_of, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.faults, options.seed, options.gap, options.limit)
    print(json.dumps({name: value for name, value in found.items() if name != "faults"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
