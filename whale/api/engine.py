"""The engine: the face of a parallelised model. It steps, evaluates, predicts, saves and loads."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from whale.api.batches import view_of
from whale.api.data.data_position import DataPosition
from whale.api.data.loader import Loader, make_loader
from whale.api.data.row_source import RowSource
from whale.api.habits.elsewhere import answer, call_answer, copy_answer
from whale.api.habits.left_as_given import LeftAsGiven
from whale.api.habits.since_capture import SinceCapture
from whale.api.habits.users_tensors import UsersTensors
from whale.api.in_company import Turn, in_company
from whale.api.inference import out_of_inference_mode
from whale.api.mode import CapturedMode, ModeName
from whale.api.modes import Modes
from whale.api.opening import Opening
from whale.api.preparing import forget, prepare_forward, prepare_training
from whale.api.state.initial_state import with_optimizer
from whale.api.state.owned import OwnedParameters
from whale.api.state.state_keys import give_extra_state, state_keys, whole_state
from whale.api.step_loss import step_loss
from whale.api.tracebacks import in_short
from whale.api.tracing import Tracing
from whale.comm import together
from whale.config import Source
from whale.errors import RuntimeFault, WhaleError, first_few, warn
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.runtime.checkpoint.moving import move_state
from whale.runtime.checkpoint.training_state import load_state, save_state
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.executor import StepState
from whale.runtime.runtime import Runtime
from whale.runtime.state.elementwise import check_elementwise
from whale.runtime.state.engine_state import EngineState
from whale.runtime.training import train_step
from whale.runtime.weights.filling import fill_tensors
from whale.runtime.weights.gathering import gather_outputs, gather_tensors
from whale.telling import told_if_long
from whale.units import counted


class Engine:
    """A model in training on the devices of a plan. Made by `whale.parallelize`.

    Args:
        modes: the captured model.
        state: what training changes.
        runtime: the plan at work.
        opening: how it was put to work, and another would be.
        tracing: records chosen steps; None where none are.

    Attributes:
        modes, state, runtime, opening: as given.
        turn: whose thread it works for.
    """

    def __init__(self, modes: Modes, state: EngineState, runtime: Runtime, opening: Opening, *, tracing: Tracing | None = None) -> None:
        self.modes, self.opening = modes, opening
        self.turn = Turn()
        self._data = DataPosition(state)
        self._take_up(state, runtime, tracing)
        world, trains = runtime.roster.world, opening.optimizer is not None
        self._users = UsersTensors(modes.model, tells=world.rank == 0)
        self._as_given = LeftAsGiven(modes.model, trains=trains, warns=world.rank == 0)
        self._warns_of_no_optimizer, self._has_told_of_parts = not trains and world.rank == 0, False

    def _take_up(self, state: EngineState, runtime: Runtime, tracing: Tracing | None) -> None:
        """Goes on with a state, and a plan at work on it."""
        self.state, self.runtime, self._tracing = state, runtime, tracing
        self._data.state = state
        self._first_step = state.step_number
        train = self.modes.train
        self._since = SinceCapture(self.modes.model, train.graph, train.program.tensors, state.tensors, runtime.roster.world.device)

    # ---- work ------------------------------------------------------------------------------------------------

    @in_short
    @out_of_inference_mode
    @in_company
    def step(self, batch: Any) -> torch.Tensor:
        """Trains on one global batch.

        Args:
            batch: the global batch, equal on every rank, or a batch of `loader`.

        Returns:
            The loss of the global batch: a 0-dim tensor on this rank's device, equal on all ranks. The device is not
            synchronised.

        Raises:
            BatchError: the batch is not of the example's form, too small, or unequal on two ranks. Nothing has changed.
            CaptureError: layers were replaced since the capture, parameters frozen or unfrozen, or `torch.autocast` is in force.
            RuntimeFault: a peer died, or a wait outlasted ``communication.timeout_seconds``; or ranks hold unlike weights of one
                parameter, or have changed the optimizer's settings in unlike ways; or the loss is no finite number, and has not gone
                into the weights (on a GPU it may have: it is looked at two steps later).
        """
        self.runtime.check_open()
        if self._warns_of_no_optimizer:
            self._warns_of_no_optimizer = False
            warn("step computes gradients and applies none: parallelize was given no optimizer=")
        if self.state.step_number == self._first_step:
            with told_if_long("taking the first step", on_first=self.runtime.roster.world.rank == 0):
                return self._train(batch)
        return self._train(batch)

    def _train(self, batch: Any) -> torch.Tensor:
        self._data.feed(batch)
        if self._tracing is not None:  # before the batch is looked at, which may fail on one rank alone
            self._tracing.begin()
        name, _, view = self._view("train", batch)
        loss = train_step(self.runtime, self.state, view, name)
        self._as_given.trained()
        if self._tracing is not None:
            self._tracing.end(self.state.step_number, view.num_rows)
        self._rest()
        return step_loss(loss)

    @in_short
    @out_of_inference_mode
    @in_company
    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch in evaluation mode, equal on all ranks; nothing is trained."""
        step, _, _ = self._forward("eval", batch)
        loss = step.account.loss(self.runtime.totals(step))
        self._rest()
        return step_loss(loss)

    @in_short
    @out_of_inference_mode
    @in_company
    def predict(self, batch: Any) -> Any:
        """The model's output for the whole global batch, in evaluation mode, on every rank."""
        step, captured, view = self._forward("predict", batch)
        roster, plan = self.runtime.roster, self.runtime.plan_of(captured.key)
        assert captured.program.outputs is not None and plan is not None
        outputs = gather_outputs(captured.graph, plan, roster.world_ranks, roster.world, step.outputs, view.num_rows)
        self._rest()
        return captured.program.outputs.rebuild(outputs)

    @in_short
    def loader(self, dataset: Any, *, global_batch_size: int, **options: Any) -> Loader:
        """Batches of a dataset, of which every rank reads its own rows only.

        Args:
            dataset: of `torch.utils.data`.
            global_batch_size: rows over all ranks.
            **options: ``shuffle``, ``seed``, ``drop_last``, ``collate``, ``num_workers``, ``progress``, ``whole_batches`` as
                `whale.api.data.loader.make_loader` takes them.
        """
        roster = self.runtime.roster
        loader = make_loader(dataset, global_batch_size=global_batch_size, plan=roster.plan, rank=roster.rank, **options)
        self._data.add(loader)
        return loader

    def close(self) -> None:
        """Gives back process groups; the engine cannot step afterwards. Other engines are not touched.

        Raises:
            RuntimeFault: the loss of one of the last steps, which a GPU had not told yet, is no finite number.
        """
        try:
            self.runtime.losses.settle()
        finally:
            self.runtime.close()
            if self._tracing is not None:
                self._tracing.close()

    # ---- state -----------------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last step that this rank owns, by parameter name; summed, corrected and clipped.

        They are views of the buckets that gradients are summed in: the next step writes over them. Clone what is to be kept.
        """
        return self.state.gradients()

    @in_short
    @in_company
    def state_dict(self, rank: int | None = None) -> dict[str, Any] | None:
        """All parameters and buffers under the keys of ``model.state_dict()``, tied names included; whole, in host memory.

        Args:
            rank: gather on this rank only (the others get None); None gathers on every rank.

        Raises:
            RuntimeFault: there is no such rank, or ranks name different ones.
        """
        size = self.runtime.roster.world.size
        if rank is not None and not 0 <= rank < size:
            raise RuntimeFault(f"state_dict(rank=) is one of the {counted(size, 'rank')}, from 0 (got {rank})")
        self.runtime.call_together("state_dict", rank)
        self._exchange()
        names = state_keys(self.modes.model, self.model_graph)
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        graph, roster, holdings = self.model_graph, self.runtime.roster, self.runtime.holdings
        found = gather_tensors(graph, holdings, roster.rank, self.state.tensors, roster.world_ranks, roster.world, only=rank)
        if found is None:
            return None
        return whole_state(self.modes.model, names, found)

    @in_short
    @out_of_inference_mode
    @in_company
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of a ``model.state_dict()``, whatever trained them; all ranks call it with the same one.

        The optimizer keeps its state, as torch's do. `load` reads whole checkpoints.

        Raises:
            CheckpointError: keys are missing or unknown, shapes differ, or ranks were given unlike ones. Nothing has changed.
        """
        self.runtime.call_together("load_state_dict")
        self._exchange()
        graph, roster, names = self.model_graph, self.runtime.roster, state_keys(self.modes.model, self.model_graph)
        given = {key: value for key, value in state.items() if names.get(key, key) is not None}
        keys = {key: name for key, name in names.items() if name is not None}
        fill_tensors(graph, self.runtime.holdings, roster.rank, self.state.tensors, given, keys, roster.world)
        give_extra_state(self.modes.model, names, state)
        self.state.has_moved_statistics = False
        self.runtime.losses.forget()

    @in_short
    @in_company
    def save(self, path: str | Path) -> None:
        """Writes a checkpoint: parameters, buffers, optimizer, scheduler, step, random state and data position.

        It is written aside and renamed when complete, so a checkpoint at the path is never a half one.
        """
        self.runtime.call_together("save")
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        state = replace(self.state, position=self._data.now)
        with told_if_long(f"saving {path}", on_first=self.runtime.roster.world.rank == 0):
            save_state(Path(path), state, self.runtime.roster, self.runtime.holdings, self.model_graph)

    @in_short
    @out_of_inference_mode
    @in_company
    def load(self, path: str | Path, *, trust: bool = False) -> None:
        """Reads a checkpoint that any plan of the same model wrote.

        Its data position is taken up by the loader that feeds the steps; where none has yet, by the first loader that was or will
        be made of the same samples.

        Args:
            path: that it was saved at.
            trust: whether a checkpoint of the older form, which is unpickled, may run the code that is in it. Others run none.

        Raises:
            CheckpointError: it is incomplete, damaged, of another model or optimizer, or of another loader. Nothing has changed.
        """
        self.runtime.call_together("load")
        load_state(Path(path), self.state, self.runtime.roster, self.runtime.holdings, self.model_graph, self._data.check, trust=trust)
        self.runtime.losses.forget()
        self._data.resume()

    @in_short
    @out_of_inference_mode
    @in_company
    def replan(self, plan: Plan | str | Path | None = None, *, config: Source = None) -> Plan:
        """Goes on under another plan: weights, optimizer and scheduler are brought to where it wants them, in memory, name by name.

        The training is the one that it would have been under that plan from the start: the same global batches, and loaders go on
        where they are. All ranks call it, between two steps. `optimizer` and `scheduler` are others afterwards, made by the functions
        that `whale.parallelize` was given, and `gradients` are those of the next step. What is recorded begins anew.

        Args:
            plan: as `whale.parallelize` takes it; None plans, by the settings.
            config: settings that change, as `whale.parallelize` takes them; they win over all others from now on.

        Returns:
            The plan at work.

        Raises:
            WhaleError: as `whale.parallelize`, where nothing has changed; or a `RuntimeFault` while tensors were moved, and then the
                engine is closed.
        """
        self.runtime.check_open()
        self.runtime.call_together("replan")
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        opening = self.opening.with_settings(config)
        world, graph, old, optimizer = opening.world, self.model_graph, self.runtime, self.state.optimizer
        roster, holdings = opening.prepare(opening.decide(plan))

        def check() -> list[tuple[Loader, RowSource]]:
            check_elementwise(optimizer, [name for name in roster.owned if name in graph.trained and holdings.is_sharded(name)])
            return self._data.divided(roster.plan, roster.rank)

        loaders = together(world, check)
        self.state.forget_gradients()
        old.close()
        gc.collect()  # what was at work holds parameters in circles, which would be there twice
        if self._tracing is not None:
            self._tracing.give_way()
        state, kept = move_state(self.state, old.roster, old.holdings, roster, holdings, graph)
        with_optimizer(state, graph, holdings, opening.optimizer, opening.scheduler, world)
        together(world, lambda: kept.give(state))
        self.opening = opening
        self._take_up(state, *opening.open(roster, holdings, state))
        for loader, source in loaders:
            loader.read_from(source)
        return roster.plan

    # ---- what is asked of it ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The decision."""
        return self.runtime.roster.plan

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
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers that this rank owns, by name."""
        return self.state.tensors

    @property
    def parameters(self) -> OwnedParameters:
        """The parameters that this rank owns, or its parts of them, by name; called, as a module's are, an iterator over them.

        Warns:
            UserWarning: they are gone through, some are parts, and a norm of each (for a max-norm, say) would be that of the part.
        """
        return OwnedParameters(self.state.parameters, self._tell_of_parts)

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

    def _forward(self, name: Literal["eval", "predict"], batch: Any) -> tuple[StepState, CapturedMode, BatchView]:
        self.runtime.check_open()
        self.runtime.call_together("evaluate" if name == "eval" else "predict")
        self.runtime.losses.settle()
        self.runtime.merge_statistics(self.state)
        base = self.modes.ensure(name, batch)
        if self.runtime.plan_of(name) is None:
            prepare_forward(self.runtime, self.modes, base, base.graph.num_rows)
        self.runtime.lend(name)
        key, captured, view = self._view(name, batch)
        return self.runtime.forward(key, view, self.state.step_number), captured, view

    def _view(self, name: ModeName, batch: Any) -> tuple[str, CapturedMode, BatchView]:
        """What is ready for a batch, its capture, and the batch in parts; where that fails on this rank alone, the others do not wait."""
        with self.runtime.status.reporting():
            try:
                with torch._C.DisableTorchFunctionSubclass():  # of the user's parameters, which hear of who reads them
                    self._since.check()
                    self._users.look()
                captured = self.modes.fitting(name, batch, partial(forget, self.runtime))
                view = view_of(captured.program.batch, batch)
                key = captured.key
                if name == "train":
                    key = prepare_training(self.runtime, self.modes, captured, view.num_rows)
                else:
                    prepare_forward(self.runtime, self.modes, captured, view.num_rows)
            except WhaleError as refusal:
                self.runtime.refuse(name, refusal)
                raise
            return key, captured, view

    def _tell_of_parts(self) -> None:
        """Warns, once, that what this rank holds are parts; the first rank that holds parts of those speaks for the others."""
        holders = self.runtime.holdings.holders_of_parts
        parts = [name for name in self.state.parameters if self.rank in holders(name)]
        if parts and not self._has_told_of_parts and self.rank == min(holders(parts[0])):
            self._has_told_of_parts = True
            warn(
                f"engine.parameters are what this rank holds, which of {first_few(parts)} is a part: a norm or a count of it is that of "
                "the part. gradient.clip_norm clips by the norm of all gradients; engine.state_dict() has whole weights, and "
                "engine.load_state_dict(...) takes them"
            )

    def _exchange(self) -> None:
        """Notes that the script has weights from the engine, or has given it some."""
        self._users.exchange()
        self._as_given.forget()

    def _rest(self) -> None:
        """States that the script goes on, so that what stops it there is not laid to a wait that is over."""
        self.runtime.status.set(f"the script after step {self.state.step_number}")
