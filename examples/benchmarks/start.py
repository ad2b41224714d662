"""What a training's start costs beside the plain loop's: CPU seconds from the start of the process to the end of the first step.

    python examples/benchmarks/start.py --json start.json
    python examples/benchmarks/start.py --model gpt2 --ranks 1

gpt2      12 layers of width 16 (transformers), 2 rows of 16 tokens
llama     12 layers of width 16 (transformers), 2 rows of 16 tokens
resnet18  4 images of 8 pixels, batch normalisation, a tenth of the usual channels

Seconds are of rank 0's CPU time (`time.process_time`), each side in processes of its own; on several ranks the plain loop uses
`DistributedDataParallel`. Of each part the median over the runs. `capture` includes `export`, the time inside `torch.export`; `model` is to
import its library, to make it and to meet the other ranks; `open` is the rest of `whale.parallelize`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

# Neither torch nor what imports it: a measured process starts here, and times those imports.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
MODELS = ("gpt2", "llama", "resnet18")
PARTS = ("import torch", "import whale", "model", "capture", "export", "plan", "open", "first step")
INSIDE = {"export"}  # of another part
Parts = dict[str, float]


@contextmanager
def timed(parts: Parts, name: str) -> Iterator[None]:
    """Adds the CPU seconds inside to a part."""
    begin = time.process_time()
    yield
    parts[name] = parts.get(name, 0.0) + time.process_time() - begin


def timing(parts: Parts, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, added to a part."""

    @wraps(call)
    def measured(*arguments: Any, **keywords: Any) -> Any:
        with timed(parts, name):
            return call(*arguments, **keywords)

    return measured


def model_of(name: str) -> Any:
    """The model, its batch and its loss."""
    from host import MODELS as KNOWN
    from host import Images, Model, next_token, tokens

    def llama() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"num_hidden_layers": 12, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
        return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16, use_cache=False))

    if name == "llama":
        return Model(llama, tokens, next_token)
    if name == "resnet18":
        return Model(lambda: Images(18), KNOWN["resnet50"].batch, KNOWN["resnet50"].loss)
    return KNOWN[name]


def start(side: str, name: str, rank: int, num_ranks: int, port: int) -> Parts:
    """One training until its first step is done, in this process."""
    parts: Parts = {}
    with timed(parts, "import torch"):
        import torch
        import torch.distributed as dist
    with timed(parts, "import whale"):
        import whale
        from whale.api import parallelizing
        from whale.api.opening import Opening
    torch.set_num_threads(1)
    with timed(parts, "model"):
        from host import OPTIMIZER

        if num_ranks > 1:
            dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]
        torch.manual_seed(0)
        known = model_of(name)
        module, batch = known.make(), known.batch()
    if side == "plain":
        del parts["import whale"]
        with timed(parts, "open"):
            module = torch.nn.parallel.DistributedDataParallel(module) if num_ranks > 1 else module
            optimizer = OPTIMIZER(module.parameters())
        with timed(parts, "first step"):
            own = {key: value.chunk(num_ranks)[rank] for key, value in batch.items()}
            known.loss(module(**{key: value for key, value in own.items() if key != "targets"}), own).backward()
            optimizer.step()
    else:
        with (
            mock.patch.object(torch.export, "export", timing(parts, "export", torch.export.export)),
            mock.patch.object(parallelizing, "Modes", timing(parts, "capture", parallelizing.Modes)),  # type: ignore[attr-defined]
            mock.patch.object(Opening, "decide", timing(parts, "plan", Opening.decide)),
            timed(parts, "open"),
        ):
            engine = whale.parallelize(module, loss=known.loss, optimizer=OPTIMIZER, batch=batch)
        parts["open"] -= parts["capture"] + parts["plan"]
        with timed(parts, "first step"):
            engine.step(batch)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return parts


def measured(side: str, name: str, num_ranks: int) -> Parts:
    """What rank 0 of fresh processes took."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(num_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks} if num_ranks > 1 else {}
        command = [sys.executable, __file__, "--start", side, "--model", name, "--ranks", str(num_ranks), str(rank), str(store.port)]
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{name}, {side}: a rank failed")
    parts: Parts = json.loads(texts[0].splitlines()[-1])
    return parts


def total(parts: Parts) -> float:
    return sum(seconds for part, seconds in parts.items() if part not in INSIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, help="one model")
    parser.add_argument("--ranks", type=int, help="so many; default 1, then 2")
    parser.add_argument("--runs", type=int, default=3, help="of each side; default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--start", choices=("whale", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start, options.model, options.place[0], options.ranks, options.place[1])))
        return
    found: dict[str, Parts] = {}
    print("| model, ranks | side | total | " + " | ".join(PARTS) + " |\n" + "|---" * (3 + len(PARTS)) + "|")
    for num_ranks in [options.ranks] if options.ranks else [1, 2]:
        for name in [options.model] if options.model else MODELS:
            runs = [{side: measured(side, name, num_ranks) for side in ("whale", "plain")} for _ in range(options.runs)]
            for side in ("whale", "plain"):
                parts = {part: statistics.median(run[side][part] for run in runs) for part in PARTS if part in runs[0][side]}
                found[f"{name} {num_ranks} {side}"] = {"total": total(parts), **parts}
                cells = " | ".join(f"{parts[part]:.2f}" if part in parts else "" for part in PARTS)
                print(f"| {name}, {num_ranks} | {side} | {total(parts):.2f} | {cells} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
