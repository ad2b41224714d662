"""The law with `runtime.compile`, by the graphs that torch cuts and divides into forward and backward, without code for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, note
from torch import fx
from tqdm import tqdm

from tests import reference
from tests.distributed import test_law, test_precision, test_schedules, test_split_law
from tests.distributed.split_training import train_rank
from tests.distributed.training import Case, largest_of, run_case, train_reference
from tests.distributed.world import World
from tests.examples import at_most, further, slow
from tests.models import Block, Description
from whale.ir.plan import Plan
from whale.runtime.program import compiled

TOLERANCE = 1e-10


def train_compiled(rank: int, num_ranks: int, case: Case, expected: Mapping[str, torch.Tensor]) -> tuple[reference.Run, int]:
    """Trains a case on one rank; also gives how many graphs were compiled."""
    made: list[object] = []
    with mock.patch.object(compiled, "BACKEND", counting(made)):
        return train_rank(rank, num_ranks, case, None, expected), len(made)


def train_half(rank: int, num_ranks: int, case: test_precision.Case, path: str) -> tuple[list[float], dict[str, torch.Tensor], Plan, int]:
    """The same in half precision, and of all steps."""
    made: list[object] = []
    with mock.patch.object(compiled, "BACKEND", counting(made)):
        losses, weights, plan, _ = test_precision.train(rank, num_ranks, case, path)
    return losses, weights, plan, len(made)


def counting(made: list[object]) -> Callable[..., Any]:
    """A backend of torch.compile that adds each graph that it has made. Decompositions, which are torch's, take most of the time."""
    compile_graph = torch._dynamo.lookup_backend("aot_eager")

    def compile_and_count(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        made.append(found := compile_graph(module, inputs))
        return found

    return compile_and_count


def load_compiler() -> None:
    """Imports and computes what a first graph that is compiled does, seconds, for all ranks to come."""
    tqdm.monitor_interval = 0  # torch would have it start a thread, which no fork has
    torch.compile(torch.sin, backend=counting([]))(torch.ones(2, requires_grad=True))


@pytest.fixture(scope="module", autouse=True)
def compiler_is_loaded(world: World) -> None:
    world.prepare(load_compiler)


def check(world: World, case: Case, *, counts: bool = True) -> None:
    case = replace(case, config=(*case.config, ("runtime.compile", True)))
    expected = train_reference(case)
    found = run_case(world, train_compiled, case, expected.gradients)
    error, where = largest_of([run for run, _ in found], expected)
    assert error < TOLERANCE, where
    assert not counts or any(count for _, count in found)


pipeline = test_schedules.pipeline
SHORT = Description(tokens=True, blocks=(Block("feed_forward"), Block("norm"), Block("linear", skip_from=0)), tied=True, loss="two_terms")
"""Where sizes are open, of which each op more takes a second."""
CASES = {
    "uneven rows": replace(test_law.FIXED["uneven data parallel"], description=SHORT),
    "pipeline": test_law.FIXED["pipeline"],
    "zero bubble": pipeline("zb_h1", 2, 4, (1.0, 1.0)),
    "blocks": test_schedules.CASES["blocks, zero bubble"],
    "stages": replace(test_schedules.CASES["stages, gpipe"], description=SHORT),
    "split": test_split_law.FIXED["both stages"],
    "statistics": test_law.WITH_STATISTICS["uneven data parallel"],
    "gathered": pipeline("1f1b", 1, 2, (1.0, 1.0), memory__zero="3"),
    "on hosts": pipeline("1f1b", 1, 2, (1.0,), memory__offload="optimizer+parameters"),
    "activations on hosts": replace(pipeline("1f1b", 1, 2, (1.0,), memory__offload="activations"), description=SHORT),
    **dict(further([("one rank", pipeline("gpipe", 1, 3, (1.0,)))])),
}


QUICK = ("uneven rows", "blocks", "split")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_law_of_fixed_plans(world: World, name: str) -> None:
    check(world, CASES[name])


@pytest.mark.parametrize("sums", ["own", slow("accumulated")])
def test_half_precision(world: World, tmp_path: Path, sums: str) -> None:
    """Gradients are there in another type than their weights before anything is traced."""
    case = test_precision.Case(("linear", "norm"), "bf16", "micro-batches", sums=sums, compiles=True)
    world.prepare(test_precision.prepare, case)
    ranks = world.run(train_half, case, str(tmp_path / "checkpoint"), num_ranks=2)
    losses, weights = test_precision.eager(case, ranks[0][2].all_micro_batch_rows(test_precision.NUM_ROWS))
    for found, state, _, num_graphs in ranks:
        assert num_graphs
        assert found == pytest.approx(losses, rel=2e-2)
        for name, expected in weights.items():
            torch.testing.assert_close(state[name], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@at_most(6, suppress_health_check=list(HealthCheck))
@given(case=test_law.cases() | test_schedules.cases())
def test_law_of_random_cases(world: World, case: Case) -> None:
    note(f"{case!r}")
    check(world, case, counts=False)
