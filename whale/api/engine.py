"""The engine: the face of a parallelised model. It steps, evaluates, predicts, saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from whale.api.attach import Attachment
from whale.api.checkpointing import load_engine, save_engine
from whale.api.loader import Loader, make_loader
from whale.api.mode import CapturedMode, ModeName, example_like
from whale.comm import Groups, World, close_at_exit, together
from whale.config import Config
from whale.errors import BatchError, RuntimeFault
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.planning import retarget_plan
from whale.runtime.execute.batch_view import BatchView
from whale.runtime.execute.executor import StepState
from whale.runtime.execute.rank_batch import RankBatch
from whale.runtime.execute.seat import find_seat
from whale.runtime.execute.status import StatusBoard
from whale.runtime.execute.worker import Worker
from whale.runtime.program.lowering import mutated_buffers
from whale.runtime.program.reach import reached_parameters
from whale.runtime.state.buffers import merge_buffers
from whale.runtime.state.clipping import Clipping
from whale.runtime.state.elementwise import check_elementwise
from whale.runtime.state.gradient_sync import GradientSync, plan_buckets
from whale.runtime.state.holdings import Holdings, discover_if_sharded
from whale.runtime.state.scaling import scale
from whale.runtime.weights.gathering import gather_outputs, gather_tensors
from whale.schedules import forward_schedules_of

T = TypeVar("T")


class Engine:
    """A model in training on the devices of a plan. Made by `whale.parallelize`.

    Attributes:
        plan: the decision.
        schedules: per replica, the order of actions, with communication.
        optimizer: the user's optimizer over the parameters that this rank owns; None if it owns none, or none was given.
        scheduler: the user's learning-rate scheduler; None likewise.
        step_number: steps done.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        train: CapturedMode,
        plan: Plan,
        schedules: tuple[Schedule, ...],
        config: Config,
        world: World,
        attachment: Attachment,
        holdings: Holdings,
        tensors: dict[str, torch.Tensor],
        optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    ) -> None:
        self.plan, self.schedules, self.step_number = plan, schedules, 0
        self._model, self._loss, self._config, self._world = model, loss, config, world
        self._modes: dict[ModeName, CapturedMode] = {"train": train}
        self._workers: dict[ModeName, Worker] = {}
        self._world_ranks = tuple(attachment.rank_of[device] for device in plan.devices)
        own = [rank for rank, world_rank in enumerate(self._world_ranks) if world_rank == world.rank]
        self._seat = find_seat(plan, own[0] if own else None)
        self._tensors = tensors
        self._status = StatusBoard.open(world.rank)
        self.holdings = holdings
        buckets = plan_buckets(holdings, train.graph, reached_parameters(train.graph), config.communication.bucket_bytes)
        self._everyone = tuple(range(world.size))
        split_groups = (group for replica in plan.replicas for stage in replica.stages for group in stage.groups)
        device_groups = [tuple(plan.rank_of[device] for device in group) for group in split_groups]
        rank_sets = [self._in_world(ranks) for ranks in [*(bucket.owners for bucket in buckets), *device_groups]]
        self._groups = Groups(world, [self._everyone, *rank_sets])
        self._sync = self._make_sync(buckets)
        parameters = [(name, value) for name, value in tensors.items() if isinstance(value, nn.Parameter)]
        self._parameters = dict(parameters)
        self.optimizer = together(world, lambda: optimizer(parameters) if optimizer is not None and parameters else None)
        self.scheduler = together(
            world, lambda: scheduler(self.optimizer) if scheduler is not None and self.optimizer is not None else None
        )
        shard = [name for name in self._parameters if holdings.is_sharded(name)]
        together(world, lambda: check_elementwise(self.optimizer, shard))
        worker = self._workers["train"] = self._make_worker("train", plan, schedules)
        limit = config.gradient.clip_norm
        self._clipping: Clipping | None = None
        if limit is not None:
            self._clipping = Clipping(
                holdings, self.rank, self._parameters, limit, self._groups, self._everyone, worker.finish, world.device
            )
        self._loader: Loader | None = None
        self._position: Any = None
        self._statistics_moved = False
        close_at_exit(self)

    # ---- training --------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """Trains on one global batch.

        Args:
            batch: the global batch, equal on every rank, or a batch of `loader`.

        Returns:
            The loss of the global batch: a 0-dim tensor on this rank's device, equal on all ranks. The device is not
            synchronised.

        Raises:
            BatchError: the batch is not of the example's form, too small, or unequal on two ranks. Nothing has changed.
            RuntimeFault: a peer died, or a wait outlasted ``communication.timeout_seconds``.
        """
        self._check_open()
        worker = self._workers["train"]
        self._forget_gradients()
        seed = (self._config.runtime.seed, self.step_number)
        state = self._guarded(lambda: self._run_or_abandon(worker, self._agreed_view("train", batch), seed))
        if self._sync is not None:
            self._guarded(self._sync.wait)
        if state.account.needs_correction:
            scale(state.account.correction(self._summed(worker, state)), self._parameters.values())
        if self._clipping is not None:
            self._guarded(self._clipping.clip)
        if self.optimizer is not None:
            self._status.set("STEP")
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        loss = state.account.loss(self._summed(worker, state))
        self.step_number += 1
        self._statistics_moved = True
        self._rest()
        return loss

    def _run_or_abandon(self, worker: Worker, view: BatchView, seed: tuple[int, ...]) -> StepState:
        try:
            return worker.run(view, seed, with_gradients=True)
        except BatchError:
            if self._sync is not None:
                self._sync.abandon()
            raise

    def _rest(self) -> None:
        """States that the script goes on, so that what stops it there is not laid to a wait that is over."""
        self._status.set(f"the script after step {self.step_number}")

    def _summed(self, worker: Worker, state: StepState) -> torch.Tensor:
        """The loss's sums and weights over all ranks."""
        assert state.reduction is not None
        vector, work = state.reduction
        self._guarded(lambda: worker.finish(work, "summing the loss"))
        state.reduction = vector, None
        return vector

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last step that this rank owns, by parameter name; summed, corrected and clipped."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._sync is not None:
            self._sync.begin()

    # ---- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch in evaluation mode, equal on all ranks; nothing is trained."""
        worker = self._forward_worker("eval", batch)
        seed = (self._config.runtime.seed, self.step_number)
        state = self._guarded(lambda: worker.run(self._view("eval", batch), seed, with_gradients=False))
        loss = state.account.loss(self._summed(worker, state))
        self._rest()
        return loss

    def predict(self, batch: Any) -> Any:
        """The model's output for the whole global batch, in evaluation mode, on every rank."""
        worker = self._forward_worker("predict", batch)
        view = self._view("predict", batch)
        state = self._guarded(lambda: worker.run(view, (self._config.runtime.seed, self.step_number), with_gradients=False))
        mode = self._modes["predict"]
        outputs = gather_outputs(mode.graph, worker.plan, self._world_ranks, self._world, state.outputs, view.num_rows)
        assert mode.program.outputs is not None
        self._rest()
        return mode.program.outputs.rebuild(outputs)

    def _forward_worker(self, name: ModeName, batch: Any) -> Worker:
        """The worker of a mode without backward, for the rows of this batch."""
        self._check_open()
        self._merge_buffers()
        if name not in self._modes:
            example = example_like(batch.data if isinstance(batch, RankBatch) else batch, self._modes["train"].example)
            self._modes[name] = together(self._world, lambda: CapturedMode(self._model, example, self._loss, name))
        num_rows = self._agreed_view(name, batch).num_rows
        fitting = self.plan.with_micro_batches_for(num_rows)
        worker = self._workers.get(name)
        if worker is None or worker.plan.pipelines != fitting.pipelines:
            if worker is not None:
                worker.close()
            plan = retarget_plan(fitting, self._modes["train"].graph, self._modes[name].graph)
            worker = self._make_worker(name, plan, forward_schedules_of(plan))
            self._workers[name] = worker
        return worker

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers that this rank owns, by name."""
        return self._tensors

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this rank owns, by name."""
        return self._parameters

    @property
    def world(self) -> World:
        """This process among its peers."""
        return self._world

    @property
    def model_graph(self) -> ModelGraph:
        """The captured model that the plan was made for."""
        return self._modes["train"].graph

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches, over this rank's stages, whose activations the last step held at once: from F to B or W."""
        executor = self._workers["train"].executor if self._workers else None
        return 0 if executor is None else executor.peak_in_flight

    @property
    def writers(self) -> dict[str, int]:
        """Per parameter and buffer, the world rank that answers for it: its lowest owner."""
        return {name: self._in_world(owners)[0] for name, owners in self.plan.owners.items()}

    @property
    def rank(self) -> int | None:
        """This rank's number in the plan; None if the plan leaves it idle."""
        return None if self._seat is None else self._seat.rank

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """Per rank of the plan, the rank in the world."""
        return self._world_ranks

    @property
    def current_loader(self) -> Loader | None:
        """The loader made last."""
        return self._loader

    def take_position(self, position: Any) -> None:
        """Sets where the current loader, or the next one made, goes on; None changes nothing."""
        if position is None:
            return
        if self._loader is None:
            self._position = position
        else:
            self._loader.position = position

    def loader(self, dataset: Any, *, global_batch_size: int, **options: Any) -> Loader:
        """Batches of a dataset, of which every rank reads its own rows only.

        Args:
            dataset: of `torch.utils.data`.
            global_batch_size: rows over all ranks.
            **options: ``shuffle``, ``seed``, ``drop_last``, ``collate``, ``num_workers`` as `whale.api.loader.make_loader` takes them.
        """
        rank = self.rank
        self._loader = make_loader(dataset, global_batch_size=global_batch_size, plan=self.plan, rank=rank, **options)
        if self._position is not None:
            self._loader.position = self._position
            self._position = None
        return self._loader

    def state_dict(self, rank: int | None = None) -> dict[str, torch.Tensor] | None:
        """All parameters and buffers under the keys of ``model.state_dict()``, tied names included.

        Args:
            rank: gather on this rank's CPU only (the others get None); None gathers on every rank.
        """
        self._merge_buffers()
        graph = self.model_graph
        found = gather_tensors(graph, self.holdings, self.rank, self._tensors, self._world_ranks, self._world, only=rank)
        if found is None:
            return None
        return {key: found[graph.parameter_by_name[key].name] for key in self._model.state_dict()}

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint: parameters, buffers, optimizer, scheduler, step, random state and data position.

        It is written aside and renamed when complete, so a checkpoint at the path is never a half one.
        """
        self._merge_buffers()
        save_engine(self, Path(path))

    def load(self, path: str | Path) -> None:
        """Reads a checkpoint that any plan of the same model wrote.

        Raises:
            CheckpointError: it is incomplete, or of another model.
        """
        load_engine(self, Path(path))

    def close(self) -> None:
        """Gives back process groups; the engine cannot step afterwards. Other engines are not touched."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._groups.close()
        self._status.finish()

    def _check_open(self) -> None:
        if not self._workers:
            raise RuntimeFault("an engine steps, evaluates and predicts until it is closed (close() was called)")

    # ---- parts -----------------------------------------------------------------------------------------------

    def _in_world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self._world_ranks[rank] for rank in ranks))

    def _make_sync(self, buckets: Sequence[Any]) -> GradientSync | None:
        if self._seat is None:
            return None
        stages = {(self._seat.replica, stage) for stage in self.plan.pipelines[self._seat.replica].stages_of(self._seat.pipeline_rank)}
        parameters: Mapping[str, nn.Parameter] = {n: p for n, p in self._tensors.items() if isinstance(p, nn.Parameter)}
        return GradientSync(
            buckets, self.holdings, self._seat.rank, stages, self._world_ranks, parameters, self._groups, self._world.timeout
        )

    def _make_worker(self, name: ModeName, plan: Plan, schedules: Sequence[Schedule]) -> Worker:
        mode = self._modes[name]
        constants = {op.name: mode.program.tensors[op.name].to(self._world.device) for op in mode.graph.ops if op.kind == "constant"}
        return Worker(
            plan=plan,
            schedule=None if self._seat is None else schedules[self._seat.replica],
            model=mode.graph,
            graphs=mode.graph_for,
            tensors={**self._tensors, **constants},
            seat=self._seat,
            world_ranks=self._world_ranks,
            world=self._world,
            groups=self._groups,
            axes=self.holdings.axes if name == "train" else discover_if_sharded(plan, mode.graph),
            sync=self._sync if name == "train" else None,
            status=self._status,
        )

    def _agreed_view(self, name: ModeName, batch: Any) -> BatchView:
        """The batch in parts; where it is bad on this rank alone, the others do not wait for it."""
        try:
            return self._view(name, batch)
        except BatchError:
            if name in self._workers:
                self._workers[name].refuse()
            raise

    def _view(self, name: ModeName, batch: Any) -> BatchView:
        structure = self._modes[name].program.batch
        with_rows = frozenset(part.name for part in structure.inputs if part.has_rows and part.name is not None)
        if isinstance(batch, RankBatch):
            leaves = {} if batch.data is None else structure.leaves(batch.data)
            return BatchView(leaves, with_rows, batch.num_rows, batch.rows)
        leaves = structure.leaves(batch)
        num_rows = leaves[next(iter(with_rows))].shape[0]
        return BatchView(leaves, with_rows, num_rows, ((0, num_rows),))

    def _merge_buffers(self) -> None:
        """Makes running statistics equal on their owners, if a step changed them since."""
        if not self._statistics_moved:
            return
        self._statistics_moved = False
        train = self._modes["train"]
        names = mutated_buffers(train.graph, train.program.graph.nodes)
        rank = self.rank
        merge_buffers(self.holdings, rank, train.graph, self._tensors, names, self._groups, self._everyone, self._world.device)

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:
            self._status.fail(f"{self._status.read().action}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            raise
