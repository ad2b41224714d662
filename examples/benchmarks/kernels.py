"""What a step computes: kernels and bytes of one rank of Whale beside the plain training loop's, of the same model, batch and optimizer.

    python examples/benchmarks/kernels.py --json kernels.json
    python examples/benchmarks/kernels.py --only llama --dtype bf16 --names

Counted is what torch dispatches in one step, from clearing the gradients to the optimizer's update, under a `TorchDispatchMode`:

kernels   ops that compute or copy; an op on lists (``_foreach_add_``) is one
views     ops that launch nothing: views of memory, and memory without contents (``empty``)
bytes     that kernels read and write: of each tensor among an op's arguments and results, once, what is repeated (stride 0) not counted

Precision is `precision.dtype` for Whale, `torch.autocast` for the loop, with a `GradScaler` for fp16. All counts are exact and the same
on every machine with the same torch and transformers: oneDNN, which has other kernels on other CPUs, is off.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import whale

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP = 3
"""Steps before the one that is counted: the first make the optimizer's state, and check what has to be checked once."""
MOST_SKIPPED = 16
"""Steps that may be left out before one is counted, while the scale of fp16 is too large."""
UPDATE = "addcdiv_"
"""An op of the optimizer's update, which a step that is left out lacks."""

_NO_KERNELS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "lift_fresh")
)


@dataclass(frozen=True)
class Counts:
    """Of a step.

    Attributes:
        kernels, views: how often each op was dispatched, by name.
        num_bytes: that kernels read and wrote.
    """

    kernels: Counter[str]
    views: Counter[str]
    num_bytes: int

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_views(self) -> int:
        return self.views.total()


class Counting(TorchDispatchMode):
    """Counts what is dispatched while it is entered, in this thread, where a CPU also computes the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.views = Counter[str](), Counter[str]()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if not tensors or func.namespace == "profiler":
            return result
        if _launches_nothing(func, name):
            self.views[name] += 1
            return result
        self.kernels[name] += 1
        places = {(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()): _num_bytes(tensor) for tensor in tensors}
        self.num_bytes += sum(places.values())
        return result

    @property
    def counts(self) -> Counts:
        return Counts(self.kernels, self.views, self.num_bytes)


def _launches_nothing(func: Any, name: str) -> bool:
    returns = func._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return is_view or name in _NO_KERNELS


def _num_bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size > 0 else size
    return elements * tensor.element_size()


def count(step: Callable[[], object]) -> Counts:
    """What one call of a step dispatches."""
    counting = Counting()
    with counting:
        step()
    return counting.counts


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        make: the modules.
        batch: what they are given.
        loss: of the output; None for a model that computes its own.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss | None = None


class Recurrent(nn.Module):
    """An LSTM that reads text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.layers, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.LSTM(width, width, 2, batch_first=True),
            nn.Linear(width, 9),
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(ids))[0][:, -1])
        return scores


VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, ROWS, CLASSES = 96, 64, 4, 2, 16, 4, 9


def published(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers, of this size, without dropout."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made.train()


def text(length: int = LENGTH) -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, length))
    labels = ids.clone()
    labels[0, -3:] = -100
    return {"input_ids": ids, "labels": labels}


def images(size: int) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(CLASSES, (ROWS,))}


