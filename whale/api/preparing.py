"""Making ready to work on a batch: the training's plan, for another capture and another number of rows."""

from __future__ import annotations

from whale.api.apart import warn_where_apart
from whale.api.mode import CapturedMode
from whale.api.modes import Modes
from whale.planning import carry_plan, retarget_plan
from whale.runtime.runtime import Runtime
from whale.schedules import forward_schedules_of, short_schedules_of


def prepare_forward(runtime: Runtime, modes: Modes, captured: CapturedMode, num_rows: int) -> None:
    """Prepares a mode without backward for batches of so many rows, unless it is prepared already.

    Args:
        runtime: of the training.
        modes: holds the captured training.
        captured: in the mode.
        num_rows: of the global batch.
    """
    fitting = runtime.roster.plan.with_micro_batches_for(num_rows)
    prepared = runtime.plan_of(captured.key)
    if prepared is None or prepared.pipelines != fitting.pipelines:
        plan = retarget_plan(fitting, modes.train.graph, captured.graph)
        if captured.key == captured.graph.mode:  # at other sizes it would be said again
            warn_where_apart(plan, captured.graph, runtime.roster.world)
        runtime.prepare(captured.key, captured, plan, forward_schedules_of(plan))


def prepare_training(runtime: Runtime, modes: Modes, captured: CapturedMode, num_rows: int) -> str:
    """Prepares training on batches of the sizes of a capture and of so many rows, unless it is prepared already.

    A batch with too few rows for all micro-batches is trained in fewer.

    Args:
        runtime: of the training.
        modes: holds the captured training.
        captured: for these sizes.
        num_rows: of the global batch.

    Returns:
        The name under which it is prepared.

    Raises:
        PlanError: the plan cannot be carried over to these sizes.
    """
    whole = runtime.roster.plan
    fitting = whole.with_micro_batches_for(num_rows)
    name = captured.key if fitting is whole else _in_fewer(captured.key)
    prepared = runtime.plan_of(name)
    if prepared is None or prepared.pipelines != fitting.pipelines:
        plan = fitting if captured is modes.train else carry_plan(fitting, modes.train.graph, captured.graph)
        runtime.prepare(name, captured, plan, short_schedules_of(plan, whole))
    return name


def forget(runtime: Runtime, key: str) -> None:
    """Lets go of what was prepared for a capture."""
    runtime.forget(key)
    runtime.forget(_in_fewer(key))


def _in_fewer(key: str) -> str:
    return f"{key}, in fewer micro-batches"
