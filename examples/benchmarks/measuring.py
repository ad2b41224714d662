"""The ranks of a benchmark and its model, measured as `whale probe` and `whale profile` do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from whale.capture import capture
from whale.comm import World, connect
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.profile import Profile
from whale.ir.serialization import to_json
from whale.measure.op_times import Inputs
from whale.measure.probing import probe
from whale.measure.profiling import Known, profile_model

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Measured:
    """What the ranks know of themselves.

    Attributes:
        world: this process among its peers.
        graph: the captured model.
        inputs: of its ops, on this rank's device.
        cluster: the ranks' devices and the links between them.
        profile: what the model's ops and passes take on each kind of device.
    """

    world: World
    graph: ModelGraph
    inputs: Inputs
    cluster: Cluster
    profile: Profile

    def write_profile(self, path: Path) -> None:
        """Writes the profile where `cluster.profile` may name it; every rank calls it, and may read the file afterwards."""
        if self.world.rank == 0:
            path.write_text(to_json(self.profile))
        dist.barrier()


def measure(model: nn.Module, batch: dict[str, Tensor], loss: Callable[[Tensor, dict[str, Tensor]], Tensor], rounds: int) -> Measured:
    """Measures all ranks, each thing so many times; every rank calls it."""
    world = connect(TIMEOUT_SECONDS)
    graph, program = capture(model, batch, loss)
    inputs = Inputs(graph, program.graph, program.values(batch), world.device)
    cluster, _ = probe(world, rounds, tell)
    return Measured(world, graph, inputs, cluster, profile_model(world, cluster, graph, inputs, Known(None, again=False), rounds, tell))


def tell(what: str) -> None:
    """Progress, on rank 0."""
    if dist.get_rank() == 0:
        print(f"measuring {what}", file=sys.stderr, flush=True)
