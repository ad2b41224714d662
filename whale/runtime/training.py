"""One step of training: gradients from a batch, made whole, scaled, clipped, applied."""

from __future__ import annotations

import math

import torch

from whale.errors import WhaleError, warn
from whale.ir.schedule import Action, Kind
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.loss import LossAccount
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.scaling import scale


def train_step(runtime: Runtime, state: EngineState, batch: BatchView, mode: str = "train") -> torch.Tensor:
    """Trains a state on one global batch.

    Args:
        runtime: a plan at work.
        state: is changed in place; where an error is raised before the optimizer's step, only its gradients have.
        batch: the rows in hand.
        mode: name of the training that was prepared for the sizes of the batch.

    Returns:
        The loss of the global batch: 0-dim, on this rank's device, equal on all ranks. The device is not synchronised.

    Raises:
        BatchError: the batch cannot be divided as the plan says, or differs between ranks.
        RuntimeFault: a peer died or a wait outlasted its limit; or the loss is no finite number.
    """
    if runtime.roster.world.rank == 0:
        state.look_at_schedule()
    state.forget_gradients()
    kept = runtime.kept_buffers(mode)
    kept.keep()
    try:
        loss, applies = _gradients(runtime, state, batch, mode)
        if applies:
            runtime.settle(mode, batch.num_rows)
    except WhaleError:
        kept.put_back()
        raise
    if not applies:
        kept.put_back()
    runtime.status.set("STEP")
    runtime.watch.begin(Action(Kind.STEP))
    state.advance(loss, applies=applies)
    runtime.watch.end()
    return loss


def _gradients(runtime: Runtime, state: EngineState, batch: BatchView, mode: str) -> tuple[torch.Tensor, bool]:
    """Gives the parameters the gradients of a batch; its loss, and whether they are to be applied."""
    step = runtime.train(batch, state.step_number, mode)
    if step.account.needs_correction:
        scale(step.account.correction(runtime.totals(step)), state.parameters.values())
    norm = None
    if runtime.clipping is not None:
        with runtime.status.reporting():
            norm = runtime.clipping.clip()
    loss = step.account.loss(runtime.totals(step))
    with runtime.status.reporting():
        return loss, _is_fit(runtime, state.step_number, step.account, loss, norm)


def _is_fit(runtime: Runtime, step_number: int, account: LossAccount, loss: torch.Tensor, norm: torch.Tensor | None) -> bool:
    """Whether a step is to be applied; where the settings leave out none, a loss that is no number ends the run."""
    if not runtime.config.gradient.skip_nonfinite:
        runtime.losses.look(step_number, account, loss)
        return True
    assert norm is not None, "the norm is worked out where steps may be left out"
    found, size = torch.stack([loss, norm]).tolist()
    if math.isfinite(found) and math.isfinite(size):
        return True
    where = "" if math.isfinite(found) else f" {runtime.losses.ranks_of(account)}"
    if runtime.roster.world.rank == 0:
        warn(f"step {step_number + 1} is left out: its loss is {found:g}{where}, the norm of its gradients {size:g}")
    return False
