"""Recorded steps: every action, message, bucket and segment is in the trace, and the numbers are those of a run without."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import reference
from tests.distributed.training import Case, make_engine, run_case
from tests.distributed.world import RankFailure, World
from tests.models import Block, Description, Segment
from tests.unit.report.pages import Page
from whale.errors import BatchError, ConfigError
from whale.ir.plan import Plan
from whale.ir.schedule import Kind, Schedule
from whale.ir.serialization import read_value
from whale.ir.timeline import STEPS, RecordedRun
from whale.report import differences

BLOCKS = (Block("linear"), Block("gelu"), Block("linear"), Block("linear"), Block("gelu"), Block("linear"))
PIPELINES = Description(tokens=False, blocks=BLOCKS, segments=(Segment(0), Segment(3)), placement="construction")


def train(rank: int, num_ranks: int, case: Case) -> tuple[list[float], dict[str, torch.Tensor], Plan, tuple[Schedule, ...]]:
    engine = make_engine(case)
    try:
        losses = [float(engine.step(batch)) for batch in case.batches]
        state = engine.state_dict()
        assert state is not None
        return losses, reference.copy_of(state), engine.plan, engine.schedules
    finally:
        engine.close()


def events(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Per process, by its name, its events."""
    found = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    return {name: [event for event in found if event["pid"] == process] for process, name in names.items()}


@pytest.mark.parametrize(
    "keys",
    [{"recompute.policy": {0: 1, 1: 1}}, {"pipeline.schedule": "zb_h1"}, {"memory.zero": "1"}],
    ids=["recompute", "zb_h1", "zero"],
)
def test_everything_is_recorded_and_nothing_is_changed(keys: dict[str, object], world: World, tmp_path: Path) -> None:
    config = {"pipeline.num_micro_batch": 4, "communication.bucket_bytes": 300, **keys}
    case = Case(PIPELINES, (16, 16, 16, 16), (1.0,) * 4, tuple(config.items()))
    recorded = {"trace.directory": str(tmp_path / "there"), "trace.first_step": 1, "trace.num_steps": 2}
    traced = run_case(world, train, replace(case, config=tuple({**config, **recorded}.items())))
    for (losses, state, *_), (other_losses, other_state, *_) in zip(traced, run_case(world, train, case), strict=True):
        assert losses == other_losses
        assert all(torch.equal(state[name], other_state[name]) for name in state)
    _, _, plan, schedules = traced[0]
    found = events(tmp_path / "there" / "trace.json")
    for replica, schedule in zip(plan.replicas, schedules, strict=True):
        for rank, actions in enumerate(schedule.ranks):
            (device,) = replica.stages[schedule.stage_rank.index(rank)].virtual_device.devices
            own = found[f"measured {device}"]
            slices = [event["name"] for event in own if event["ph"] == "X" and event["cat"] != "segment"]
            wanted = [str(action) for action in actions if action.kind is not Kind.STEP]
            assert slices == 2 * [*wanted, "STEP"], device
            _check_segments(own, recomputes="recompute.policy" in keys)
    _check_what_travels(found)
    assert all(any(event.get("cat") == "weights" for event in own) == ("memory.zero" in keys) for own in found.values())
    run = read_value(RecordedRun, tmp_path / "there" / STEPS)
    assert [each.step_number for each in run.steps] == [2, 3] and [each.device for each in run.steps[0].devices] == list(plan.devices)
    assert len({name for name, *_ in differences(run, run)}) == 4 + 2 * len(plan.devices)
    page = Page((tmp_path / "there" / "report.html").read_text())
    assert [len(track["runs"]) for track in page.data["tracks"]] == [2] * len(page.data["tracks"])
    assert "among the 2 recorded, 16 rows; all devices have one clock" in page.text


def _check_segments(own: list[dict[str, Any]], *, recomputes: bool) -> None:
    """They lie inside passes, and are computed twice."""
    passes = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["ph"] == "X" and event["cat"] == "compute"]
    segments = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["ph"] == "X" and event["cat"] == "segment"]
    assert bool(segments) == recomputes and len(segments) % 16 == 0, "two steps of four micro-batches, forward and backward"
    assert all(any(low <= start and end <= high for low, high in passes) for start, end in segments)


