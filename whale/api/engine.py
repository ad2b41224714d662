"""The engine: the face of a parallelised model. It steps, evaluates, predicts, saves and loads."""

from __future__ import annotations

import gc
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar
from warnings import catch_warnings, simplefilter

import torch

from whale.api.calls import Turn, all_ranks, user_call
from whale.api.guards import Guards
from whale.api.hints import answer, call_answer, copy_answer
from whale.api.initial_state import with_optimizer
from whale.api.keeping import Fall, FaultKeeper, await_device, devices_of, tell_kept, tell_resumed
from whale.api.loader import DataPosition, Loader, leave_group, make_loader
from whale.api.mode import CapturedMode, ModeName, view_of
from whale.api.modes import Modes, forget, prepare_forward, prepare_training
from whale.api.opening import Decided, Opening
from whale.api.rank_batch import RankBatch
from whale.api.results import OwnedParameters, give_extra_state, state_keys, step_loss, whole_state
from whale.api.row_source import RowSource
from whale.api.step_log import StepLog
from whale.api.tracing import Tracing
from whale.capture.batch import BatchStructure
from whale.comm import on_first_rank, together
from whale.config import Source
from whale.errors import PREEMPTED_CODE, CheckpointError, ConfigError, Preempted, RuntimeFault, WhaleError, first_few, warn
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.progress import progress
from whale.runtime.checkpoint.contents import Piece
from whale.runtime.checkpoint.model_files import without_compiled
from whale.runtime.checkpoint.moving import move_state
from whale.runtime.checkpoint.saving import Saving
from whale.runtime.checkpoint.surviving import DEVICES, SurvivingState, find_kept, forget_kept, keep_part
from whale.runtime.checkpoint.training_state import held_state, load_state, newest_step, random_state, save_state
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.call_check import Call
from whale.runtime.execute.executor import StepState
from whale.runtime.execute.roster import Roster
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.joint import check_elementwise
from whale.runtime.state.optimizer_state import read_optimizer
from whale.runtime.training import Accumulated, forward_backward, train_step, update
from whale.runtime.weights.filling import fill_tensors
from whale.runtime.weights.gathering import gather_outputs, gather_tensors, own_outputs
from whale.units import counted

if TYPE_CHECKING:
    from whale.api.adapting import Adapting
    from whale.ir.health import Health
    from whale.runtime.checkpoint.copies import StateCopies, StepCopies

Found = TypeVar("Found")


