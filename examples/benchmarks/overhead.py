"""What Whale costs beside torch's own: the same model, threads and data, in one run, pair by pair.

    python examples/benchmarks/overhead.py --json overhead.json

single         one rank of Whale against the plain training loop
compiled       the same under runtime.compile, against the loop around torch.compile of model and loss
data_parallel  two ranks of Whale against DistributedDataParallel
pipeline       two stages of Whale, 1F1B, against torch.distributed.pipelining

Each pair times one block of steps of either side, in alternating order, so that a slow moment of the machine hits both.
Ratio = the peer's time / Whale's, the median over the pairs; above 1, Whale is the faster. The same of the CPU time of both ranks
together, which hardly depends on what else the machine does. `first 200 steps`: the ratio of the sums from the first step on, with
everything that happens in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import whale

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, loss_fn
from ranks import Result, compared, line, on_ranks, pair_of

Step = Callable[[], object]
Batch = dict[str, Tensor]

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


class FirstStage(nn.Module):
    """The first half of the blocks, as a module of its own for torch's pipeline."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.bytes, self.positions = model.bytes, model.positions
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    """The second half of the blocks and the head."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_model(options: argparse.Namespace, stages: int = 0) -> GPT:
    torch.manual_seed(0)
    return GPT(options.layers, options.width, 4, options.context, stages)


def make_batch(options: argparse.Namespace) -> Batch:
    text = torch.randint(256, (options.rows, options.context + 1), generator=torch.Generator().manual_seed(1))
    return {"ids": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def whale_step(options: argparse.Namespace, stages: int, config: dict[str, object]) -> Step:
    batch, config = make_batch(options), {"planning.search": "off", **config}
    engine = whale.parallelize(make_model(options, stages), loss=loss_fn, optimizer=OPTIMIZER, batch=batch, config=config)
    return partial(engine.step, batch)


def loop_step(model: nn.Module, batch: Batch, make_optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZER) -> Step:
    """The plain training step."""
    optimizer = make_optimizer(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(batch["ids"]), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single(options: argparse.Namespace) -> tuple[Step, Step]:
    return whale_step(options, 0, {}), loop_step(make_model(options), make_batch(options))


def compiled(options: argparse.Namespace) -> tuple[Step, Step]:
    model, batch = make_model(options), make_batch(options)
    loss_of, optimizer = torch.compile(lambda: loss_fn(model(batch["ids"]), batch)), OPTIMIZER(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return whale_step(options, 0, {"runtime.compile": True}), step


def own_rows(options: argparse.Namespace) -> Batch:
    """The half of the batch that a rank has."""
    rank, half = dist.get_rank(), options.rows // 2
    return {name: tensor[rank * half : (rank + 1) * half] for name, tensor in make_batch(options).items()}


def data_parallel(options: argparse.Namespace) -> tuple[Step, Step]:
    return whale_step(options, 0, {}), loop_step(nn.parallel.DistributedDataParallel(make_model(options)), own_rows(options))


def pipeline(options: argparse.Namespace) -> tuple[Step, Step]:
    config: dict[str, object] = {"pipeline.num_micro_batch": options.micro_batches, "pipeline.schedule": "1f1b"}
    return whale_step(options, 2, config), torch_pipeline_step(options)


def torch_pipeline_step(options: argparse.Namespace) -> Step:
    rank, batch = dist.get_rank(), make_batch(options)
    module = (FirstStage, LastStage)[rank](make_model(options))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, lambda logits, targets: loss_fn(logits, {"targets": targets}))
    optimizer = OPTIMIZER(module.parameters())

    def step() -> object:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["targets"], losses=losses)
        optimizer.step()
        return torch.stack(losses).detach().mean() if losses else None

    return step


CASES: dict[str, tuple[int, Callable[[argparse.Namespace], tuple[Step, Step]]]] = {
    "single": (1, single),
    "compiled": (1, compiled),
    "data_parallel": (2, data_parallel),
    "pipeline": (2, pipeline),
}


def measure(ours: Step, peer: Step, options: argparse.Namespace, tolerance: float = 1e-3) -> Result:
    """What `compared` says of two sides that have trained alike."""
    last: dict[str, object] = {}
    first = [pair_of(lambda: last.update(ours=ours()), lambda: last.update(peer=peer()), 1, number) for number in range(options.warmup)]
    check_equal(last["ours"], last["peer"], tolerance)
    return compared(ours, peer, options.steps, options.pairs, first)


def check_equal(ours: object, peer: object, tolerance: float) -> None:
    """The two sides have trained alike: a comparison of different work would say nothing."""
    shares: list[float | None] = [float(peer) if isinstance(peer, Tensor) else None]
    if dist.is_initialized():
        mine, shares = shares[0], [None] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
    theirs = statistics.mean(share for share in shares if share is not None)  # each rank's part of the batch, or the last stage's
    if not isinstance(ours, Tensor) or abs(float(ours) - theirs) > tolerance:
        raise SystemExit(f"the losses differ: {ours} and {theirs:.6f}")


def run_case(case: str, options: argparse.Namespace) -> Result:
    return measure(*CASES[case][1](options), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = {"pairs": 49, "steps": 4, "warmup": 4, "layers": 4, "width": 128, "context": 64, "rows": 16, "micro-batches": 4}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--only", choices=sorted(CASES), help="one comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    found = {}
    for case in [options.only] if options.only else CASES:
        found[case] = result = on_ranks(CASES[case][0], run_case, case, options)
        print(f"{case:14} {line(result)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
