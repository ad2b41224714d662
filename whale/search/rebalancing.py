"""Whether another plan pays, now that devices are faster or slower than the plan at work was made for.

    stay      the step of the plan at work, at the speeds that were measured
    move      the step of the plan that is best at these speeds; planning, opening it, and bringing state to where it wants it
    pays      (1 - move / stay) is at least `LEAST_GAIN`, and so much of the horizon is longer than the move takes

Nothing is measured here: what was comes as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whale.config import Config
from whale.estimate import Costs, estimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning.strategy import block_of
from whale.search.deciding import decide
from whale.search.objective import Objective
from whale.units import format_duration, format_seconds

LEAST_GAIN = 0.05
"""Of a step: what is predicted to bring less is within the error of predictions."""


@dataclass(frozen=True)
class PlanMove:
    """Another plan beside the one at work, both at the speeds that were measured.

    Attributes:
        plan: that is best at these speeds.
        cluster: with these speeds.
        own_seconds: per rank of the plan, what it computes itself in a step (`DeviceEstimate.own_seconds`).
        stay_seconds, move_seconds: of a step, of the plan at work and of the other.
        gain: the share of a step (by the objective of the search) that it saves; below 0 where it loses.
        least_gain: that is wanted.
        cost_seconds: until the first step under it, predicted.
        horizon: seconds in which it has to bring that.
    """

    plan: Plan
    cluster: Cluster
    own_seconds: tuple[float, ...]
    stay_seconds: float
    move_seconds: float
    gain: float
    least_gain: float
    cost_seconds: float
    horizon: float

    @property
    def against(self) -> str:
        """Why not to move; "" where it pays."""
        if self.gain < self.least_gain:
            return f"it saves {max(0.0, self.gain):.0%} of a step (at least {self.least_gain:.0%} is wanted)"
        if self.gain * self.horizon < self.cost_seconds:
            return f"it saves {format_duration(self.gain * self.horizon)} within {format_duration(self.horizon)}"
        return ""

    @property
    def pays(self) -> bool:
        return not self.against

    def __str__(self) -> str:
        text = f"predicted {format_seconds(self.stay_seconds)} per step as it is, {format_seconds(self.move_seconds)} under another plan"
        return f"{text}, and {format_duration(self.cost_seconds)} to move"


def best_move(
    plan: Plan,
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    slowdowns: Mapping[str, float],
    *,
    given: Plan | str | Path | None = None,
    overhead: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> PlanMove:
    """The best plan at other speeds, beside the one at work. What the user has set stays as it is set.

    Args:
        plan: at work.
        graph: the captured model.
        cluster: with the speeds that the plan was made for.
        config: settings.
        slowdowns: that were measured, by device; the others are as they were.
        given: the plan that the user gave, whose strategy stays: of it, cuts and rows may change. None where none was given.
        overhead: seconds that planning, and putting a plan to work, take beside bringing state to where it is wanted.
        least_gain: of a step, that is wanted.

    Raises:
        WhaleError: as `decide`.
    """
    there = cluster.slowed(slowdowns)
    settings = config.with_values({"planning.batch_rows": None})
    stay = estimate(plan, graph, there, Costs.for_model(settings, graph, there))
    if isinstance(given, Plan) or (given is not None and Path(given).suffix not in (".yaml", ".yml")):
        is_cut_by_scopes = any(op.scope for op in graph.ops)
        blocks = tuple(block_of(replica, is_cut_by_scopes=is_cut_by_scopes) for replica in plan.replicas)
        settings, given = settings.with_values({"replicas": blocks}), None
    other, move = decide(given, graph, there, settings, rows=None if given is not None else plan.planned_rows)
    objective = Objective(config.planning.objective, there, plan.planned_rows)
    gain = 0.0 if other.replicas == plan.replicas else 1 - objective.of(other, move) / objective.of(plan, stay)
    moved_bytes = max(sum(each.stage_bytes) for each in move.devices)  # at most: all that a device holds
    cost = overhead + moved_bytes / min((link.bandwidth for link in there.links), default=1.0)
    return PlanMove(
        plan=other,
        cluster=there,
        own_seconds=move.own_seconds(other.devices),
        stay_seconds=stay.step_seconds,
        move_seconds=move.step_seconds,
        gain=gain,
        least_gain=least_gain,
        cost_seconds=cost,
        horizon=config.runtime.rebalance_horizon,
    )


def step_seconds(plan: Plan, graph: ModelGraph, cluster: Cluster, config: Config, slowdowns: Mapping[str, float]) -> tuple[float, float]:
    """Of a step of a plan, predicted: with the speeds that it was made for, which the cluster has, and with those that were measured."""
    even, stay = (estimate(plan, graph, each, Costs.for_model(config, graph, each)) for each in (cluster, cluster.slowed(slowdowns)))
    return even.step_seconds, stay.step_seconds
