"""Whether another plan pays, now that devices are faster or slower than the present plan assumes. A function of measured values.

stay      the step of the present plan at the measured speeds
move      the step of the best plan at these speeds; planning, opening it, moving state
pays      (1 - move / stay) is at least `LEAST_GAIN`, and saves more within the horizon than the move takes
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

LEAST_GAIN = 0.05  # of a step; a smaller predicted gain is within the error of predictions


@dataclass(frozen=True)
class PlanMove:
    """Another plan and the present one, both at the measured speeds."""

    plan: Plan  # the best at these speeds
    cluster: Cluster  # with these speeds
    own_seconds: tuple[float, ...]  # per rank of the plan, its own computing in a step (`DeviceEstimate.own_seconds`)
    stay_seconds: float  # of a step of the present plan
    move_seconds: float  # of a step of the other
    gain: float  # saved share of a step, by the objective; negative where it loses
    least_gain: float  # required
    cost_seconds: float  # predicted, until the first step of the other plan
    horizon: float  # seconds within which the move must pay

    @property
    def against(self) -> str:
        """Why not to move; "" where it pays."""
        if self.gain < self.least_gain:
            return f"it saves {max(0.0, self.gain):.0%} of a step (at least {self.least_gain:.0%} is required)"
        if self.gain * self.horizon < self.cost_seconds:
            return f"it saves {format_duration(self.gain * self.horizon)} within {format_duration(self.horizon)}"
        return ""

    @property
    def pays(self) -> bool:
        return not self.against

    def __str__(self) -> str:
        text = f"predicted {format_seconds(self.stay_seconds)} per step under this plan, {format_seconds(self.move_seconds)} under another"
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
    """The best plan at other speeds, compared with the present one. What the user has set stays.

    Args:
        plan: the present one.
        graph: the captured model.
        cluster: with the speeds that the plan was made for.
        config: settings.
        slowdowns: measured, by device; others are unchanged.
        given: the plan that the user gave, of which only cuts and rows may change; None where none was given.
        overhead: seconds of planning and of opening a plan, without moving state.
        least_gain: required share of a step.

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
    """Predicted seconds of a plan's step at the cluster's speeds, and at the measured ones."""
    even, stay = (estimate(plan, graph, each, Costs.for_model(config, graph, each)) for each in (cluster, cluster.slowed(slowdowns)))
    return even.step_seconds, stay.step_seconds
