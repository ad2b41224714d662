"""Figures of papers beside what Whale predicts for them.

    python examples/benchmarks/published.py --page published.md

The figures are typed from the papers, each with its source. A prediction is made by the same code that plans: the event simulation of
schedules, the bytes of parameter states, the estimate of a plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from figure import Figure
from megatron import megatron_studies
from runs import Run, simulate, written
from whale_paper import bert_pipelines, bridges, m6, many_classes, sharding_patterns, unlike_devices

from whale.estimate import ActionTimes, StateBytes, bubble_rate, state_bytes
from whale.estimate import simulate as simulate_schedule
from whale.ir.graph import Parameter, TensorSpec
from whale.ir.plan import Form, states_of
from whale.schedules import build, insert_recompute

BUBBLES = [
    (8, 24, 3, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1055, 0.1585, 0.1083)),
    (8, 64, 4, 29.935, 29.621, 19.388, 0.535, (0.1091, 0.0320, 0.0554, 0.0294)),
    (16, 48, 3, 11.347, 11.248, 8.132, 0.377, (0.2552, 0.1104, 0.1397, 0.0672)),
    (32, 96, 2, 10.419, 10.207, 7.715, 0.408, (0.2646, 0.1493, 0.1421, 0.0641)),
]
"""Ranks, micro-batches, chunks of interleaved; milliseconds of F, I, W and of a hop; bubble rates."""


def bubbles() -> Iterator[Figure]:
    """Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, Table 5: bubble rates."""
    for ranks, count, chunks, forward, inputs, weights, hop, rates in BUBBLES:
        for name, published in zip(("1f1b", "interleaved", "zb_h1", "zb_h2"), rates, strict=True):
            parts = chunks if name == "interleaved" else 1
            times = ActionTimes(forward / parts, inputs / parts, weights / parts, transfer=hop)
            schedule = build(name, num_ranks=ranks, num_micro_batch=count, num_chunks=parts)
            yield Figure(f"{name}, {ranks} ranks, {count} micro-batches", published, bubble_rate(simulate_schedule(schedule, times)))


def recomputations() -> Iterator[Figure]:
    """Lai et al., Merak, arXiv 2206.04959: time of a step with R = F = 1, B = 2 and no communication; 8 ranks, 16 micro-batches."""
    ranks, count = 8, 16
    names = {"recompute_early": ranks - 1, "last_no_recompute": ranks + 1, "shifted_critical_path": ranks + 2}
    costs, plain = ActionTimes(1.0, 2.0, recompute=1.0), (count + ranks - 1) * 4.0
    found = insert_recompute(build("1f1b", num_ranks=ranks, num_micro_batch=count))
    yield Figure("1f1b", plain, simulate_schedule(found, costs).makespan)
    for name, saved in names.items():
        yield Figure(name, plain - saved, simulate_schedule(build(name, num_ranks=ranks, num_micro_batch=count), costs).makespan)


def zero_memory() -> Iterator[Figure]:
    """Rajbhandari et al., ZeRO, SC'20: GB per device of 7.5 billion parameters in mixed precision with Adam, over 64 devices."""
    weights = Parameter("all", TensorSpec((7_500_000_000,), "float16", (0,)))
    held = state_bytes(weights, states_of((weights,), gradient=Form("float16"), optimizer=Form("float32"))[0])
    levels = {"none": (1, 1, 1), "stage 1": (1, 1, 64), "stage 2": (1, 64, 64), "stage 3": (64, 64, 64)}
    for (name, parts), published in zip(levels.items(), (120, 31.4, 16.6, 1.9), strict=True):
        yield Figure(name, published, _cut(held, *parts) / 1e9)


def _cut(held: StateBytes, compute: int, gradient: int, optimizer: int) -> float:
    return held.compute / compute + held.gradient / gradient + held.optimizer / optimizer


def _nowhere(gradients: str) -> Run:
    """The 22 billion parameter model of the next block, on 8 devices with room for it: bytes do not depend on the device."""
    plan = written(8, 1, 1, 4, recompute="none")
    return Run(48, 6144, 64, 2048, 51200, "H200", 8, 8, "infiniband-hdr", None, 8, plan, 1.0, gradients)


def activations() -> Iterator[Figure]:
    """Korthikanti et al., arXiv 2205.05198, Figure 1: GiB per device of a model of 22 billion parameters, tensor parallel 8.

    Micro-batches of 4 rows, two of them: during the backward pass of a single one gradients appear as activations go, so memory is fullest
    elsewhere. What enters the model and leaves it (logits, the loss) is in the prediction, and not in the paper's count.
    """
    run = _nowhere("float32")
    found = simulate(run).devices[0]
    yield Figure("parameters, gradients and optimizer", 45.56, sum(found.stage_bytes) / 2**30)
    yield Figure("activations, nothing computed again", 59.25, found.peak.activations / 2**30)
    both = {**run.plan, "recompute": "selective", "more_axes": ["tokens:1"]}
    yield Figure(
        "activations, sequence parallel and selective",
        9.5625,
        simulate(replace(run, plan=both)).devices[0].peak.activations / 2**30,
    )


def all_in_all_out() -> Iterator[Figure]:
    """Fold3D's schedule (all-in-all-out, `aiao`): time of a step by the closed form of the paper, F = 1, B = 2 for a whole rank.

    That is m (F + B), the bubble (p - 1) (F + B) / v, and of gradient synchronisation of A what is exposed:
    max(A / v, A - (v - 1) m B / v).
    """
    forward, backward = 1.0, 2.0
    for ranks, chunks, count, sync in ((4, 4, 16, 16.0), (4, 4, 16, 32.0), (8, 4, 32, 32.0), (8, 2, 16, 24.0)):
        exposed = max(sync / chunks, sync - (chunks - 1) * count * backward / chunks)
        published = (count + (ranks - 1) / chunks) * (forward + backward) + exposed
        schedule = build("aiao", num_ranks=ranks, num_micro_batch=count, num_chunks=chunks)
        timeline = simulate_schedule(schedule, ActionTimes(forward / chunks, backward / chunks, sync=sync / chunks))
        what = f"{ranks} ranks, {chunks} chunks, {count} micro-batches, synchronisation {sync:g}"
        yield Figure(what, published, timeline.makespan)


BLOCKS = (
    bubbles, recomputations, all_in_all_out, zero_memory, activations, megatron_studies,
    many_classes, sharding_patterns, bridges, bert_pipelines, m6, unlike_devices,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the tables as Markdown")
    options = parser.parse_args()
    lines = [
        "# Published figures beside predicted ones",
        "",
        "Made by `python examples/benchmarks/published.py --page published.md`.",
    ]
    for block in BLOCKS:
        lines += [
            "",
            " ".join((block.__doc__ or "").split()),
            "",
            "| figure | published | predicted | error |",
            "| --- | --- | --- | --- |",
        ]
        for figure in block():
            lines.append(str(figure))
            print(lines[-1], flush=True)
    if options.page:
        options.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