def _check_what_travels(found: dict[str, list[dict[str, Any]]]) -> None:
    """The same messages and as many buckets as are predicted, in both recorded steps."""
    for name, own in found.items():
        kind, device = name.replace(",", "").split()[:2]
        if kind == "measured":
            continue
        given = [event for event in own if event.get("cat") == "weights"]
        for category in ("messages", "gradients", *(["weights"] if given else [])):
            predicted, measured = (
                sorted(event["name"] for event in each if event.get("cat") == category and event["ph"] == "b")
                for each in (own, found[f"measured {device}"])
            )
            assert predicted and measured == sorted(2 * predicted), (name, category)
        ends = [event for event in found[f"measured {device}"] if event["ph"] in "be"]
        begun = {event["id"]: event["ts"] for event in ends if event["ph"] == "b"}
        assert all(begun[event["id"]] <= event["ts"] for event in ends if event["ph"] == "e")


def test_what_a_split_group_exchanges_is_waited_for_inside_passes(world: World, tmp_path: Path) -> None:
    split = Description(tokens=False, blocks=BLOCKS, segments=(Segment(0, 2, is_split=True),), placement="construction")
    keys = {"pipeline.num_micro_batch": 2, "trace.directory": str(tmp_path), "trace.first_step": 0, "trace.num_steps": 1}
    run_case(world, train, Case(split, (8,), (1.0,) * 2, tuple(keys.items())))
    for name, own in events(tmp_path / "trace.json").items():
        waits = [event for event in own if event.get("cat") == "wait" and event["ph"] == "b"]
        inside = [event for event in waits if event["name"].startswith(("wait for all-", "wait for reduce-"))]
        assert bool(inside) == name.startswith("measured"), name
        passes = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["ph"] == "X" and event["cat"] == "compute"]
        assert all(any(low <= event["ts"] <= high for low, high in passes) for event in inside)


def test_a_step_that_fails_is_recorded_when_it_is_done(world: World, tmp_path: Path) -> None:
    """Recorded are steps that count, whatever rows they have; shown is one with the rows of the plan."""
    keys = {"pipeline.num_micro_batch": 2, "trace.directory": str(tmp_path), "trace.first_step": 1, "trace.num_steps": 3}
    case = Case(PIPELINES, (16, 8, 16, 8), (1.0,) * 2, tuple(keys.items()))
    run_case(world, train_around_a_bad_batch, case)
    for name, own in events(tmp_path / "trace.json").items():
        if name.startswith("measured"):
            assert sum(event["ph"] == "X" and event["name"] == "STEP" for event in own) == 3, "of the batch that fails there is none"
    text = Page((tmp_path / "report.html").read_text()).text
    assert "step 3, the only one recorded with the planned number of rows, 16 rows" in text
    assert "Bubble rate, measured" in text and "Between steps, measured" in text


def train_around_a_bad_batch(rank: int, num_ranks: int, case: Case) -> None:
    engine = make_engine(case)
    try:
        for number, batch in enumerate(case.batches):
            if number == 2:
                with pytest.raises(BatchError):
                    engine.step({})
            engine.step(batch)
    finally:
        engine.close()


def test_a_run_that_ends_before_its_first_recorded_step_says_so(world: World, tmp_path: Path) -> None:
    config = (("pipeline.num_micro_batch", 2), ("trace.directory", str(tmp_path / "there")))
    said = run_case(world, train_and_hear, Case(PIPELINES, (8, 8), (1.0,) * 2, config))
    assert [len(warnings) for warnings in said] == [1, 0]
    assert "no step was recorded in" in said[0][0] and list((tmp_path / "there").iterdir()) == []


def train_and_hear(rank: int, num_ranks: int, case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(rank, num_ranks, case)
    return [str(each.message) for each in heard if "recorded" in str(each.message)]


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = (("pipeline.num_micro_batch", 2), ("trace.directory", str(tmp_path / "file" / "inside")))
    with pytest.raises(RankFailure) as failure:
        run_case(world, train, Case(PIPELINES, (8,), (1.0,) * 2, config))
    assert len(failure.value.errors) == 2
    assert all(isinstance(error, ConfigError) and "cannot record steps in" in error.message for error in failure.value.errors.values())
