"""Making ready to evaluate or predict: the training's plan, for another capture and another number of rows."""

from __future__ import annotations

from whale.api.apart import warn_where_apart
from whale.api.mode import ModeName
from whale.api.modes import Modes
from whale.planning import retarget_plan
from whale.runtime.runtime import Runtime
from whale.schedules import forward_schedules_of


def prepare_forward(runtime: Runtime, modes: Modes, name: ModeName, num_rows: int) -> None:
    """Prepares a mode without backward for batches of so many rows, unless it is prepared already.

    Args:
        runtime: of the training.
        modes: holds the capture of the mode.
        name: of the mode.
        num_rows: of the global batch.
    """
    fitting = runtime.roster.plan.with_micro_batches_for(num_rows)
    prepared = runtime.plan_of(name)
    if prepared is None or prepared.pipelines != fitting.pipelines:
        plan = retarget_plan(fitting, modes.train.graph, modes[name].graph)
        warn_where_apart(plan, modes[name].graph, runtime.roster.world)
        runtime.prepare(name, modes[name], plan, forward_schedules_of(plan))
