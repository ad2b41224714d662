"""The deepest GPT that trains on two CPU ranks of stated memories, by memory.zero: planned, then trained, and its memory measured.

    python examples/benchmarks/largest.py --json largest.json

For each pair of memories and each `memory.zero` the planner repeats blocks until no more fit (as `whale plan --largest` does). The plan
is then trained for three steps. Measured are the bytes that a rank has at its peak, less those that it had before the model was made and
those that a capture of a model of one block takes. `even` shares the state out evenly, whatever the memories are, in a plan for the
smaller of them, as libraries do that know of one size alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import whale

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import on_ranks

from whale.config import Config
from whale.errors import PlanError
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.search.largest import Depths, Largest, largest
from whale.units import format_bytes
from whale.workloads import GPT, count_blocks, repeat_blocks

SIZES: dict[str, Any] = {"hidden": 512, "heads": 8, "sequence": 64, "vocabulary": 1024}
ROWS = 4
MIB = 1 << 20
MEMORIES = {"1 and 1 GiB": (1024, 1024), "1 and 0.5 GiB": (1024, 512)}
STATES = ("0", "2", "3")
SETTINGS = {"memory.optimizer_states": 2, "memory.offload": "none", "memory.fraction": 1.0}


def cluster_of(memories: tuple[int, int]) -> Cluster:
    devices = ", ".join(f"{{model: cpu, memory: {size} MiB}}" for size in memories)
    return parse_cluster(f"name: stated\nhosts:\n  - {{name: host, devices: [{devices}]}}")


def deepest(memories: tuple[int, int], zero: str) -> Largest:
    """By the planner."""
    graph = GPT(layers=2, **SIZES).graph()
    config, cluster = Config({**SETTINGS, "memory.zero": zero}), cluster_of(memories)
    depths = Depths(lambda number: repeat_blocks(graph, number), count_blocks(graph), cluster, ROWS)
    (found,) = largest(depths, config, lambda _: None)
    return found


def held() -> int:
    """The most that this process has held; `getrusage` would count the process that started it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0])


def train(num_blocks: int, memories: tuple[int, int], config: dict[str, Any], plan: Plan | None) -> list[dict[str, float]]:
    """Three steps; the bytes of every rank, and the losses."""
    before = held()
    model, _, loss = GPT(layers=num_blocks, **SIZES).built()
    ids = torch.randint(SIZES["vocabulary"], (ROWS, SIZES["sequence"] + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    example = {name: tensor[:2] for name, tensor in batch.items()}  # of as many rows as the model that is planned
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    engine = whale.parallelize(model, loss=loss, optimizer=optimizer, batch=example, config=config, cluster=cluster_of(memories), plan=plan)
    losses = [float(engine.step(batch)) for _ in range(3)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"bytes": held() - before, "first_loss": losses[0], "last_loss": losses[-1]})
    engine.close()
    return found


def case(memories: tuple[int, int], zero: str, overhead: int) -> dict[str, Any]:
    found = deepest(memories, zero)
    ranks = on_ranks(2, train, found.num_blocks, memories, {**SETTINGS, "memory.zero": zero}, found.plan)
    planned = {name: each.peak.total for each in found.step.devices for name in each.devices}
    return {
        "num_blocks": found.num_blocks,
        "num_parameters": found.num_parameters,
        "planned_bytes": [planned[device.name] for device in cluster_of(memories).devices],
        "measured_bytes": [each["bytes"] - overhead for each in ranks],
        "losses": [ranks[0]["first_loss"], ranks[0]["last_loss"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what a rank frees it gives back, so that what it has is what it needs
    overhead = min(each["bytes"] for each in on_ranks(2, train, 1, MEMORIES["1 and 1 GiB"], {**SETTINGS, "memory.zero": "3"}, None))
    results: dict[str, Any] = {"overhead_bytes": overhead}
    for name, memories in {**MEMORIES, "even, for 0.5 GiB each": (512, 512)}.items():
        for zero in STATES:
            try:
                found = results[f"{name}, zero {zero}"] = case(memories, zero, overhead)
            except PlanError as error:
                print(f"{name}, zero {zero}: {error}", flush=True)
                continue
            sizes = "; ".join(
                f"{format_bytes(int(own))} of {format_bytes(size * MIB)}, planned {format_bytes(int(planned))}"
                for own, planned, size in zip(found["measured_bytes"], found["planned_bytes"], memories, strict=True)
            )
            print(
                f"{name}, zero {zero}: {found['num_blocks']} blocks, {found['num_parameters'] / 1e6:.0f} M parameters; {sizes}", flush=True
            )
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
