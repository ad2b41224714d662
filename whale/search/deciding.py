"""The plan of a run or of a simulation: searched for, written down by the user, or made before and verified; with its estimate."""

from __future__ import annotations

import contextlib
from pathlib import Path

from whale.config import Config, read_plan
from whale.errors import ConfigError, PlanError
from whale.estimate import Costs, StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import from_json
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.plan import plan_and_estimate
from whale.planning.verify.verify import verify
from whale.search.freedom import pin_of
from whale.search.searching import search


def decide(
    plan: Plan | str | Path | None, graph: ModelGraph, cluster: Cluster, config: Config, *, rows: int | None = None
) -> tuple[Plan, StepEstimate]:
    """The plan, and the estimate of its step.

    Args:
        plan: made before, as a value or a JSON file; or written down, in a YAML file, which fixes what it says; None plans, by a
            search where nothing says how the model is divided.
        graph: the captured model.
        cluster: to run on.
        config: settings.
        rows: of the global batch to plan for; None for the example's. A plan that was made before has its own.

    Raises:
        ConfigError: a written plan does not fit the model, the cluster or itself; or there is no search for the objective to rule.
        PlanError: the file cannot be read, or the plan does not serve this model and cluster, or there is none.
    """
    if plan is None:
        return _planned(graph, cluster, config, rows)
    if isinstance(plan, (str, Path)) and Path(plan).suffix in (".yaml", ".yml"):
        return _planned(graph, cluster, config.with_values(read_plan(plan)), rows)
    given = plan if isinstance(plan, Plan) else _read_plan(Path(plan))
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
    return given, verify(given, graph, cluster, costs=Costs.for_model(config, graph, cluster))


def _planned(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None) -> tuple[Plan, StepEstimate]:
    pin, objective = pin_of(graph, config), config.planning.objective
    if pin is not None:
        if objective != "step_time":
            raise ConfigError(
                f"planning.objective {objective} needs a search, and what is set leaves none: {pin}", hint="take it out, or the objective"
            )
        return plan_and_estimate(graph, cluster, config, rows=rows)
    if len(cluster.devices) == 1 and objective != "memory":  # there is something to look for only where the model does not fit as it is
        with contextlib.suppress(MemoryShortage):
            return plan_and_estimate(graph, cluster, config, rows=rows)
    found = search(graph, cluster, config, rows=rows)
    return found.plan, found.step


def _read_plan(path: Path) -> Plan:
    try:
        return from_json(Plan, path.read_text())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}", hint="whale plan ... --output FILE writes one") from error
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise PlanError(f"{path} is not a plan: {error}", hint="whale plan ... --output FILE writes one") from error
