"""How a cell of the table is found: a model under a plan on two Gloo ranks, held against the plain loop on the whole batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import whale
from tests import reference
from tests.captures import Captured, captured_once
from tests.distributed.split_training import whole_gradients
from tests.distributed.training import largest_of
from tests.distributed.world import RankFailure, World
from whale.errors import RuntimeFault, WhaleError
from whale.ir.cluster import Cluster, Device, Host, Link
from zoo import entry_of
from zoo.cell import Cell

ROWS = 8
SEEDS = (1, 2)
"""Of the batches; a step each."""
FLOPS = 1e5
"""Of a device of speed 1: so few that it pays to cut whatever can be cut."""
TOLERANCE, TOLERANCE_SINGLE = 1e-5, 1e-4
"""Relative; parts of many models compute in float32 whatever their weights are."""


@dataclass(frozen=True)
class Setting:
    """A plan to ask for: relative speeds of the two devices, and settings by key."""

    speeds: tuple[float, float]
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def cluster(self) -> Cluster:
        """One host of two CPU devices."""
        devices = tuple(
            Device(f"host/{index}", "host", "cpu", (("float32", FLOPS * speed), ("float64", FLOPS * speed)), 1 << 33, FLOPS * speed)
            for index, speed in enumerate(self.speeds)
        )
        return Cluster("zoo", (Host("host", devices, Link(1e9, 1e-6)),), None)


SETTINGS = {
    "data parallel": Setting((1.0, 1.0), (("planning.search", "off"),)),
    "uneven": Setting((1.0, 3.0), (("planning.search", "off"),)),
    "pipeline": Setting((1.0, 1.0), (("pipeline.num_stages", 2), ("pipeline.num_micro_batch", 2))),
    "split": Setting((1.0, 1.0), (("replicas", [{"split": 2}]),)),
}


def capture_entry(name: str) -> None:
    """Captures a model where its ranks will be forked from."""
    captured(name)


@cache
def made(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """Model, batch and loss of an entry, as `whale.parallelize` takes them."""
    entry = entry_of(name)
    return entry.model(), entry.example(ROWS, SEEDS[0]), entry.loss


def captured(name: str) -> Captured:
    """The same, captured."""
    return captured_once(made, name)


def optimizer_of(name: str) -> Any:
    return partial(torch.optim.SGD, lr=entry_of(name).rate, momentum=0.9)


def batches_of(name: str) -> list[Any]:
    return [entry_of(name).example(ROWS, seed) for seed in SEEDS]


def own_loss(output: Any, batch: Any) -> Any:
    return output["loss"] if isinstance(output, dict) else output.loss


def plain_rank(rank: int, num_ranks: int, name: str) -> reference.Run:
    """The plain loop."""
    entry = entry_of(name)
    return reference.train(entry.model(), entry.loss or own_loss, batches_of(name), optimizer_of(name))


def train_rank(rank: int, num_ranks: int, name: str, setting: Setting, expected: reference.Run) -> tuple[reference.Run, list[str]]:
    """The run under a plan on one rank, and what it warned of."""
    model = captured(name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = whale.parallelize(
            model.model,
            loss=model.loss,
            optimizer=optimizer_of(name),
            batch=model.batch,
            config=dict(setting.config),
            cluster=setting.cluster,
        )
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches_of(name)):
            losses.append(float(engine.step(batch)))
            if number == 0:
                unused = {key: torch.zeros_like(parameter) for key, parameter in model.model.named_parameters()}
                gradients = whole_gradients(engine, {**unused, **expected.gradients})
        state = engine.state_dict()
        engine.close()
    assert state is not None
    places = (__file__, str(Path(whale.__file__).parent))  # a warning of Whale's names its caller's line, or its own
    ours = [str(each.message) for each in said if each.filename.startswith(places)]
    return reference.Run(losses, gradients, reference.copy_of(state)), ours


def cell_of(world: World, name: str, plan: str, expected: reference.Run, seconds: float) -> Cell:
    """Trains a model under a plan and judges the numbers.

    Args:
        world: whose source has the model captured.
        name: of the entry.
        plan: key of `SETTINGS`.
        expected: the numbers of the plain loop.
        seconds: after which it is given up.
    """
    try:
        results = world.run(train_rank, name, SETTINGS[plan], expected, num_ranks=2, timeout=seconds)
    except RankFailure as failure:
        return failed(failure)
    return judged(results, expected, TOLERANCE_SINGLE if entry_of(name).single else TOLERANCE)


def judged(results: Sequence[tuple[reference.Run, list[str]]], expected: reference.Run, tolerance: float) -> Cell:
    """The cell of runs that came to their end.

    Args:
        results: per rank, its run and what it warned of.
        expected: the numbers of the plain loop.
        tolerance: of the largest relative error.
    """
    missing = expected.gradients.keys() - {name for run, _ in results for name in run.gradients}
    if missing:
        return Cell("WRONG", f"no rank has the gradients of {', '.join(sorted(missing))}")
    error, where = largest_of([present(run, expected) for run, _ in results], expected)
    said = [text for _, texts in results for text in texts]
    details = "\n".join(said)
    if error < tolerance:
        return Cell("exact", error=error, details=details)
    if said:
        return Cell("warned", one_line(said[0]), error, details)
    return Cell("WRONG", f"{where} differs by {error:.2g}", error)


def present(run: reference.Run, expected: reference.Run) -> reference.Run:
    """The run without gradients where the plain loop has none: those are zeros."""
    return replace(run, gradients={name: value for name, value in run.gradients.items() if name in expected.gradients or bool(value.any())})


def failed(failure: RankFailure) -> Cell:
    """An error of Whale's is a refusal. That a peer was lost is one only where all ranks say the same, as of a loss that is no number."""
    known = {rank: error for rank, error in failure.errors.items() if isinstance(error, WhaleError)}
    causes = [error for error in known.values() if not isinstance(error, RuntimeFault)]
    if not causes and len(known) == len(failure.errors) and len({str(error) for error in known.values()}) == 1:
        causes = list(known.values())
    if causes:
        return Cell("refused", refusal(causes[0]), details=str(failure))
    text = next((text for rank, text in failure.texts.items() if rank not in known), str(failure))
    return Cell("raised", one_line(text.strip().splitlines()[-1]), details=str(failure))


def refusal(error: WhaleError) -> str:
    """The rule that was broken, with its place in the model."""
    place = "" if error.where is None else f" (at {error.where})"
    return one_line(" ".join(error.message.splitlines()[:2]) + place)


def one_line(text: str, width: int = 240) -> str:
    """A text without line breaks and folders, cut where it is long."""
    text = re.sub(r"\S*/([\w.]+:\d+)", r"\1", " ".join(text.split()))
    return text if len(text) <= width else text[: width - 3] + "..."
