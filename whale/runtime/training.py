"""A training step: gradients of one or several batches, summed, then scaled, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from whale.errors import BatchError, WhaleError, warn
from whale.ir.schedule import Action, Kind
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.call_check import Call
from whale.runtime.execute.loss import LossAccount, Scale
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.host_copies import NUM_STEPS_AHEAD
from whale.runtime.state.scaling import note_non_finite, scale, too_large
from whale.runtime.state.updates import KeptBuffers


@dataclass(frozen=True)
class Accumulated:
    """What forward and backward passes have accumulated for an update, besides the gradients."""

    loss: torch.Tensor  # sum of their losses: 0-dim, on this rank's device, equal on all ranks
    account: LossAccount  # this rank's part in the last loss
    buffers: KeptBuffers  # the model's, as they were before the first pass
    num_batches: int
    num_rows: int  # of the last global batch
    metrics: Mapping[str, torch.Tensor]  # of the last global batch
    # 1 if some gradient is not finite, else 0, where the pass that took the loss scale back has looked and no other gradients were added
    non_finite: torch.Tensor | None = None
    clipped_for: float | None = None  # the scale of the update that the gradients were clipped for; None if they were not since


def train_step(
    runtime: Runtime, state: EngineState, batch: BatchView, mode: str = "train", before: Accumulated | None = None
) -> tuple[torch.Tensor, Accumulated]:
    """`forward_backward` on one global batch, and `update`; returns what the first does."""
    loss, accumulated = forward_backward(runtime, state, batch, mode, before, call="step")
    update(runtime, state, accumulated)
    return loss, accumulated


def forward_backward(
    runtime: Runtime,  # runs the plan
    state: EngineState,  # its gradients, and the buffers that the model writes, are changed in place; on an error nothing is changed
    batch: BatchView,  # this rank's rows
    mode: str = "train",  # name of the training that was prepared for the sizes of the batch
    before: Accumulated | None = None,  # what earlier passes have accumulated for the same update
    *,
    call: Call = "forward_backward",  # of the engine, equal on all ranks
) -> tuple[torch.Tensor, Accumulated]:
    """Adds the gradients of one global batch to those of the optimizer's parameters.

    Returns:
        The loss of the global batch: 0-dim, on this rank's device, equal on all ranks; and the argument of `update`. Does not
        synchronise the device.

    Raises:
        BatchError: the batch cannot be divided as the plan says, or differs between ranks.
        RuntimeFault: a peer died or a wait timed out; or the loss is not finite, and no setting skips such steps.
    """
    if runtime.roster.world.rank == 0 and before is None:
        state.check_schedule()
    # the passes overwrite the buckets, so accumulated gradients are copied out of them meanwhile
    earlier = {} if before is None else {name: gradient.clone() for name, gradient in state.gradients().items()}
    state.forget_gradients()
    buffers = runtime.kept_buffers(mode) if before is None else runtime.kept_buffers(mode).another()
    buffers.keep()
    try:
        step = runtime.train(
            batch,
            (state.step_number, *(() if before is None else (before.num_batches,))),
            mode,
            _scale_of(runtime, state),
            call,
        )
        non_finite = None
        if step.account.needs_correction:
            correction = step.account.correction(runtime.totals(step))
            if step.account.is_scaled_alone and call == "step" and before is None and runtime.clipping is None:
                with runtime.status.reporting():
                    non_finite = runtime.unscale(state, correction)
            else:
                scale(correction, state.kept.values())
        loss, metrics = step.account.loss(runtime.totals(step)), step.account.metrics(runtime.totals(step))
        if not runtime.leaves_out_steps(state):
            with runtime.status.reporting():
                runtime.losses.look(state.step_number, step.account, loss)
        runtime.settle(mode, batch.num_rows)
    except WhaleError as error:
        buffers.put_back()
        if not isinstance(error, BatchError):
            runtime.forget_lost()
        if before is not None:
            state.give_gradients(earlier)
        raise
    state.add_gradients(earlier)
    state.has_moved_statistics = True
    if before is None:
        return loss, Accumulated(loss, step.account, buffers, 1, batch.num_rows, metrics, non_finite)
    return loss, Accumulated(before.loss + loss, step.account, before.buffers, before.num_batches + 1, batch.num_rows, metrics)


def update(runtime: Runtime, state: EngineState, accumulated: Accumulated, factor: float = 1.0) -> torch.Tensor:
    """Scales and clips the accumulated gradients, and applies them.

    Args:
        state: changed in place. If the update is skipped, buffers are as they were before the first pass.
        accumulated: by `forward_backward`.

    Returns:
        The loss: the sum over the batches, times the factor.

    Raises:
        RuntimeFault: a peer died or a wait timed out; or loss or gradients are not finite at the least loss scale.
    """
    loss = accumulated.loss if factor == 1.0 else accumulated.loss * factor
    try:
        with runtime.status.reporting():
            if state.scaling is not None:
                state.scaling.look(NUM_STEPS_AHEAD - 1)  # before anything of this update is done
            if factor != 1.0:
                scale(torch.tensor(factor, dtype=torch.float64), state.kept.values())
            norm = None if runtime.clipping is None else runtime.clipping.clip()
            found, applies = None, True
            if runtime.masks_steps(state):
                found = _found(runtime, state, accumulated, norm)
            elif runtime.leaves_out_steps(state):
                applies = _is_fit(runtime, state, accumulated, norm)
            else:
                runtime.losses.let_pass(state.step_number)
    except WhaleError:
        accumulated.buffers.put_back()
        raise
    if found is not None:
        accumulated.buffers.put_back_where(found)
    if not applies:
        accumulated.buffers.put_back()
        runtime.forget_lost()
    runtime.status.set("STEP")
    runtime.watch.begin(Action(Kind.STEP))
    with runtime.status.reporting():
        number, local = state.step_number, runtime.local_steps
        if local is not None:
            local.begin()
        state.advance(loss, applies=applies, found=found)
        if runtime.roster.world.can_compare:
            state.note_settings()
        if (local is not None and local.end()) or applies:
            runtime.publish()
    runtime.watch.end()
    if found is not None and state.scaling is not None:
        state.scaling.update(number, accumulated.loss, found)
    return loss


def _scale_of(runtime: Runtime, state: EngineState) -> Scale:
    if state.scaling is None:
        return 1.0
    return state.scaling.on(runtime.roster.world.device) if runtime.masks_steps(state) else state.scaling.scale.value


def _found(runtime: Runtime, state: EngineState, accumulated: Accumulated, norm: torch.Tensor | None) -> torch.Tensor:
    """1 where an update is not to be applied, else 0: 0-dim float32, on this rank's device, equal on all ranks, and not read here."""
    if state.scaling is None:
        return runtime.losses.stop(accumulated.loss)
    found, numbers = accumulated.non_finite, [accumulated.loss]
    if found is None:
        found = torch.zeros((), dtype=torch.float32, device=accumulated.loss.device)
        numbers.append(runtime.clip(state, None) if norm is None else norm)
    note_non_finite(numbers, found)
    return found


