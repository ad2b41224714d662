"""Run by test_elastic.py: trains and goes on, over faults that it causes itself; then holds the losses to an undisturbed training.

elastic_script.py FOLDER STEPS FAULT...    FAULT is STEP:RANK:WHAT, as 3:1:launcher or 4:0:KILL, each once
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import whale

FOLDER, NUM_STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


def cause(step: int, rank: int) -> None:
    """The fault of a step, on its rank."""
    for fault in FAULTS:
        when, who, what = fault.split(":")
        done = FOLDER / f"caused_{fault.replace(':', '_')}"
        if (int(when), int(who)) == (step, rank) and not done.exists():
            done.touch()
            if what == "launcher":
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            os.kill(os.getpid(), signal.Signals[f"SIG{what}"])


def train() -> None:
    torch.manual_seed(0)
    samples = list(torch.randn(40, 4, dtype=torch.float64))
    engine = whale.parallelize(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double(),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        batch=torch.stack(samples[:8]),
        config={"planning.search": "off"},  # all ranks hold all: a search may leave one idle that is to survive
    )
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loader = engine.loader(samples, global_batch_size=8, shuffle=True)
    engine.resume(FOLDER / "checkpoints")
    rows = [stop - start for start, stop in engine.plan.replica_rows(8)]
    is_enough = size >= int(os.environ.get("ENOUGH_RANKS", "1"))
    last = max(NUM_STEPS, engine.step_number + 2)
    while engine.step_number < last or not is_enough:  # else it waits for others
        for batch in loader:
            cause(engine.step_number, rank)
            loss = float(engine.step(batch))
            if rank == 0:
                with open(FOLDER / "losses.jsonl", "a") as file:
                    file.write(json.dumps([engine.step_number, loss, rows]) + "\n")
            if engine.step_number % 4 == 0:
                engine.save(FOLDER / "checkpoints" / f"step_{engine.step_number}", keep=2)
            if engine.step_number >= last and is_enough:
                break
    engine.close()


train()
