"""A plan that was made before: read, held to the model and the devices that there are, with the figures of its step now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs, StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, states_of
from whale.ir.reading import read_json
from whale.ir.serialization import decode
from whale.planning.explain.choices import explain_step
from whale.planning.pricing import with_figures
from whale.planning.verify.verify import verify
from whale.units import format_seconds

_WRITES_ONE = "whale plan ... --output FILE writes one"


def given_plan(plan: Plan | str | Path, graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None) -> tuple[Plan, StepEstimate]:
    """The plan with the figures of its step on this cluster, and the estimate.

    Args:
        plan: as a value or a JSON file.
        graph: the captured model.
        cluster: to run on.
        config: settings.
        rows: that are asked for; None for those of the plan.

    Raises:
        PlanError: the file cannot be read, or the plan does not serve this model, these rows and this cluster.
    """
    given = plan if isinstance(plan, Plan) else _read(Path(plan))
    with _told_of(None if isinstance(plan, Plan) else plan):
        if rows not in (None, given.planned_rows):
            raise PlanError(
                f"a plan that was made before has rows of its own (plan: {given.planned_rows}, asked for: {rows})",
                hint="write it down (whale plan --output FILE.yaml), and plan again with other rows",
            )
        if given.model != graph.fingerprint:
            raise PlanError(
                f"a plan serves the model it was made for (plan: {given.model}, this model: {graph.fingerprint})",
                hint="plan again: the model, its scopes or the example batch have changed",
            )
        costs = Costs.for_model(config, graph, cluster)
        if not given.parameter_states:
            given = replace(given, parameter_states=states_of(graph.parameters, costs.optimizer_states))
        step = verify(given, graph, cluster, costs=costs)
    return _with_figures_of(given, step), step


def _with_figures_of(plan: Plan, step: StepEstimate) -> Plan:
    """The plan with what its step takes now: a cluster with other figures, or a profile, makes that another than it was."""
    if step.step_seconds == plan.step_seconds:
        return plan
    now = tuple(explain_step(step))
    names = {choice.pass_name for choice in now}
    kept = (choice for choice in plan.choices if choice.pass_name not in names)
    said = Choice(
        "plan",
        "figures",
        f"{format_seconds(step.step_seconds)} per step",
        bound=f"what is known of the devices now; it was made, and its other reasons were told, at {format_seconds(plan.step_seconds)}",
    )
    return replace(with_figures(plan, step), choices=(said, *kept, *now))


@contextmanager
def _told_of(path: str | Path | None) -> Iterator[None]:
    """Faults inside tell the file, which is one of two where plans are compared."""
    try:
        yield
    except PlanError as fault:
        fault.where = path if fault.where is None else fault.where
        raise


def _read(path: Path) -> Plan:
    try:
        found: Plan = decode(Plan, _with_names(read_json(path)))
        return found
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}", hint=_WRITES_ONE) from error
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise PlanError(f"{path} is not a plan: {error}", hint=f"{_WRITES_ONE}; one that is written by hand is a FILE.yaml") from error


def _with_names(data: Any) -> Any:
    """What a plan's file says, without states of classes of parameters, which older ones have: there was one that could be."""
    states = data.get("parameter_states", ()) if isinstance(data, dict) else ()
    is_older = isinstance(states, list) and any(isinstance(each, dict) and isinstance(each.get("parameters"), str) for each in states)
    return {**data, "parameter_states": []} if is_older else data
