"""The engine, what a user calls: it trains, evaluates, predicts, saves and loads a parallelised model."""

from __future__ import annotations

import gc
import math
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from whale.api.batch_passes import BatchPasses
from whale.api.calls import Turn, all_ranks, user_call
from whale.api.guards import Guards
from whale.api.hints import answer, call_answer, copy_answer
from whale.api.keeping import FaultKeeper
from whale.api.loader import DataPosition, Loader, leave_group, make_loader
from whale.api.modes import Modes
from whale.api.opening import CheckedMove, Decided, Opening
from whale.api.rank_batch import RankBatch
from whale.api.results import Gradients, OwnedParameters, give_extra_state, state_keys, step_loss, whole_state
from whale.api.resuming import resume
from whale.api.step_log import StepLog
from whale.api.tracing import Tracing
from whale.comm import on_first_rank
from whale.config import Source
from whale.errors import PREEMPTED_CODE, CheckpointError, ConfigError, Preempted, RuntimeFault, first_few, warn
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, describe_degrees, describe_shape
from whale.ir.schedule import Schedule
from whale.progress import progress
from whale.runtime.checkpoint.model_files import without_compiled
from whale.runtime.checkpoint.saving import Saving
from whale.runtime.checkpoint.surviving import SurvivingState
from whale.runtime.checkpoint.training_state import load_state, save_state
from whale.runtime.execute.call_check import Call
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.training import Accumulated, forward_backward, train_step, update
from whale.runtime.weights.gathering import fill_tensors, gather_tensors
from whale.units import counted

if TYPE_CHECKING:
    from whale.api.adapting import Adapting
    from whale.ir.health import Health


