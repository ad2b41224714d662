"""The trace: what chrome://tracing and Perfetto read, with every action in its place."""

from __future__ import annotations

import json

from tests.unit.planning.graphs import chain, cluster
from tests.unit.report.test_page import slowed
from whale.config import Config
from whale.estimate import estimate
from whale.planning import make_plan
from whale.report import trace_json


def test_every_action_is_a_slice_and_what_overlaps_is_matched() -> None:
    graph, there = chain(8, width=64), cluster((3e9, 1e9))
    plan = make_plan(graph, there, Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}), rows=64)
    step = estimate(plan, graph, there)
    events = json.loads(trace_json(plan, step, [slowed(step), slowed(step, 3.0)]))["traceEvents"]
    assert all({"ph", "name", "pid", "tid", "ts"} <= set(event) and event["ts"] >= 0 for event in events), "what every reader asks for"
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "predicted h0/0", 2: "predicted h0/1", 3: "measured h0/0", 4: "measured h0/1"}
    for process, each in ((1, step.devices[0]), (2, step.devices[1])):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert [event["name"] for event in slices] == [str(span.action) for span in each.compute]
        assert slices[-1]["ts"] + slices[-1]["dur"] <= step.step_seconds * 1e6 + 0.01
    begun, ended = ([event["id"] for event in events if event["ph"] == phase] for phase in "be")
    assert begun == ended and len(set(begun)) == len(begun)
    measured = [event for event in events if event["ph"] == "X" and event["pid"] == 3]
    assert len(measured) == 2 * len(step.devices[0].compute)
    assert measured[-1]["ts"] > 2 * step.step_seconds * 1e6, "one step behind the other"
    assert sum(event["ph"] == "C" for event in events) == sum(len(each.memory) for each in step.devices)