def _is_fit(runtime: Runtime, state: EngineState, accumulated: Accumulated, norm: torch.Tensor | None) -> bool:
    """Whether an update is applied, equal on all ranks; adapts the loss scale."""
    if norm is None and accumulated.non_finite is None:
        norm = runtime.clip(state, None)
    seen = accumulated.non_finite if norm is None else norm
    assert seen is not None
    number, scaling = state.step_number, state.scaling
    found, size = torch.stack([accumulated.loss, seen]).cpu().tolist()
    is_finite = math.isfinite(found) and (size == 0 if norm is None else math.isfinite(size))
    ranks = "" if is_finite or math.isfinite(found) else f" {runtime.losses.ranks_of(accumulated.account)}"
    if scaling is not None:
        if not is_finite and scaling.is_least and not runtime.config.gradient.skip_nonfinite:
            size = size if norm is not None else float(runtime.clip(state, None))
            runtime.forget_lost()
            raise too_large(number, scaling.scale, f"loss {found:g}{ranks}, gradient norm {size:g}")
        scaling.take(is_finite=is_finite)
        return is_finite
    if runtime.roster.world.rank == 0 and not is_finite:
        warn(f"step {number + 1} is skipped: its loss is {found:g}{ranks}, its gradient norm {size:g}")
    return is_finite