def sentences() -> Batch:
    return {"ids": torch.randint(VOCABULARY, (ROWS, LENGTH)), "labels": torch.randint(CLASSES, (ROWS,))}


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(scores, batch["labels"])


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
}
_ENCODER = _DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CASES = {
    "gpt2": Case(
        partial(
            published,
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=2 * LENGTH,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=1,
        ),
        text,
    ),
    "llama": Case(partial(published, "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False, **_DECODER), text),
    "t5": Case(
        partial(
            published,
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=2 * WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            use_cache=False,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        text,
    ),
    "vit": Case(
        partial(published, "ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, num_labels=CLASSES, **_ENCODER),
        partial(images, 16),
    ),
    "bert": Case(partial(published, "BertForMaskedLM", "BertConfig", **_ENCODER), text),
    "resnet50": Case(
        partial(
            published,
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[16, 32, 64, 128],
            depths=[3, 4, 6, 3],
            layer_type="bottleneck",
            num_labels=CLASSES,
        ),
        partial(images, 32),
    ),
    "lstm": Case(partial(Recurrent, WIDTH), sentences, cross_entropy),
}


def example(case: Case) -> tuple[nn.Module, Batch]:
    """A model and a batch, equal in each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.make(), case.batch()


def whale_step(case: Case, dtype: str) -> Callable[[], Tensor]:
    model, batch = example(case)
    config: dict[str, object] = {"planning.search": "off", "precision.dtype": dtype}
    engine = whale.parallelize(model, loss=case.loss, optimizer=OPTIMIZER, batch=batch, config=config)
    return partial(engine.step, batch)


def plain_step(case: Case, dtype: str) -> Callable[[], Tensor]:
    model, batch = example(case)
    optimizer, scaler = OPTIMIZER(model.parameters()), torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    inputs = {name: value for name, value in batch.items() if case.loss is None or name != "labels"}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with nullcontext() if dtype == "float32" else torch.autocast("cpu", DTYPES[dtype]):
            output = model(**inputs)
            loss: Tensor = output.loss if case.loss is None else case.loss(output, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Pair:
    """The counts of both sides."""

    whale: Counts
    plain: Counts

    @property
    def bytes_ratio(self) -> float:
        return self.whale.num_bytes / self.plain.num_bytes

    @property
    def more(self) -> dict[str, int]:
        """Kernels by name of which Whale has more, or fewer."""
        names = {**self.plain.kernels, **self.whale.kernels}
        found = {name: self.whale.kernels[name] - self.plain.kernels[name] for name in names}
        return {name: more for name, more in sorted(found.items()) if more}

    def __str__(self) -> str:
        kernels, views = (f"{getattr(self.whale, each):5} {getattr(self.plain, each):5}" for each in ("num_kernels", "num_views"))
        more = self.whale.num_kernels - self.plain.num_kernels
        return f"{kernels} {more:+5}   {views}   {self.whale.num_bytes:10,} {self.plain.num_bytes:10,} {self.bytes_ratio:7.4f}"


def compare(case: Case, dtype: str) -> Pair:
    """Both sides after equally many steps, whose losses must be alike: a comparison of different work would say nothing."""
    with torch.backends.mkldnn.flags(enabled=False):  # whose kernels differ between kinds of CPU
        steps = whale_step(case, dtype), plain_step(case, dtype)
        for _ in range(WARMUP):
            ours, peer = (float(step()) for step in steps)
        if abs(ours - peer) > (1e-5 if dtype == "float32" else 2e-2) * abs(peer):
            raise SystemExit(f"the losses differ: {ours:.6f} and {peer:.6f}")
        for _ in range(MOST_SKIPPED):
            pair = Pair(*(count(step) for step in steps))
            if all(UPDATE in counts.kernels for counts in (pair.whale, pair.plain)):
                return pair
        raise SystemExit(f"{MOST_SKIPPED} steps were left out: their gradients are not finite in {dtype}")


HEADER = f"{'':18} kernels  Whale plain  more   views Whale plain   bytes    Whale      plain   ratio"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=CASES, help="one model; repeatable")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="one precision; repeatable")
    parser.add_argument("--names", action="store_true", help="also name the kernels of which there are more or fewer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    written: list[dict[str, object]] = []
    print(HEADER)
    for name in options.only or CASES:
        for dtype in options.dtype or DTYPES:
            pair = compare(CASES[name], dtype)
            print(f"{name:10} {dtype:8}        {pair}")
            if options.names:
                print(f"{'':10} {pair.more}")
            sides = {
                side: {each: getattr(counts, each) for each in ("num_kernels", "num_views", "num_bytes")}
                for side, counts in vars(pair).items()
            }
            written.append({"model": name, "dtype": dtype, **sides, "more": pair.more})
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
