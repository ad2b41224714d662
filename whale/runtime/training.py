"""One step of training: gradients from a batch, made whole, scaled, clipped, applied."""

from __future__ import annotations

import torch

from whale.runtime.execute.batch_view import BatchView
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.scaling import scale


def train_step(runtime: Runtime, state: EngineState, batch: BatchView) -> torch.Tensor:
    """Trains a state on one global batch.

    Args:
        runtime: a plan at work.
        state: is changed in place; where an error is raised before the optimizer's step, only its gradients have.
        batch: the rows in hand.

    Returns:
        The loss of the global batch: 0-dim, on this rank's device, equal on all ranks. The device is not synchronised.

    Raises:
        BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
        RuntimeFault: a peer died or a wait outlasted its limit.
    """
    state.forget_gradients()
    step = runtime.train(batch, state.step_number)
    if step.account.needs_correction:
        scale(step.account.correction(runtime.totals(step)), state.parameters.values())
    if runtime.clipping is not None:
        with runtime.status.reporting():
            runtime.clipping.clip()
    runtime.status.set("STEP")
    state.advance()
    return step.account.loss(runtime.totals(step))