class Engine:
    """A model in training on the devices of a plan. Made by `whale.parallelize`.

    Args:
        modes: the captured model.
        state: what training changes.
        runtime: the plan at work.
        opening: how this plan was opened, and others would be.
        decided: the decision for the plan.
        overhead: seconds of planning and opening.
        tracing: records chosen steps; None for none.

    Attributes:
        modes, state, runtime, opening: as given.
        turn: which thread is inside.
    """

    _saving: Saving | None

    def __init__(
        self,
        modes: Modes,
        state: EngineState,
        runtime: Runtime,
        opening: Opening,
        decided: Decided,
        *,
        overhead: float = 0.0,
        tracing: Tracing | None = None,
    ) -> None:
        self.modes, self.opening = modes, opening
        self.turn = Turn()
        self._data = DataPosition(state)
        self._saving, self._has_lost_peers = None, False
        self._accumulated: Accumulated | None = None
        self._applied: list[tuple[torch.Tensor, int]] = []  # gradients that the script may write too late, and their versions
        self._has_warned_of_late_writes = False
        self._metrics: Mapping[str, torch.Tensor] = {}
        world, train, trains = runtime.roster.world, modes.train, opening.optimizer is not None
        tensors, is_first = train.program.tensors, world.rank == 0
        self._guards = Guards(modes.model, train.graph, tensors, world.device, trains=trains, warns=is_first)
        self._passes = BatchPasses(modes, self._guards, self._data)
        self._warns_of_no_optimizer, self._has_warned_of_parts = not trains and is_first, False
        self._log = StepLog.of(opening.settings.runtime, world)
        self._saved: tuple[Path, int, object] | None = None  # the last: where, of which step, with what
        self._keeping = FaultKeeper(opening, self._data)
        weakref.finalize(self, world.notice.leave).atexit = False  # while the interpreter ends, SIGTERM stays unheard
        self._adapting = None if world.is_alone else _adapting_to(is_first)
        self._take_up(state, runtime, tracing, decided, overhead)
        _OPEN.add(self)

    def _take_up(self, state: EngineState, runtime: Runtime, tracing: Tracing | None, decided: Decided, overhead: float) -> None:
        """Goes on with a state, and a plan at work on it."""
        self.state, self.runtime, self._tracing = state, runtime, tracing
        self._plan: Plan | None = None
        self._data.state = state
        self._first_step = state.step_number
        self._guards.take_up(state.tensors)
        self._passes.take_up(state, runtime)
        self._keeping.take_up(self.opening, state, runtime)
        if self._hears_sigterm:
            runtime.roster.world.notice.listen()
        if self._adapting is not None:
            self._adapting.overhead = overhead
            self._adapting.take_up(decided.plan, decided.own_seconds, self.opening.attachment.cluster)

    @property
    def _hears_sigterm(self) -> bool:
        settings = self.opening.settings.runtime
        return settings.save_on_sigterm is not None or settings.keep_on_fault is not None

    # ---- work ------------------------------------------------------------------------------------------------

    @all_ranks
    def step(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        """Trains on one global batch.

        Args:
            batch: the global batch, equal on every rank, or a batch of `loader`.
            update: whether its gradients, and those of earlier `forward_backward` calls, are applied; otherwise it is `forward_backward`.

        Returns:
            The loss of the global batch: 0-dim, on this rank's device (not synchronised), equal on all ranks.

        Raises:
            BatchError: the batch has not the example's form, is too small, or differs between ranks. Nothing has changed.
            CaptureError: layers were replaced since the capture, parameters frozen or unfrozen, or `torch.autocast` is active.
            RuntimeFault: a peer died, or a wait outlasted ``communication.timeout_seconds``; or weights of one parameter or settings of
                the optimizer differ between ranks, or the script has written weights of which ops read copies; or the loss is not finite,
                and has not gone into the weights (on a GPU it may have: it is read two steps later).
        """
        return self._begin(batch, "step" if update else "forward_backward")

    @all_ranks
    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Adds the gradients of one global batch to those that wait for `update`; nothing is applied.

        As after ``loss.backward()``, they are sums over the batches: ``update(scale=1 / num_batches)`` applies their mean. In between,
        `gradients` reads and `clip_grad_norm_` clips them.

        Args:
            batch: as of `step`.

        Returns:
            The loss of the global batch, as of `step`.

        Raises:
            WhaleError: as `step`; where the batch is refused, the gradients are those of the batches before it.
        """
        return self._begin(batch, "forward_backward")

    @all_ranks
    def update(self, *, scale: float = 1.0) -> None:
        """Applies the gradients of `forward_backward`: clips them by ``gradient.clip_norm``, steps optimizer and scheduler.

        Args:
            scale: factor on the gradients, before they are clipped.

        Raises:
            ConfigError: there are none, the scale is not finite, or `clip_grad_norm_` was given another.
            RuntimeFault: as `step`, or scales differ between ranks.
        """
        self.runtime.check_open()
        self.runtime.call_together("update", scale)
        if not math.isfinite(scale):
            raise ConfigError(f"engine.update: scale={scale} is not finite")
        accumulated = self._waiting()
        if accumulated.clipped_for not in (None, scale):
            raise ConfigError(
                f"engine.update: scale={scale:g}, but engine.clip_grad_norm_ has clipped the gradients for "
                f"scale={accumulated.clipped_for:g}",
                hint=f"give both the same, so that what is applied has the norm: clip_grad_norm_(max_norm, scale={scale:g})",
            )
        if not self.runtime.leaves_out_steps(self.state):
            with self.runtime.status.reporting():  # what is applied, also if the loss of one of its batches was raised and caught
                self.runtime.losses.look(self.state.step_number, accumulated.account, accumulated.loss)
        loss = update(self.runtime, self.state, accumulated, scale)
        self._accumulated = None
        self._stepped(loss, accumulated)
        self._rest()

    @all_ranks
    def clip_grad_norm_(self, max_norm: float, *, scale: float = 1.0) -> torch.Tensor:
        """Scales the gradients that wait for `update` so that it applies some whose 2-norm is at most a number.

        The norm is that of ``gradient.clip_norm``: with each element once over all ranks, and of what is applied. Where hosts step on
        their own (``communication.sync_steps``), each has a norm of its own.

        Args:
            max_norm: the largest norm; ``math.inf`` clips nothing.
            scale: the factor that `update` will be given: ``1 / 4`` of the mean of four batches.

        Returns:
            The norm before, times `scale`: 0-dim float64, equal on all ranks.

        Raises:
            ConfigError: no gradients wait, the norm is not above 0, or the scale not above 0 and finite.
            RuntimeFault: a peer died, or norms or scales differ between ranks.
        """
        self.runtime.check_open()
        self.runtime.call_together("clip_grad_norm_", max_norm / scale if scale else 0.0)
        if not max_norm > 0:
            raise ConfigError(f"engine.clip_grad_norm_: max_norm={max_norm} is not above 0")
        if not 0 < scale < math.inf:
            raise ConfigError(f"engine.clip_grad_norm_: scale={scale} is not above 0 and finite")
        waiting = self._waiting()
        if not math.isinf(max_norm):
            self._accumulated = replace(waiting, clipped_for=scale)
        return self.runtime.clip(self.state, None if math.isinf(max_norm) else max_norm, scale)

    def _begin(self, batch: Any, call: Literal["step", "forward_backward"]) -> torch.Tensor:
        self.runtime.check_open()
        self._end_if_preempted()
        if self._applied:
            self._warn_of_late_writes()
        if self._warns_of_no_optimizer:
            self._warns_of_no_optimizer = False
            warn("no weights are updated: parallelize was given no optimizer=, so step computes gradients only")
        if self.state.step_number == self._first_step and self._accumulated is None:
            with progress("taking the first step", on_first=self.runtime.roster.world.rank == 0) as note:
                if self.runtime.compilation is not None:
                    self.runtime.compilation.note = note
                return self._train(batch, call)
        return self._train(batch, call)

    def _end_if_preempted(self) -> None:
        """Raises Preempted where SIGTERM has come to any rank, after a save; on all ranks before the same call.

        While gradients wait for an update it goes on: a checkpoint does not have them.
        """
        if not self._hears_sigterm:
            return
        self.runtime.roster.world.notice.check()
        folder, number = self.opening.settings.runtime.save_on_sigterm, self.runtime.num_noticed
        if not number or self._accumulated is not None:
            return
        world, step_number = self.runtime.roster.world, self.state.step_number
        self._end_round()
        if folder is None:
            self._finish_saving()
            self.runtime.losses.settle()
            self.runtime.merge_statistics(self.state)
            self._keeping.copy_changes("save")
            self._leave_all()
            raise Preempted("")
        path = Path(folder) / f"step_{step_number}"
        where, when, extra = self._saved or (None, None, None)
        self.save(path, extra=extra if (where, when) == (path.resolve(), step_number) else None)
        if world.rank == 0:
            text = f"{number} of {counted(world.size, 'rank')} received SIGTERM"
            print(f"whale: {text}: saved {path}; the run ends with exit code {PREEMPTED_CODE}", file=sys.stderr, flush=True)
        raise Preempted(str(path))

    def _train(self, batch: Any, call: Literal["step", "forward_backward"]) -> torch.Tensor:
        batch = self._data.recognized(batch)
        if self._keeping.folder is not None and self._accumulated is None:
            self._keeping.begin_step(call, batch)
        if isinstance(batch, RankBatch):
            self._data.feed(batch.origin)
        if self._tracing is not None:  # before the batch is looked at, which may fail on one rank alone
            self._tracing.begin()
        self._log.begin(self.state.optimizer)
        name, _, view = self._passes.view("train", batch, call)
        run = train_step if call == "step" else forward_backward
        loss, accumulated = run(self.runtime, self.state, view, name, self._accumulated)
        self._accumulated, self._metrics = None if call == "step" else accumulated, accumulated.metrics
        self._guards.trained()
        self._log.add(view)
        if call == "step":
            self._stepped(loss, accumulated)
        self._rest()
        return step_loss(loss)

    def _stepped(self, loss: torch.Tensor, done: Accumulated) -> None:
        if self._keeping.folder is not None:
            self._keeping.end_step()
        clipping = self.runtime.clipping
        self._log.end(self.state.step_number, loss, None if clipping is None else clipping.last, done.metrics)
        if self._tracing is not None:
            self._tracing.end(self.state.step_number, done.num_rows)
        if self._adapting is not None and self._adapting.hear(self.state.step_number, self.runtime.take_busy()):
            move = self._adapting.look(self.opening, self.runtime.roster.plan, self._data, self._checked)
            if move is not None:
                self._end_round()
                self._bring(move)

    def _waiting(self) -> Accumulated:
        if self._accumulated is None:
            raise ConfigError(
                "engine.update was called without gradients to apply",
                hint="call engine.forward_backward(batch) first; engine.step(batch) is forward, backward and update in one",
            )
        return self._accumulated

    @all_ranks
    def sync_weights(self) -> None:
        """Ends a round of local steps now (``communication.sync_steps``): weights and optimizer state become averages over all hosts.

        The next step begins another round. Nothing changes where one has just ended, or gradients are summed in each step.

        Raises:
            ConfigError: gradients wait for `update`.
            RuntimeFault: a peer died, or a wait timed out.
        """
        self.runtime.check_open()
        if self.runtime.local_steps is None:
            return
        self.runtime.call_together("sync_weights")
        self._check_applied("sync_weights")
        self._end_round()

    def _end_round(self) -> None:
        if self.state.num_local and self.runtime.local_steps is not None:
            with self.runtime.status.reporting():
                self.runtime.local_steps.end_round()
            self.runtime.publish()

    def _check_round(self, call: str) -> None:
        local = self.runtime.local_steps
        if local is not None and self.state.num_local:
            raise ConfigError(
                f"engine.{call}: hosts have other weights, after {self.state.num_local} of {local.num_steps} local steps",
                hint=f"call it after a multiple of {local.num_steps} steps (communication.sync_steps), or engine.sync_weights() first: it "
                "ends the round",
            )

    def _check_applied(self, call: str) -> None:
        if self._accumulated is not None:
            raise ConfigError(
                f"engine.{call} would lose the gradients of {counted(self._accumulated.num_batches, 'forward_backward call')}, which are "
                "not applied yet",
                hint="call engine.update() first",
            )

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """What the loss function returned with the loss, by name, of the last `step`, `forward_backward` or `evaluate`.

        Of the global batch, without a gradient: 0-dim float64 tensors on this rank's device, equal on all ranks. Empty where `loss`
        returned a loss alone and not ``{"loss": loss, "accuracy": accuracy}``.
        """
        return dict(self._metrics)

    @all_ranks
    def evaluate(self, batch: Any, *, averaged: bool = False, outputs: bool = False) -> Any:
        """The loss of a global batch in evaluation mode, equal on all ranks; nothing is trained.

        Args:
            batch: as of `step`.
            averaged: whether with the averages of weights (`average`).
            outputs: whether the model's output is returned too, of the same pass.

        Returns:
            The loss, as of `step`; with ``outputs=True`` the pair of it and the result of `predict`.
        """
        with self._weights("evaluate(averaged=True)" if averaged else "evaluate"):
            done = self._passes.forward("eval_predict" if outputs else "eval", batch)
            found = (step_loss(done.loss), done.output) if outputs else step_loss(done.loss)
            self._metrics = done.metrics
        self._rest()
        return found

    @all_ranks
    def predict(self, batch: Any, *, averaged: bool = False, gather: bool = True) -> Any:
        """The model's output for the whole global batch, in evaluation mode, on every rank.

        Args:
            batch: as of `step`.
            averaged: whether with the averages of weights (`average`).
            gather: whether every rank gets all rows. Otherwise each gets those that it computes, or none, and no two the same: for metrics
                that are summed over ranks.

        Returns:
            The output; with ``gather=False`` the pair of it and the numbers of its rows in the global batch, int64 of shape [rows].
        """
        with self._weights("predict(averaged=True)" if averaged else "predict"):
            done = self._passes.forward("predict", batch)
            found = done.output if gather else done.own_output
        self._rest()
        return found

    @all_ranks
    def average(self, decay: float) -> None:
        """Keeps an exponential moving average of all weights from the next step on: ``decay * average + (1 - decay) * weight``.

        Each rank averages what its optimizer steps, in its type and memory, so averages are shared out, cut and offloaded like optimizer
        state. The first average is the weight after one step, as with `torch.optim.swa_utils.AveragedModel`. Checkpoints have them,
        `replan` keeps them; a second call changes the decay alone.

        Args:
            decay: from 0 to 1.

        Raises:
            ConfigError: it is not.
            RuntimeFault: decays differ between ranks.
        """
        self.runtime.check_open()
        self.runtime.call_together("average", decay)
        if not 0 <= decay <= 1:
            raise ConfigError(f"engine.average: decay={decay} is not between 0 and 1")
        self.state.decay = decay

    @user_call
    def loader(self, dataset: Any, *, global_batch_size: int | None = None, progress: bool | None = None, **options: Any) -> Loader:
        """Batches of a dataset, of which every rank reads its own rows only.

        Args:
            dataset: of `torch.utils.data`.
            global_batch_size: rows over all ranks; required.
            progress: shows a bar per epoch on standard error, on rank 0, with figures of the last step; None: as ``runtime.progress`` says.
            **options: ``shuffle``, ``seed``, ``drop_last``, ``collate``, ``num_workers``, ``whole_batches`` as
                `whale.api.loader.make_loader` takes them.
        """
        roster = self.runtime.roster
        shows = self.opening.settings.runtime.progress if progress is None else progress
        words = self._log.with_bar() if shows else None
        if self._hears_sigterm:
            options["worker_init_fn"] = partial(leave_group, options.get("worker_init_fn"))
        loader = make_loader(dataset, global_batch_size=global_batch_size, plan=roster.plan, rank=roster.rank, progress=words, **options)
        self._data.add(loader)
        return loader

    def close(self) -> None:
        """Releases process groups; the engine cannot step afterwards. Other engines are not touched.

        After a call that failed because peers are lost it waits for nothing.

        Raises:
            RuntimeFault: the loss of one of the last steps, which a GPU reports late, is not finite.
            CheckpointError: a checkpoint under way could not be written.
        """
        waits = not self._has_lost_peers and sys.exception() is None  # else the others may be elsewhere
        try:
            if not self._has_lost_peers:
                self.runtime.losses.settle()
            if waits:
                self._finish_saving()
        finally:
            _OPEN.discard(self)
            try:
                self.runtime.close(waits=waits)
            finally:
                self.runtime.roster.world.notice.leave()
                self._log.close()
                if self._tracing is not None:
                    self._tracing.close()

    # ---- state -----------------------------------------------------------------------------------------------

    def gradients(self) -> Gradients:
        """The gradients that this rank's optimizer has, by parameter name: summed over ranks, and corrected.

        After `step` they are those that were applied, clipped; after `forward_backward` those that `update` applies, changes included.

        They are views of the buckets in which gradients are summed: the next step overwrites them. Clone what is to be kept. Write into
        the tensors (``gradients[name].mul_(mask)``); others cannot be put in their place.
        """
        return Gradients(self.state.gradients())

    @all_ranks
    def state_dict(self, rank: int | None = None, *, averaged: bool = False) -> dict[str, Any] | None:
        """All parameters and buffers under the keys of ``model.state_dict()``, tied names included; whole, in host memory.

        Args:
            rank: gather on this rank only (the others get None); None gathers on every rank.
            averaged: whether the averages of weights (`average`) are gathered instead.

        Raises:
            RuntimeFault: there is no such rank, or ranks name different ones.
        """
        size = self.runtime.roster.world.size
        if rank is not None and not 0 <= rank < size:
            raise RuntimeFault(f"engine.state_dict: there is no rank {rank}; ranks are 0 to {size - 1}")
        self.runtime.call_together("state_dict(averaged=True)" if averaged else "state_dict", rank)
        self._check_round("state_dict")
        if averaged:
            self._check_averages()
        self._guards.exchange()
        names = state_keys(self.modes.model, self.model_graph)
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        graph, roster, holdings = self.model_graph, self.runtime.roster, self.runtime.holdings
        tensors = {**self.state.lasting, **(self.state.averages if averaged else {})}
        found = gather_tensors(graph, holdings, tensors, roster.world_ranks, roster.world, only=rank)
        if found is None:
            return None
        return whole_state(self.modes.model, names, found)

    @all_ranks
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads the weights of a ``model.state_dict()``, whatever trained them; all ranks call it with the same one.

        Keys are those of the model, also of its ``torch.compile`` wrapper; of a tied weight one name is enough. The optimizer keeps its
        state, as torch's do; `load` reads whole checkpoints.

        Raises:
            CheckpointError: keys are missing or unknown, shapes differ, two names of a tied weight have different values, or ranks were
                given different ones. Nothing has changed.
        """
        self.runtime.call_together("load_state_dict")
        self._check_round("load_state_dict")
        self._guards.exchange()
        graph, roster, names = self.model_graph, self.runtime.roster, state_keys(self.modes.model, self.model_graph)
        state = without_compiled(state, names)
        given = {key: value for key, value in state.items() if names.get(key, key) is not None}
        keys = {key: name for key, name in names.items() if name is not None}
        with self._keeping.changing(CheckpointError, copies_stay=False):
            fill_tensors(graph, self.runtime.holdings, roster.rank, self.state, given, keys, roster.world)
        self.runtime.publish()
        give_extra_state(self.modes.model, names, state)
        self.state.has_moved_statistics = False
        self.runtime.losses.forget()

    @all_ranks
    def save(
        self,
        path: str | Path,
        *,
        wait: bool = True,
        extra: object = None,
        keep: int | None = None,
        score: float | torch.Tensor | None = None,
    ) -> None:
        """Writes a checkpoint: parameters, buffers, optimizer, scheduler, step, random state and data position.

        It is written aside and renamed when complete, so a checkpoint at the path is never a partial one.

        Args:
            path: a folder of the checkpoint's own, that all ranks see.
            wait: until it is complete. Otherwise the state is copied to host memory and written while training goes on; the next `save`,
                `load` or `close` waits for it, and so does the end of the script.
            extra: plain data of yours (numbers, text, None, tensors, and lists, tuples, dicts and sets of them), equal on all ranks.
                `load` returns it.
            keep: how many checkpoints stay in the parent folder, the newest; the others are removed when this one is complete. None for
                all.
            score: of this one, less is better. The checkpoint with the least is kept besides the newest.

        Raises:
            CheckpointError: it cannot be written, or the one before it could not; the same on all ranks. What stood at the path
                before is intact.
        """
        self.runtime.call_together("save", int(wait))
        self._check_applied("save")
        self._check_round("save")
        with progress(f"saving {path}", on_first=self.runtime.roster.world.rank == 0):
            self._finish_saving()
            self.runtime.losses.settle()
            self.runtime.merge_statistics(self.state)
            self._saving = save_state(
                Path(path),
                replace(self.state, position=self._data.now),
                self.runtime.roster,
                self.runtime.holdings,
                self.model_graph,
                self.modes.model,
                copies=not wait,
                extra=extra,
                keep=keep,
                score=None if score is None else float(score),
            )
            if wait:
                self._finish_saving()
            self._saved = Path(path).resolve(), self.state.step_number, extra

    @all_ranks
    def load(self, path: str | Path) -> Any:
        """Reads a checkpoint that any plan of the same model wrote.

        One of weights alone, as `whale checkpoint import` makes it, changes the weights alone, as `load_state_dict` does.
        Its data position goes to the loader that feeds the steps; where there is none yet, to the first loader over the same samples.

        Args:
            path: that it was saved at.

        Returns:
            The ``extra`` of `save`; None without.

        Raises:
            CheckpointError: it is incomplete, damaged, of another model or optimizer, or of another loader. Nothing has changed.
        """
        self.runtime.call_together("load")
        return self._load(Path(path))

    def _load(self, path: Path, kept: SurvivingState | None = None) -> Any:
        """Reads a checkpoint, or what hosts have kept."""
        self._finish_saving()
        roster, holdings = self.runtime.roster, self.runtime.holdings
        graph, model = self.model_graph, self.modes.model
        with self._keeping.changing(CheckpointError, copies_stay=False):
            extra = load_state(path, self.state, roster, holdings, graph, model, self._data.check, kept=kept)
        self.runtime.publish()
        self.runtime.losses.forget()
        self.runtime.forget_lost()
        self._accumulated = None
        self.state.forget_gradients()
        self._data.resume()
        self._keeping.rest()
        return extra

    @all_ranks
    def resume(self, folder: str | Path) -> Any:
        """Goes on from the newest state, if there is one, so that one script both starts and goes on.

        That is the checkpoint of the highest step in a folder, and the one before where it is damaged; under ``whale run --elastic``
        the step before the fault, where the present hosts have all pieces of it in memory. What was lost is printed on standard error.

        Args:
            folder: in which checkpoints are saved; rank 0 reads it.

        Returns:
            As of `load`; None where there was nothing to load, and where the state was in memory.

        Raises:
            CheckpointError: as `load`.
        """
        self.runtime.call_together("resume")
        self._finish_saving()
        return resume(Path(folder), self._keeping, self._load)

    def lose_peers(self) -> None:
        """Notes that peers are lost, also for all other engines: keeps what this rank holds in memory of its host."""
        self._leave_all()
        for each in {self, *_OPEN}:
            each._has_lost_peers = True
            each._log.lose_peers()

    def _leave_all(self) -> None:
        self.leave_state()
        for other in _OPEN - {self}:
            with suppress(RuntimeFault), other.turn.taken("leave_state"):  # else another thread is in it, and ends too
                other.leave_state()

    def leave_state(self) -> None:
        """Keeps what this rank holds in memory of its host, where `resume` was called."""
        self._keeping.leave(self._accumulated)

    def _finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, if one is; all ranks do so together."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    @all_ranks
    def replan(self, plan: Plan | str | Path | None = None, *, config: Source = None, cluster: Cluster | None = None) -> Plan:
        """Goes on under another plan: weights, optimizer and scheduler are moved in memory, name by name.

        The training is the one that it would have been under that plan from the start: the same global batches, and loaders go on
        where they are. All ranks call it, between two steps. `optimizer` and `scheduler` are new afterwards, made by the functions
        given to `whale.parallelize`, and `gradients` are those of the next step. Recording starts again.

        Args:
            plan: as of `whale.parallelize`; None plans, by the settings.
            config: settings that change, as of `whale.parallelize`; they override all others from now on.
            cluster: the same devices with other figures, to plan for from now on: ``cluster.slowed({"host0/1": 3.0})``. That of rank 0
                counts.

        Returns:
            The plan at work.

        Raises:
            WhaleError: as `whale.parallelize`, where nothing has changed; or a `RuntimeFault` while tensors were moved, and then the
                engine is closed.
        """
        self.runtime.check_open()
        self.runtime.call_together("replan")
        self._check_applied("replan")
        self._check_round("replan")
        opening = replace(self.opening.with_settings(config), given=plan)
        self._keeping.check_settings(opening)
        found = on_first_rank(opening.world, lambda: None if cluster is None else opening.on(cluster).attachment.cluster)
        if found is not None:
            opening = opening.on(found)
        move = self._checked(opening, opening.decide())
        before, after = self.opening.settings.runtime, opening.settings.runtime
        if (before.log_file, before.progress) != (after.log_file, after.progress):
            self._log.change(after)
        return self._bring(move)

    def _checked(self, opening: Opening, decided: Decided) -> CheckedMove:
        return CheckedMove.checked(opening, decided, self.state, self._data)

    def _bring(self, move: CheckedMove) -> Plan:
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        begun, old = time.perf_counter(), self.runtime
        self._keeping.copy_changes("replan")
        self.state.forget_gradients()
        old.close()
        gc.collect()  # what was at work holds parameters in circles, which would be there twice
        if self._tracing is not None:
            self._tracing.give_way()
        with self._keeping.changing():
            state = move.moved(self.state, old.roster, old.holdings)
            self.opening = move.opening
            runtime, tracing = move.opening.open(move.roster, move.holdings, state)
            self._take_up(state, runtime, tracing, move.decided, move.decided.seconds + time.perf_counter() - begun)
        self._keeping.copy_for_script()  # the ranks that copy are others
        for loader, source in move.loaders:
            loader.read_from(source)
        return self.plan

    @all_ranks
    def rebalance(self, slowdowns: Mapping[str, float] | None = None) -> Plan:
        """Goes on under the plan that is best at the present speeds of devices, where that pays within ``runtime.rebalance_horizon``.

        Stages and schedule that the user has set stay. With ``runtime.rebalance: on`` it is called when needed.

        Args:
            slowdowns: by device, the factor on computing times by the figures of the cluster; those of rank 0 count, and other devices
                keep theirs. None for the measured ones (`health`).

        Returns:
            The plan at work: another, or the same.

        Raises:
            WhaleError: as `replan`; and a `ConfigError` where a device is unknown, or a slowdown not above 0.
        """
        self.runtime.check_open()
        self.runtime.call_together("rebalance")
        self._check_applied("rebalance")
        self._check_round("rebalance")
        given = self.health.slowdowns if slowdowns is None else slowdowns
        wanted = on_first_rank(self.opening.world, lambda: self.opening.checked_slowdowns(given))
        if self._adapting is not None:
            move = self._adapting.better(self.opening, self.runtime.roster.plan, wanted, self._checked, moves=True, stays=False)
            return self.plan if move is None else self._bring(move)
        return self.plan

    # ---- what is asked of it ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The decision, with what a step was predicted to take, and why it is so."""
        if self._plan is None:
            self._plan = self.opening.with_figures(self.runtime.roster.plan)
        return self._plan

    @property
    def health(self) -> Health:
        """The speeds of the plan's devices relative to those that it was made for, over the last steps of full batches.

        Every rank has it; no rank waits for it. It is empty for a single device.
        """
        from whale.ir.health import Health

        return Health() if self._adapting is None else self._adapting.health

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Per replica, the order of actions, with communication."""
        return self.runtime.schedules

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over the parameters that this rank owns; None where it owns none, or none was given."""
        return self.state.optimizer

    @property
    def scheduler(self) -> Any:
        """The user's learning-rate scheduler; None as the optimizer."""
        return self.state.scheduler

    @property
    def step_number(self) -> int:
        """Steps done."""
        return self.state.step_number

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of the last step, each element once, before clipping: 0-dim float64, equal on all ranks.

        It lies on this rank's device, which is not synchronised. Where hosts step on their own (``communication.sync_steps``), it is that
        of the gradients of this rank's hosts.

        Raises:
            ConfigError: no setting asks for it.
            RuntimeFault: no step has been done since `parallelize` or `replan`, or the engine is closed.
        """
        self.runtime.check_open()
        if self.runtime.clipping is None:
            raise ConfigError(
                "the gradient norm was not computed: gradient.clip_norm is not set",
                hint="set gradient.clip_norm; a very large value clips nothing",
            )
        if (norm := self.runtime.clipping.last) is None:
            raise RuntimeFault("there is no gradient norm: no step has run under this plan")
        return norm

    @property
    def loss_scale(self) -> float | None:
        """The factor on the loss of the next step of a training in float16; None for others. Waits for the device."""
        return None if self.state.scaling is None else self.state.scaling.scale.value

    @property
    def was_skipped(self) -> bool:
        """Whether the last step left out its update, since loss or gradients were not finite (``fp16``, ``gradient.skip_nonfinite``).

        Waits for the device.
        """
        return self.state.was_skipped

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers that this rank owns, by name: parameters as its optimizer steps them."""
        return self.state.lasting

    @property
    def parameters(self) -> OwnedParameters:
        """The parameters that this rank's optimizer steps, or its parts of them, by name; called, an iterator over them.

        Warns:
            UserWarning: the script goes through them, some are parts, and a norm of each (for a max-norm, say) would be that of the part.
        """
        return OwnedParameters(self.state.kept, self._look_at_parameters)

    @property
    def model_graph(self) -> ModelGraph:
        """The captured model that the plan was made for."""
        return self.modes.train.graph

    @property
    def rank(self) -> int | None:
        """This rank's number in the plan; None if the plan leaves it idle."""
        return self.runtime.roster.rank

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches whose activations this rank's stages held at once in the last step: from F to B or W."""
        return self.runtime.peak_in_flight

    def __repr__(self) -> str:
        replicas, rank = self.plan.replicas, "idle" if self.rank is None else f"rank {self.rank}"
        return f"Engine({rank}, step {self.step_number}, {describe_shape(replicas)}; {describe_degrees(replicas)})"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Says what to call instead."""
        raise call_answer()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Says what to copy, pickle or `torch.save` instead."""
        raise copy_answer()

    def __getattr__(self, name: str) -> NoReturn:
        """Says how an engine does what modules and trainers do by this name."""
        raise answer(name, dir(type(self)))

    # ---- parts -----------------------------------------------------------------------------------------------

    @contextmanager
    def _weights(self, call: Call) -> Iterator[None]:
        """Around what reads weights: their averages, where the call asks for these."""
        self.runtime.check_open()
        self.runtime.call_together(call)
        self._end_if_preempted()
        if not call.endswith("(averaged=True)"):
            yield
            return
        self._check_averages()
        self.state.swap_averages()
        self.runtime.publish()
        try:
            yield
        finally:
            self.state.swap_averages()
            if not isinstance(sys.exception(), RuntimeFault):  # else nothing is sent any more
                self.runtime.publish()

    def _check_averages(self) -> None:
        if self.state.decay is None:
            raise ConfigError(
                "there are no averaged weights: engine.average was not called",
                hint="call engine.average(decay=0.999) before the steps to average over",
            )

    def _look_at_parameters(self) -> None:
        """Notes what applied gradients are when the script goes through parameters, and may clip them too late."""
        self._warn_of_parts()
        if self._accumulated is None:
            applied = (own.grad for own in self.state.kept.values())
            self._applied = [(gradient, gradient._version) for gradient in applied if gradient is not None]

    def _warn_of_late_writes(self) -> None:
        applied, self._applied = self._applied, []
        if not self._has_warned_of_late_writes and any(gradient._version != version for gradient, version in applied):
            self._has_warned_of_late_writes = True
            warn(
                "gradients were written after engine.step had applied them, which has no effect (torch.nn.utils.clip_grad_norm_ of "
                "engine.parameters(), say): set gradient.clip_norm, or call engine.forward_backward(batch), "
                "engine.clip_grad_norm_(max_norm) and engine.update()"
            )

    def _warn_of_parts(self) -> None:
        """Warns, once, that this rank holds parts; the first rank that holds parts of them speaks for the others."""
        holders = self.runtime.holdings.holders_of_parts
        parts = [name for name in self.state.kept if self.rank in holders(name)]
        if parts and not self._has_warned_of_parts and self.rank == min(holders(parts[0])):
            self._has_warned_of_parts = True
            warn(
                f"engine.parameters has only this rank's part of {first_few(parts)}: norms and counts computed from it are of that part. "
                "Clip by gradient.clip_norm; engine.state_dict() returns whole weights, and engine.load_state_dict(...) writes them"
            )

    def _rest(self) -> None:
        """Notes that the script goes on, so that what stops it there is not blamed on a wait that is over."""
        self.runtime.status.step = self.state.step_number
        self.runtime.status.set(f"the script after step {self.state.step_number}")
        if self.runtime.compilation is not None and self.runtime.roster.world.rank == 0 and (news := self.runtime.compilation.news()):
            print(f"whale: {news}", file=sys.stderr, flush=True)


_OPEN: weakref.WeakSet[Engine] = weakref.WeakSet()
"""The engines of this process that are not closed."""


def _adapting_to(is_first: bool) -> Adapting:
    from whale.api.adapting import Adapting  # needed among other ranks only

    return Adapting(is_first)
