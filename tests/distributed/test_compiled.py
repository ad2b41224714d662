"""The law with `runtime.compile`: by torch's own graphs of compiled runs, which need no C++ compiler, and for one model by Inductor's."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests import reference
from tests.distributed import test_law, test_schedules
from tests.distributed.training import Case, largest_of, run_case, train_rank, train_reference
from tests.distributed.world import World
from whale.runtime.program import compiled

TOLERANCE = 1e-10


def train_compiled(rank: int, num_ranks: int, case: Case, backend: str) -> tuple[reference.Run, int]:
    """Trains a case on one rank; also gives how many graphs were compiled."""
    made: list[object] = []
    compile_by = torch.compile

    def counting(*args: object, **kwargs: object) -> object:
        made.append(args)
        return compile_by(*args, **kwargs)  # type: ignore[call-overload]

    with mock.patch.object(compiled, "BACKEND", backend), mock.patch.object(torch, "compile", counting):
        return train_rank(rank, num_ranks, case), len(made)


def check(world: World, case: Case, backend: str = "aot_eager_decomp_partition") -> None:
    case = replace(case, config=(*case.config, ("runtime.compile", True)))
    found = run_case(world, train_compiled, case, backend)
    error, where = largest_of([run for run, _ in found], train_reference(case))
    assert error < TOLERANCE, where
    assert any(count for _, count in found)


pipeline = test_schedules.pipeline
CASES = {
    "one rank": pipeline("gpipe", 1, 3, (1.0,)),
    "uneven rows": test_law.FIXED["uneven data parallel"],
    "pipeline": test_law.FIXED["pipeline"],
    "zero bubble": pipeline("zb_h1", 2, 4, (1.0, 1.0)),
    "blocks": test_schedules.CASES["blocks, zero bubble"],
    "stages": test_schedules.CASES["stages, gpipe"],
    "statistics": test_law.WITH_STATISTICS["uneven data parallel"],
    "gathered": pipeline("1f1b", 1, 2, (1.0, 1.0), memory__zero="3"),
    "on hosts": pipeline("1f1b", 1, 2, (1.0,), memory__offload="optimizer+parameters"),
    "activations on hosts": pipeline("1f1b", 1, 2, (1.0,), memory__offload="activations"),
}


@pytest.mark.parametrize("name", CASES)
def test_law_of_fixed_plans(world: World, name: str) -> None:
    check(world, CASES[name])
