"""The plan of an engine: made now, or one made before, which is verified."""

from __future__ import annotations

from pathlib import Path

from whale.config import Config
from whale.errors import PlanError
from whale.estimate import Costs
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.serialization import from_json
from whale.planning import make_plan
from whale.planning.verify import verify


def decide(plan: Plan | str | Path | None, graph: ModelGraph, cluster: Cluster, config: Config) -> Plan:
    """The plan to run.

    Args:
        plan: made before, as a value or a JSON file; None plans.
        graph: the captured model.
        cluster: to run on.
        config: settings.

    Raises:
        PlanError: the file cannot be read, or the plan does not serve this model and cluster, or there is none.
    """
    if plan is None:
        return make_plan(graph, cluster, config)
    given = plan if isinstance(plan, Plan) else _read_plan(Path(plan))
    if given.model != graph.fingerprint:
        raise PlanError(
            f"a plan serves the model it was made for (plan: {given.model}, this model: {graph.fingerprint})",
            hint="plan again: the model, its scopes or the example batch have changed",
        )
    verify(given, graph, cluster, costs=Costs.of(config))
    return given


def _read_plan(path: Path) -> Plan:
    try:
        return from_json(Plan, path.read_text())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}", hint="whale plan ... --output FILE writes one") from error
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise PlanError(f"{path} is not a plan: {error}", hint="whale plan ... --output FILE writes one") from error