class Engine:
    """A model in training on the devices of a plan. Made by `whale.parallelize`.

    Args:
        modes: the captured model.
        state: what training changes.
        runtime: the plan at work.
        opening: how it was put to work, and another would be.
        decided: the plan, as it was decided on.
        overhead: seconds that planning, and putting the plan to work, took.
        tracing: records chosen steps; None where none are.

    Attributes:
        modes, state, runtime, opening: as given.
        turn: whose thread it works for.
    """

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
        self._saving: Saving | None = None
        self._accumulated: Accumulated | None = None
        world, train, trains = runtime.roster.world, modes.train, opening.optimizer is not None
        tensors, is_first = train.program.tensors, world.rank == 0
        self._guards = Guards(modes.model, train.graph, tensors, world.device, trains=trains, warns=is_first)
        self._warns_of_no_optimizer, self._has_told_of_parts = not trains and is_first, False
        self._log = StepLog.of(opening.settings.runtime, world)
        self._warns_of_no_resume = opening.settings.memory.redundancy != "0" and is_first
        self._saved: tuple[Path, int, object] | None = None  # the last: where, of which step, with what
        self._keeping = FaultKeeper.of(opening.settings, world)
        weakref.finalize(self, world.notice.leave).atexit = False  # while the interpreter ends, SIGTERM stays unheard
        self._adapting = None if world.is_alone else _adapting_to(is_first)
        self._take_up(state, runtime, tracing, decided, overhead)

    def _take_up(self, state: EngineState, runtime: Runtime, tracing: Tracing | None, decided: Decided, overhead: float) -> None:
        """Goes on with a state, and a plan at work on it."""
        self.state, self.runtime, self._tracing = state, runtime, tracing
        self._plan: Plan | None = None
        self._data.state = state
        self._first_step = state.step_number
        self._guards.take_up(state.tensors)
        if self._keeping is not None and self._keeping.copies is not None:
            self._keeping.copies.take_up(runtime.roster, runtime.holdings, self.model_graph)
            self._keeping.check_room(self._keeping.copies.host_bytes, warns=runtime.roster.world.local_rank == 0)
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
            update: whether its gradients, and those that `forward_backward` has left, are applied; otherwise it is `forward_backward`.

        Returns:
            The loss of the global batch: a 0-dim tensor on this rank's device, equal on all ranks. The device is not
            synchronised.

        Raises:
            BatchError: the batch is not of the example's form, too small, or unequal on two ranks. Nothing has changed.
            CaptureError: layers were replaced since the capture, parameters frozen or unfrozen, or `torch.autocast` is in force.
            RuntimeFault: a peer died, or a wait outlasted ``communication.timeout_seconds``; or ranks hold unlike weights of one
                parameter, or have changed the optimizer's settings in unlike ways, or the script has written weights of which ops read
                copies; or the loss is no finite number, and has not gone
                into the weights (on a GPU it may have: it is looked at two steps later).
        """
        return self._begin(batch, "step" if update else "forward_backward")

    @all_ranks
    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Adds the gradients of one global batch to those that wait for `update`; nothing is applied.

        As after ``loss.backward()``, they are sums over the batches: ``update(scale=1 / num_batches)`` applies their mean. `gradients` and
        `clip_grad_norm_` are for what comes between.

        Args:
            batch: as `step` takes it.

        Returns:
            The loss of the global batch, as `step` returns it.

        Raises:
            WhaleError: as `step`; where the batch is refused, the gradients are those of the batches before it.
        """
        return self._begin(batch, "forward_backward")

    @all_ranks
    def update(self, *, scale: float = 1.0) -> None:
        """Applies the gradients that `forward_backward` has left: clips them by ``gradient.clip_norm``, steps optimizer and scheduler.

        Args:
            scale: factor on the gradients, before they are clipped.

        Raises:
            ConfigError: there are none, or the scale is no finite number.
            RuntimeFault: as `step`, or ranks give unlike scales.
        """
        self.runtime.check_open()
        self.runtime.call_together("update", scale)
        if not math.isfinite(scale):
            raise ConfigError(f"engine.update: scale={scale} is not finite")
        accumulated = self._waiting()
        loss = update(self.runtime, self.state, accumulated, scale)
        self._accumulated = None
        self._stepped(loss, accumulated.num_rows)
        self._rest()

    @all_ranks
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients that wait for `update` so that their 2-norm is at most a number; each element counts once over all ranks.

        Args:
            max_norm: the largest norm; ``math.inf`` clips nothing.

        Returns:
            The norm before: 0-dim float64, equal on all ranks.

        Raises:
            ConfigError: no gradients wait, or the norm is not above 0.
            RuntimeFault: a peer died, or ranks give unlike norms.
        """
        self.runtime.check_open()
        self.runtime.call_together("clip_grad_norm_", max_norm)
        if not max_norm > 0:
            raise ConfigError(f"engine.clip_grad_norm_: max_norm={max_norm} is not above 0")
        self._waiting()
        return self.runtime.clip(self.state, None if math.isinf(max_norm) else max_norm)

    def _begin(self, batch: Any, call: Literal["step", "forward_backward"]) -> torch.Tensor:
        self.runtime.check_open()
        self._end_if_told()
        if self._warns_of_no_optimizer:
            self._warns_of_no_optimizer = False
            warn("no weights are updated: parallelize was given no optimizer=, so step computes gradients only")
        if self._warns_of_no_resume:
            self._warns_of_no_resume = False
            if self._keeping is not None and self._keeping.purpose is None:
                warn("memory.redundancy has no effect: nobody goes on from copies, for engine.resume was not called before the first step")
        if self.state.step_number == self._first_step and self._accumulated is None:
            with progress("taking the first step", on_first=self.runtime.roster.world.rank == 0) as note:
                if self.runtime.compilation is not None:
                    self.runtime.compilation.note = note
                return self._train(batch, call)
        return self._train(batch, call)

    def _end_if_told(self) -> None:
        """Where SIGTERM has come to any rank, saves and ends the run, before what the script asks for; all ranks do so together.

        While gradients wait for an update it goes on: a checkpoint does not have them.

        Raises:
            Preempted: it has.
        """
        folder, number = self.opening.settings.runtime.save_on_sigterm, self.runtime.num_noticed
        if not number or not self._hears_sigterm or self._accumulated is not None:
            return
        world, step_number = self.runtime.roster.world, self.state.step_number
        if folder is None:
            self._finish_saving()
            self.runtime.losses.settle()
            self.runtime.merge_statistics(self.state)
            self._copy_between("save", self._data.now)
            self.leave_state()
            raise Preempted("")
        path = Path(folder) / f"step_{step_number}"
        where, when, extra = self._saved or (None, None, None)
        self.save(path, extra=extra if (where, when) == (path.resolve(), step_number) else None)
        if world.rank == 0:
            told = f"SIGTERM came to {number} of {counted(world.size, 'rank')}"
            print(f"whale: {told}: saved {path}; the run ends with exit code {PREEMPTED_CODE}", file=sys.stderr, flush=True)
        raise Preempted(str(path))

    def _train(self, batch: Any, call: Literal["step", "forward_backward"]) -> torch.Tensor:
        batch = self._data.recognized(batch)
        if self._keeping is not None and self._accumulated is None:
            self._keeping.begun = self.state.step_number, self._data.before(batch)
            if self.state.step_number % self.opening.settings.memory.redundancy_steps == 0:
                self._copy_between(call, self._data.before(batch))
        if isinstance(batch, RankBatch):
            self._data.feed(batch.origin)
        if self._tracing is not None:  # before the batch is looked at, which may fail on one rank alone
            self._tracing.begin()
        self._log.begin(self.state.optimizer)
        name, _, view = self._view("train", batch, call)
        if call == "step":
            loss = train_step(self.runtime, self.state, view, name, self._accumulated)
            self._accumulated = None
        else:
            loss, self._accumulated = forward_backward(self.runtime, self.state, view, name, self._accumulated)
        self._guards.trained()
        self._log.add(view)
        if call == "step":
            self._stepped(loss, view.num_rows)
        self._rest()
        return step_loss(loss)

    def _stepped(self, loss: torch.Tensor, num_rows: int) -> None:
        if self._keeping is not None:
            self._keeping.rest()
            copies, every = self._keeping.copies, self.opening.settings.memory.redundancy_steps
            if copies is not None and self._keeping.purpose is not None and copies.follows_steps and self.state.step_number % every == 0:
                self._copy_state(self._data.now)
                copies.is_with_script = True
        clipping = self.runtime.clipping
        self._log.end(self.state.step_number, loss, None if clipping is None else clipping.last)
        if self._tracing is not None:
            self._tracing.end(self.state.step_number, num_rows)
        if self._adapting is not None and self._adapting.hear(self.state.step_number, self.runtime.take_busy()):
            self._adapt(self._adapting)

    def _waiting(self) -> Accumulated:
        if self._accumulated is None:
            raise ConfigError(
                "engine.update was called without gradients to apply",
                hint="call engine.forward_backward(batch) first; engine.step(batch) is forward, backward and update in one",
            )
        return self._accumulated

    def _check_applied(self, call: str) -> None:
        if self._accumulated is not None:
            raise ConfigError(
                f"engine.{call} would lose the gradients of {counted(self._accumulated.num_batches, 'forward_backward call')}, which are "
                "not applied yet",
                hint="call engine.update() first",
            )

    @all_ranks
    def evaluate(self, batch: Any, *, averaged: bool = False, outputs: bool = False) -> Any:
        """The loss of a global batch in evaluation mode, equal on all ranks; nothing is trained.

        Args:
            batch: as `step` takes it.
            averaged: whether by the averages of weights (`average`).
            outputs: whether the model's output is returned too, of the same pass.

        Returns:
            The loss, as `step` returns it; with ``outputs=True`` the pair of it and what `predict` returns.
        """
        with self._weights("evaluate(averaged=True)" if averaged else "evaluate"):
            step, captured, view = self._forward("eval_predict" if outputs else "eval", batch)
            loss = step.account.loss(self.runtime.totals(step))
            found = self._outputs(step, captured, view, gather_outputs) if outputs else []
        self._rest()
        return (step_loss(loss), captured.program.output(found, loss)) if outputs else step_loss(loss)

    @all_ranks
    def predict(self, batch: Any, *, averaged: bool = False, gather: bool = True) -> Any:
        """The model's output for the whole global batch, in evaluation mode, on every rank.

        Args:
            batch: as `step` takes it.
            averaged: whether by the averages of weights (`average`).
            gather: whether every rank gets all rows. Otherwise each gets some or none, those that it computes, and no two the same: for
                metrics that are summed over ranks.

        Returns:
            The output; with ``gather=False`` the pair of it and the numbers of its rows in the global batch, int64 of shape [rows].
        """
        with self._weights("predict(averaged=True)" if averaged else "predict"):
            step, captured, view = self._forward("predict", batch)
            loss = step.account.loss(self.runtime.totals(step)) if captured.graph.loss else None
            if gather:
                found, rows = self._outputs(step, captured, view, gather_outputs), None
            else:
                found, rows = self._outputs(step, captured, view, own_outputs)
        self._rest()
        output = captured.program.output(found, loss)
        return output if gather else (output, rows)

    @all_ranks
    def average(self, decay: float) -> None:
        """Keeps an exponential moving average of all weights from the next step on: ``decay * average + (1 - decay) * weight``.

        Each rank averages what its optimizer steps, in its type and memory, so the averages are shared out, cut and offloaded as the
        optimizer's state is. The first average is the weight after one step, as with `torch.optim.swa_utils.AveragedModel`. Checkpoints
        have them, and `replan` brings them along; called again it changes the decay alone.

        Args:
            decay: from 0 to 1.

        Raises:
            ConfigError: it is not.
            RuntimeFault: ranks give unlike ones.
        """
        self.runtime.check_open()
        self.runtime.call_together("average", decay)
        if not 0 <= decay <= 1:
            raise ConfigError(f"engine.average: decay={decay} is not between 0 and 1")
        self.state.decay = decay

    @user_call
    def loader(self, dataset: Any, *, global_batch_size: int, progress: bool | None = None, **options: Any) -> Loader:
        """Batches of a dataset, of which every rank reads its own rows only.

        Args:
            dataset: of `torch.utils.data`.
            global_batch_size: rows over all ranks.
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
        """Gives back process groups; the engine cannot step afterwards. Other engines are not touched.

        Raises:
            RuntimeFault: the loss of one of the last steps, which a GPU reports late, is not finite.
            CheckpointError: a checkpoint that was being written could not be.
        """
        try:
            self.runtime.losses.settle()
            if sys.exception() is None:  # else the others may be elsewhere
                self._finish_saving()
                self.modes.prove("close")
        finally:
            try:
                self.runtime.close()
            finally:
                self.runtime.roster.world.notice.leave()
                self._log.close()
                if self._tracing is not None:
                    self._tracing.close()

    # ---- state -----------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that this rank's optimizer has, by parameter name: summed over ranks, and corrected.

        After `step` they are those that were applied, clipped; after `forward_backward` those that wait for `update`, which applies
        them as they are then.

        They are views of the buckets that gradients are summed in: the next step writes over them. Clone what is to be kept.
        """
        return self.state.gradients()

    @all_ranks
    def state_dict(self, rank: int | None = None, *, averaged: bool = False) -> dict[str, Any] | None:
        """All parameters and buffers under the keys of ``model.state_dict()``, tied names included; whole, in host memory.

        Args:
            rank: gather on this rank only (the others get None); None gathers on every rank.
            averaged: whether the averages of weights (`average`) are gathered in their place.

        Raises:
            RuntimeFault: there is no such rank, or ranks name different ones.
        """
        size = self.runtime.roster.world.size
        if rank is not None and not 0 <= rank < size:
            raise RuntimeFault(f"engine.state_dict: there is no rank {rank}; ranks are 0 to {size - 1}")
        self.runtime.call_together("state_dict(averaged=True)" if averaged else "state_dict", rank)
        if averaged:
            self._check_averages()
        self.modes.prove("state_dict")
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
        """Takes the weights of a ``model.state_dict()``, whatever trained them; all ranks call it with the same one.

        Keys are those of the model inside what ``torch.compile`` makes; those of the outside are known, too.
        The optimizer keeps its state, as torch's do. `load` reads whole checkpoints.

        Raises:
            CheckpointError: keys are missing or unknown, shapes differ, or ranks were given unlike ones. Nothing has changed.
        """
        self.runtime.call_together("load_state_dict")
        self._guards.exchange()
        graph, roster, names = self.model_graph, self.runtime.roster, state_keys(self.modes.model, self.model_graph)
        state = without_compiled(state, names)
        given = {key: value for key, value in state.items() if names.get(key, key) is not None}
        keys = {key: name for key, name in names.items() if name is not None}
        with self._changing(CheckpointError, copies_stay=False):
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

        It is written aside and renamed when complete, so a checkpoint at the path is never a half one.

        Args:
            path: a folder of the checkpoint's own, that all ranks see.
            wait: until it is complete. Otherwise what is kept is copied to host memory and written while training goes on; the next
                `save`, `load` or `close` waits for it, and so does the end of the script.
            extra: plain data of yours (numbers, text, None, tensors, and lists, tuples, dicts and sets of them), equal on all ranks.
                `load` returns it.
            keep: how many checkpoints stay in the folder that the path is in, the newest; the others are removed when this one is
                complete. None for all.
            score: of this one, less is better. The checkpoint with the least is kept besides the newest.

        Raises:
            CheckpointError: it cannot be written, or the one before it could not; the same on all ranks. What stood at the path
                before is intact.
        """
        self.runtime.call_together("save", int(wait))
        self._check_applied("save")
        self.modes.prove("save")
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
        Its data position is taken up by the loader that feeds the steps; where none has yet, by the first loader that was or will
        be made of the same samples.

        Args:
            path: that it was saved at.

        Returns:
            What `save` was given as `extra`; None without.

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
        with self._changing(CheckpointError, copies_stay=False):
            extra = load_state(path, self.state, roster, holdings, graph, model, self._data.check, kept=kept)
        self.runtime.publish()
        self.runtime.losses.forget()
        self.runtime.forget_lost()
        self._accumulated = None
        self.state.forget_gradients()
        self._data.resume()
        if self._keeping is not None:
            self._keeping.rest()
        return extra

    @all_ranks
    def resume(self, folder: str | Path) -> Any:
        """Goes on from the newest state there is, if there is one, so that one script both begins and goes on.

        That is the checkpoint of a folder that was complete last; under ``whale run --elastic`` the step before the fault, where the
        hosts that are there have all pieces of it in memory. What was lost is said on standard error.

        Args:
            folder: in which checkpoints are saved; rank 0 looks into it.

        Returns:
            What `load` returns; None where there was nothing to load, and where the state was in memory.

        Raises:
            CheckpointError: as `load`.
        """
        self.runtime.call_together("resume")
        world, keeping = self.runtime.roster.world, self._keeping
        self._finish_saving()
        kept, reason, fall = None, "", None
        if keeping is not None:
            names = [each.name for each in self.model_graph.parameters if each.name in self.runtime.roster.plan.owners]
            kept, reason = find_kept(keeping.folder, str(folder), names, world)
            fall = Fall.of(keeping.folder, world)
        path, saved_step = on_first_rank(world, lambda: newest_step(Path(folder)))
        devices = devices_of(self.opening.attachment.cluster)
        before = [] if kept is None else kept.value(f"extra.{DEVICES}")
        if kept is not None and saved_step is not None and saved_step >= kept.step:
            kept, reason = None, ""  # of the same step the checkpoint has the script's own data, too
        if keeping is not None:
            keeping.purpose = str(folder)  # no sooner: a rank that loses its peers before this has no step to go on from
        extra = None
        if kept is not None:
            try:
                self._load(Path(folder), kept)
            except CheckpointError as error:
                kept, reason = None, f"what was kept in memory cannot be read: {error.message}"
        if kept is None and path is not None:
            extra = self._load(path)
        source = "the start" if path is None else str(path)
        source = source if kept is None else f"memory of {counted(kept.num_parts, 'rank')}"
        if world.rank == 0 and (path is not None or kept is not None or fall is not None or reason):
            tell_resumed(self.step_number, source, fall, before, devices, reason)
        if keeping is not None:
            self._copy_between("resume", self._data.now)
            if keeping.copies is not None:
                keeping.copies.is_with_script = True
            world.barrier()  # all have read it
            forget_kept(keeping.folder, str(folder))
        return extra

    def leave_state(self) -> None:
        """Keeps the last whole step, as far as this rank holds it, and the copies that it has, in memory of its host.

        It says so, or why it cannot. A rank that was in the midst of an update, or of another change, keeps copies alone, and so does one
        whose GPU does not come to an end. What a loss that is no finite number may have gone into is not kept.
        """
        keeping, state = self._keeping, self.state
        if keeping is None or keeping.purpose is None or keeping.is_done:
            return
        ways: list[tuple[int, Callable[[], int]]] = []
        if keeping.copies is not None:
            copies = keeping.copies  # those of the end of a step are not of the state that the script has made of it
            usable = copies.steps[1:] if copies.has(state.step_number) and self._may_be_written(keeping, copies) else copies.steps
            ways += [(each.step, partial(self._keep_copies, keeping, each)) for each in usable]
        if state.is_whole and not keeping.is_changing:
            ways.insert(1, (state.step_number, partial(self._keep, keeping)))  # behind the copies of which most are whole
        keeping.is_done = bool(ways)
        for step, keep in ways:
            size: int | Exception
            try:
                size = keep()
            except Exception as error:  # a GPU's too: the fault that led here says more
                size = error
            tell_kept(self.runtime.roster.world.rank, step, size)

    def _check_losses(self, step_number: int) -> None:
        if self.runtime.losses.has_bad(step_number):
            raise CheckpointError("the loss of one of the last steps is not finite, and may have gone into the weights")

    def _copy_state(self, position: Mapping[str, int] | None) -> None:
        """Copies the state to second owners; all ranks are in the same call.

        Args:
            position: where the data goes on.
        """
        keeping, runtime, state = self._keeping, self.runtime, self.state
        assert keeping is not None and keeping.copies is not None
        with runtime.status.reporting():
            runtime.merge_statistics(state)
            runtime.status.set("copying the state")
            keeping.copies.make(state.step_number, *self._held(position, keeping.random, keeping.copies.duty.chosen))

    def _copy_between(self, call: Call, position: Mapping[str, int] | None) -> None:
        """Copies what no copies have, where they are asked for: the state of a start, or what the script has written behind the last step.

        Args:
            call: of the engine, that all ranks are in.
            position: where the data goes on.
        """
        keeping, number = self._keeping, self.state.step_number
        if keeping is None or (copies := keeping.copies) is None or keeping.purpose is None:
            return
        is_there = copies.has(number)
        with self.runtime.status.reporting():
            asks = is_there and self._is_written(keeping, copies)
        is_written = self.runtime.call_together(call, asks=asks)
        copies.is_with_script = False
        if is_written:
            copies.follows_steps = False
            copies.forget(number)
        if is_written or not is_there:
            self._copy_state(position)

    def _is_written(self, keeping: FaultKeeper, copies: StateCopies) -> bool:
        """Whether the script, where it has taken over, has changed what this rank has copies of."""
        return copies.is_with_script and not copies.are_of(*self._held(None, keeping.random, copies.duty.chosen))

    def _may_be_written(self, keeping: FaultKeeper, copies: StateCopies) -> bool:
        """As `_is_written`, where peers may be lost, and a GPU wait for them."""
        if copies.is_with_script:
            try:
                await_device(self.runtime.roster.world.device)
                return self._is_written(keeping, copies)
            except Exception:  # a GPU's too: then nobody can tell
                return True
        return False

    def _keep_copies(self, keeping: FaultKeeper, copies: StepCopies) -> int:
        """Writes the copies of a step into memory of the host; the number of bytes."""
        self._check_losses(copies.step)
        return self._write(keeping, f".{copies.number}_{copies.step}", copies.pieces, copies.plain)

    def _keep(self, keeping: FaultKeeper) -> int:
        """Writes the last whole step into memory of the host; the number of bytes."""
        state = self.state
        random, position = keeping.random, self._data.now
        if keeping.begun is not None:
            number, before = keeping.begun
            if number == state.step_number:
                position = before
                if self._accumulated is not None:
                    self._accumulated.buffers.put_back()
            else:  # its update was done
                random = random_state()
        await_device(self.runtime.roster.world.device)
        self._check_losses(state.step_number)
        return self._write(keeping, f"_{state.step_number}", *self._held(position, random), self.runtime.unmerged(state))

    def _held(
        self, position: Mapping[str, int] | None, random: Mapping[str, Any], chosen: Mapping[str, Collection[int]] | None = None
    ) -> tuple[list[Piece], dict[str, Any]]:
        """What this rank holds, as `held_state` gives it."""
        return held_state(
            replace(self.state, position=position),
            self.runtime.roster,
            self.runtime.holdings,
            self.model_graph,
            self.modes.model,
            random=random,
            devices=devices_of(self.opening.attachment.cluster),
            chosen=chosen,
        )

    def _write(self, keeping: FaultKeeper, name: str, pieces: Sequence[Piece], plain: Mapping[str, Any], lacks: Sequence[str] = ()) -> int:
        """Writes a part into memory of the host, named alike on all ranks; the number of bytes."""
        assert keeping.purpose is not None, "else nothing is kept"
        rank = self.runtime.roster.world.rank
        return keep_part(keeping.folder, f"{keeping.training}{name}", keeping.purpose, pieces, plain, rank=rank, lacks=lacks)

    @contextmanager
    def _changing(self, *harmless: type[WhaleError], copies_stay: bool = True) -> Iterator[None]:
        """Around what changes the state otherwise than by a step: where it ends in an error, nothing is kept of it.

        Args:
            harmless: errors after which nothing has changed.
            copies_stay: whether the training is still that of the copies.
        """
        if self._keeping is not None:
            self._keeping.is_changing = True
            if not copies_stay and self._keeping.copies is not None:
                self._keeping.copies.forget()
        try:
            yield
        except Exception as error:
            if self._keeping is not None:
                self._keeping.is_changing = not isinstance(error, harmless)
            raise
        if self._keeping is not None:
            self._keeping.is_changing = False

    def _finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, if one is; all ranks do so together."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    @all_ranks
    def replan(self, plan: Plan | str | Path | None = None, *, config: Source = None, cluster: Cluster | None = None) -> Plan:
        """Goes on under another plan: weights, optimizer and scheduler are brought to where it wants them, in memory, name by name.

        The training is the one that it would have been under that plan from the start: the same global batches, and loaders go on
        where they are. All ranks call it, between two steps. `optimizer` and `scheduler` are others afterwards, made by the functions
        that `whale.parallelize` was given, and `gradients` are those of the next step. What is recorded begins anew.

        Args:
            plan: as `whale.parallelize` takes it; None plans, by the settings.
            config: settings that change, as `whale.parallelize` takes them; they win over all others from now on.
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
        opening = replace(self.opening.with_settings(config), given=plan)
        before, after = self.opening.settings.memory.redundancy, opening.settings.memory.redundancy
        if before != after:
            raise ConfigError(
                f"engine.replan: memory.redundancy: {after} has no effect, as training began with {before}",
                hint="set it where whale.parallelize is called, or in the environment; memory.redundancy_steps may change",
            )
        found = on_first_rank(opening.world, lambda: None if cluster is None else opening.on(cluster).attachment.cluster)
        if found is not None:
            opening = opening.on(found)
        return self._go_on_under(opening, opening.decide())

    def _go_on_under(self, opening: Opening, decided: Decided) -> Plan:
        """Moves to a plan."""
        return self._bring(opening, *self._checked(opening, decided))

    def _checked(self, opening: Opening, decided: Decided) -> tuple[Decided, Roster, Holdings, list[tuple[Loader, RowSource]]]:
        """What is wanted for a move to a plan; where it cannot be made, nothing has changed."""
        begun = time.perf_counter()
        graph, optimizer = self.model_graph, self.state.optimizer
        roster, holdings = opening.prepare(decided.plan)

        def check() -> list[tuple[Loader, RowSource]]:
            kept = {name: holdings.shardings.kept(name) for name in roster.owned if name in graph.trained}
            read_optimizer(optimizer, self.state.kept)
            check_elementwise(optimizer, [name for name, own in kept.items() if own.is_sharded and roster.rank in own.held])
            return self._data.divided(roster.plan, roster.rank)

        loaders = together(opening.world, check)
        return replace(decided, seconds=decided.seconds + time.perf_counter() - begun), roster, holdings, loaders

    def _bring(
        self, opening: Opening, decided: Decided, roster: Roster, holdings: Holdings, loaders: list[tuple[Loader, RowSource]]
    ) -> Plan:
        """Brings all to where a plan wants it."""
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        begun, world, graph, old = time.perf_counter(), opening.world, self.model_graph, self.runtime
        self._copy_between("replan", self._data.now)
        self.state.forget_gradients()
        old.close()
        gc.collect()  # what was at work holds parameters in circles, which would be there twice
        if self._tracing is not None:
            self._tracing.give_way()
        with self._changing():
            state, kept = move_state(self.state, old.roster, old.holdings, roster, holdings, graph)
            with_optimizer(state, graph, holdings, opening.optimizer, opening.scheduler, world)
            together(world, lambda: kept.give(state))
            self.opening = opening
            runtime, tracing = opening.open(roster, holdings, state)
            self._take_up(state, runtime, tracing, decided, decided.seconds + time.perf_counter() - begun)
        if self._keeping is not None and self._keeping.copies is not None and self._keeping.purpose is not None:
            self._copy_state(self._data.now)  # the duties are others
            self._keeping.copies.is_with_script = True
        for loader, source in loaders:
            loader.read_from(source)
        return self.plan

    @all_ranks
    def rebalance(self, slowdowns: Mapping[str, float] | None = None) -> Plan:
        """Goes on under the plan that is best at the speeds that devices have now, where that pays within ``runtime.rebalance_horizon``.

        What the user has set, stages and schedule say, stays as it is set. With ``runtime.rebalance: on`` it is called as need arises.

        Args:
            slowdowns: by device, so many times as long as the figures of the cluster say does it take for what it computes; those of rank
                0 count, and others are as they were. None for what was measured (`health`).

        Returns:
            The plan at work: another, or the same.

        Raises:
            WhaleError: as `replan`; and a `ConfigError` where a slowdown is of no device, or not above 0.
        """
        self.runtime.check_open()
        self.runtime.call_together("rebalance")
        self._check_applied("rebalance")
        given = self.health.slowdowns if slowdowns is None else slowdowns
        wanted = on_first_rank(self.opening.world, lambda: self.opening.checked_slowdowns(given))
        if self._adapting is not None:
            self._move(self._adapting, wanted, moves=True, stays=False)
        return self.plan

    def _adapt(self, adapting: Adapting) -> None:
        """Looks at devices that are persistently faster or slower than the plan was made for; all ranks come here after the same step."""
        mode = self.opening.settings.runtime.rebalance
        slowdowns = adapting.health.slowdowns
        adapting.say_slow(self.opening, self.runtime.roster.plan, slowdowns)
        if mode == "on":
            needed = [each for each in self.opening.world.gather_objects(self._data.needed) if each]
            if needed:
                adapting.postpone(str(needed[0]))
                return
        adapting.looked_at()
        if mode != "off":
            self._move(adapting, slowdowns, moves=mode == "on", stays=True)

    def _move(self, adapting: Adapting, slowdowns: Mapping[str, float], *, moves: bool, stays: bool) -> None:
        """Looks for a better plan at these speeds, and goes on under it where that pays; otherwise it says what there is.

        Args:
            adapting: knows what to ask of it.
            slowdowns: by device.
            moves: whether training goes on under it.
            stays: whether it goes on as it is where such a move cannot be made; otherwise that is an error.
        """
        opening, plan = self.opening, self.runtime.roster.plan
        found = on_first_rank(opening.world, lambda: adapting.search(opening, plan, slowdowns, moves=moves))
        if found is not None and moves:
            cluster, decided, gain = found
            opening = opening.on(cluster)
            try:
                checked = self._checked(opening, decided)
            except WhaleError as fault:
                if not stays or isinstance(fault, RuntimeFault):
                    raise
                adapting.stays(fault)
                return
            adapting.moves(gain)
            self._bring(opening, *checked)

    # ---- what is asked of it ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The decision, with what a step was predicted to take, and why it is so."""
        if self._plan is None:
            self._plan = self.opening.with_figures(self.runtime.roster.plan)
        return self._plan

    @property
    def health(self) -> Health:
        """How fast the devices of the plan are beside what it was made for, over the last steps of full batches.

        Every rank knows it; no rank waits for it. There is nothing in it for a device alone.
        """
        from whale.ir.health import Health

        return Health() if self._adapting is None else self._adapting.health

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Per replica, the order of actions, with communication."""
        return self.runtime.schedules

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over the parameters that this rank owns; None if it owns none, or none was given."""
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
        """The 2-norm of all gradients of the last step, each element once, before they were clipped: 0-dim float64, equal on all ranks.

        It lies on this rank's device, which is not synchronised.

        Raises:
            ConfigError: no setting has it worked out.
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
        """The factor on the loss of the next step of a training in float16; None for others."""
        return None if self.state.loss_scale is None else self.state.loss_scale.value

    @property
    def was_skipped(self) -> bool:
        """Whether the last step left out its update, as its loss or gradients were not finite (``fp16``, ``gradient.skip_nonfinite``)."""
        return self.state.was_skipped

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers that this rank owns, by name: parameters as its optimizer steps them."""
        return self.state.lasting

    @property
    def parameters(self) -> OwnedParameters:
        """The parameters that this rank's optimizer steps, or its parts of them, by name; called, as a module's are, an iterator over them.

        Warns:
            UserWarning: they are gone through, some are parts, and a norm of each (for a max-norm, say) would be that of the part.
        """
        return OwnedParameters(self.state.kept, self._tell_of_parts)

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
        """The most micro-batches, over this rank's stages, whose activations the last step held at once: from F to B or W."""
        return self.runtime.peak_in_flight

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

    def _outputs(self, step: StepState, captured: CapturedMode, view: BatchView, brought: Callable[..., Found]) -> Found:
        """The outputs of a pass, as a function of the plan and this rank's pieces brings them together."""
        roster, plan = self.runtime.roster, self.runtime.plan_of(captured.key)
        assert plan is not None, "it has run"
        return brought(captured.graph, captured.batch_axes, plan, roster.world_ranks, roster.world, step.outputs, view.num_rows)

    def _forward(self, name: Literal["eval", "predict", "eval_predict"], batch: Any) -> tuple[StepState, CapturedMode, BatchView]:
        self.modes.prove(name)
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        batch = self._data.recognized(batch)
        like = self._like_elsewhere(name, batch)
        base = self.modes.ensure(name, batch, like)
        if self.runtime.plan_of(name) is None:
            prepare_forward(self.runtime, self.modes, base, base.graph.num_rows)
        self.runtime.lend(name)
        key, captured, view = self._view(name, batch, like=like)
        return self.runtime.forward(key, view, self.state.step_number), captured, view

    def _like_elsewhere(self, name: ModeName, batch: Any) -> BatchStructure | None:
        """The structure of a batch on a rank that has rows of it, where ranks outside the plan have none of a loader's; all ranks ask."""
        roster = self.runtime.roster
        if len(roster.plan.devices) == roster.world.size:
            return None
        own: BatchStructure | None = None
        if not (isinstance(batch, RankBatch) and batch.data is None):
            with suppress(WhaleError):  # is raised where the batch is read
                own = self.modes.structure(name, batch)
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # of torch, of its own trees
            found = roster.world.gather_objects(own)
        return next((each for each in found if isinstance(each, BatchStructure)), None)

    def _view(
        self, name: ModeName, batch: Any, call: Call | None = None, like: BatchStructure | None = None
    ) -> tuple[str, CapturedMode, BatchView]:
        """What is ready for a batch, its capture, and the batch in parts; where that fails on this rank alone, the others do not wait."""
        with self.runtime.status.reporting():
            try:
                self._guards.check()
                self.runtime.check_unwritten()
                if isinstance(batch, RankBatch):
                    batch.check(self.runtime.roster.plan, self.rank)
                captured = self.modes.fitting(name, batch, partial(forget, self.runtime), like)
                view = view_of(captured.program.batch, batch)
                key = captured.key
                if name == "train":
                    key = prepare_training(self.runtime, self.modes, captured, view.num_rows)
                else:
                    prepare_forward(self.runtime, self.modes, captured, view.num_rows)
            except WhaleError as refusal:
                self.runtime.refuse(name, refusal, call)
                raise
            return key, captured, view

    @contextmanager
    def _weights(self, call: Call) -> Iterator[None]:
        """Around what reads weights: their averages, where the call asks for these."""
        self.runtime.check_open()
        self.runtime.call_together(call)
        self._end_if_told()
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

    def _tell_of_parts(self) -> None:
        """Warns, once, that what this rank holds are parts; the first rank that holds parts of those speaks for the others."""
        holders = self.runtime.holdings.holders_of_parts
        parts = [name for name in self.state.kept if self.rank in holders(name)]
        if parts and not self._has_told_of_parts and self.rank == min(holders(parts[0])):
            self._has_told_of_parts = True
            warn(
                f"engine.parameters has only this rank's part of {first_few(parts)}: norms and counts computed from it are of that part. "
                "Clip by gradient.clip_norm; engine.state_dict() returns whole weights, and engine.load_state_dict(...) writes them"
            )

    def _rest(self) -> None:
        """States that the script goes on, so that what stops it there is not laid to a wait that is over."""
        self.runtime.status.step = self.state.step_number
        self.runtime.status.set(f"the script after step {self.state.step_number}")
        if self.runtime.compilation is not None and self.runtime.roster.world.rank == 0 and (news := self.runtime.compilation.news()):
            print(f"whale: {news}", file=sys.stderr, flush=True)


def _adapting_to(is_first: bool) -> Adapting:
    from whale.api.adapting import Adapting  # needed beside other ranks alone

    return Adapting(is_first)
