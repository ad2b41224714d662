"""Transformers' `Trainer` on the devices of a plan: it runs as in one process, and a Whale engine computes each of its steps.

Trainer                              here
one process, global batches          every rank, the same global batches; the engine takes its own rows of each
loss.backward() of compute_loss      engine.forward_backward; compute_loss is captured with the model
clip, optimizer.step()               engine.clip_grad_norm_, engine.update
evaluation and prediction            engine.evaluate(..., outputs=True), in one pass
checkpoint-N/                        model.safetensors and the trainer's state as ever; next to them ``whale/``, which any plan reads
"""

from __future__ import annotations

import copy
import os
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from whale.api import Engine, parallelize
from whale.config import Source, load_config
from whale.errors import CaptureError, CheckpointError, ConfigError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan

_ITEMS = "num_items_in_batch"
_FOLDER = "whale"
_SCHEDULER = "scheduler.pt"
_NO_DDP = "leave it out: there is no DistributedDataParallel"


class WhaleTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose steps run on the devices of a plan.

    Each rank runs the same script. A global batch has ``per_device_train_batch_size`` rows for each rank; the plan says which of them a
    rank computes. Logs, metrics and checkpoints are those of the `Trainer` in one process on the global batches.

    Args:
        model, args, data_collator, ...: as `transformers.Trainer` takes them.
        config: settings, as `whale.parallelize` takes them.
        cluster, plan: as for `whale.parallelize`.

    Attributes:
        engine: of the training; None until the first batch is known.

    Raises:
        ConfigError: something is asked for that cannot be had this way; see `_check`.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        config: Source = None,
        cluster: Cluster | str | Path | None = None,
        plan: Plan | str | Path | None = None,
        **options: Any,
    ) -> None:
        args = _on_this_machine(args if args is not None else TrainingArguments("tmp_trainer"))
        _check(args)
        args.per_device_train_batch_size *= args.world_size
        args.per_device_eval_batch_size *= args.world_size
        dtype = next((each for each in ("bf16", "fp16", "tf32") if getattr(args, each)), None)
        asked = {"runtime.seed": args.seed} | ({} if dtype is None else {"precision.dtype": dtype})
        settings = load_config(config, environment={}, base=load_config(asked, environment={}))
        self._sources: dict[str, Any] = {"config": settings, "cluster": cluster, "plan": plan}
        self.engine: Engine | None = None
        self._brought: Any = None
        super().__init__(model, args, *others, **options)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ConfigError(
                "WhaleTrainer cannot use an optimizer that is already made (optimizers=): it makes one over each rank's parameters",
                hint="pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or set TrainingArguments.optim",
            )

    # ---- one process -----------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        self._accelerator_args = dict(super()._build_accelerator_args(**options))
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = OneProcess(**{**self._accelerator_args, "device_placement": False})
        self.gather_function = self.accelerator.gather_for_metrics

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It stays where it is: ranks get what they own."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    # ---- training --------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> tuple[nn.Module, Any]:
        if self.engine is None:
            self._open(_example(train_dataloader))
        self.lr_scheduler = None  # one of an earlier training was for its number of steps
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _open(self, inputs: Mapping[str, Any]) -> Engine:
        batch, was_training = self._batch(inputs), self.model.training
        self.model.train()  # from_pretrained leaves a model in evaluation mode, which would be captured
        self.engine = parallelize(self.model, loss=self._loss(), optimizer=self._make_optimizer, batch=batch, **self._sources)
        self.model.train(was_training)
        return self.engine

    @property
    def _at_work(self) -> Engine:
        assert self.engine is not None, "made with the first batch"
        return self.engine

    def _batch(self, inputs: Mapping[str, Any], num_items: Any = None) -> dict[str, Any]:
        """The engine's batch: the collator's, with the number that the loss is a mean over, where the loss asks for it."""
        if num_items is None:
            num_items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        return dict(inputs) if num_items is None else {**inputs, _ITEMS: torch.as_tensor(num_items).cpu()}

    def _loss(self) -> Callable[[Any, Any], Any] | None:
        """What computes the loss from the model's output; None where that has it."""
        is_own = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None and self.label_smoother is None
        if is_own:
            return None
        trainer = weakref.ref(self)  # what a trainer keeps changes with each step, and is no part of the loss

        def loss(output: Any, batch: Any) -> Any:
            own = trainer()
            assert own is not None, "it steps"
            inputs = {key: value for key, value in batch.items() if key != _ITEMS}
            given, state = dict(inputs), own.state
            own.state = UncapturedState()
            try:
                return own.compute_loss(Computed(own.model, output, inputs), given, num_items_in_batch=batch.get(_ITEMS))
            finally:
                own.state = state

        return loss

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if special := {"params", "model", "optimizer_dict"} & options.keys():
            raise ConfigError(
                f"WhaleTrainer does not support optim={self.args.optim}, which chooses parameters by {min(special)}",
                hint="set TrainingArguments.optim to one of torch.optim, such as adamw_torch",
            )
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = [
            {"params": [each for name, each in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0},
        ]
        made: torch.optim.Optimizer = kind(groups, **options)
        return made

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.optimizer is None:
            self.optimizer = EngineOptimizer(self._at_work, self.args.learning_rate, lambda: 1 / self._num_means)
            self.accelerator.stepped_by = self._at_work
        return self.optimizer

    @property
    def _num_means(self) -> int:
        """How many means over batches the loss of an update averages; 1 where batches are parts of one."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = (self.model_accepts_loss_kwargs and self._counts_items) or self.compute_loss_func is not None
        return 1 if is_scaled else self.current_gradient_accumulation_steps

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        self._counts_items = num_items_in_batch is not None
        loss = self._plain(self._at_work.forward_backward(self._batch(inputs, num_items_in_batch))) / self._num_means
        if not self.args.logging_nan_inf_filter or type(self).training_step is not WhaleTrainer.training_step:
            return loss  # a step of the script's may look at it
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)  # as the trainer has it in place of others
        return torch.where(loss.isfinite(), loss, mean).as_subclass(FiniteLoss)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples(epoch_iterator, num_batches, torch.device("cpu"))  # from where the engine takes batches

    def _plain(self, loss: Tensor) -> Tensor:
        """A loss of the engine's, as the trainer adds it up."""
        return loss.detach().to(self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._norm(float("inf")) if grad_norm is None else grad_norm

    def _norm(self, largest: float) -> Tensor:
        return self._at_work.clip_grad_norm_(largest, scale=1 / self._num_means)

    def _finalize_training(self, *arguments: Any) -> Any:
        self._bring_back()
        return super()._finalize_training(*arguments)

    def _bring_back(self) -> None:
        """Gives the trained weights to the model of the script."""
        self._at_work.sync_weights()
        state = self._at_work.state_dict()
        assert state is not None, "gathered on every rank"
        self.model.load_state_dict(state)
        self._brought = self._version()

    def _version(self) -> Any:
        """Another one after each change to the weights of the engine."""
        engine = self._at_work
        return engine, engine.step_number, {name: (id(each), each._version) for name, each in engine.state.lasting.items()}

    # ---- evaluation ------------------------------------------------------------------------------------------

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        found = super().evaluation_loop(*arguments, **options)
        for name in [name for name in found.metrics if name.endswith("_model_preparation_time")]:
            del found.metrics[name]  # nothing was prepared
        return found

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        engine = self.engine if self.engine is not None else self._open(inputs)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        has_loss = has_labels or (not self.label_names and (inputs.get("return_loss") or self.can_return_loss))
        batch = self._batch(inputs)
        if prediction_loss_only and has_loss:
            return self._plain(engine.evaluate(batch)), None, None
        loss, output = engine.evaluate(batch, outputs=True) if has_loss else (None, engine.predict(batch))
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", [])
        if isinstance(output, Mapping):
            logits = tuple(value for key, value in output.items() if key not in (*ignore_keys, *(("loss",) if has_loss else ())))
        else:
            logits = output[1:] if has_loss else output
        labels = tuple(inputs.get(name) for name in self.label_names) if has_labels else None
        return (
            None if loss is None else self._plain(loss),
            logits[0] if len(logits) == 1 else logits,
            labels[0] if labels is not None and len(labels) == 1 else labels,
        )

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        # once the model has the weights on every rank, one alone may save it
        if self._brought == self._version():
            state = self.model.state_dict()
        else:
            self.engine.sync_weights()
            state = self.engine.state_dict(0)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._at_work.sync_weights()
        self._at_work.save(Path(output_dir) / _FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.engine is not None:
            self.engine.sync_weights()
            self.engine.load_state_dict(self.model.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _FOLDER
        if not folder.is_dir():
            if (Path(checkpoint) / "optimizer.pt").is_file():
                raise CheckpointError(
                    f"{checkpoint} has another trainer's optimizer state (optimizer.pt, no {_FOLDER}/)",
                    hint="start from its weights alone: from_pretrained(checkpoint), without resume_from_checkpoint",
                )
            return
        self._at_work.load(folder)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._at_work.sync_weights()
        self._at_work.load_state_dict(self.model.state_dict())

    # ---- what cannot be --------------------------------------------------------------------------------------

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        raise ConfigError("WhaleTrainer does not support hyperparameter_search, which makes many models", hint="start a run for each trial")


class OneProcess(Accelerator):  # type: ignore[misc]
    """Hands out global batches as in one process, and does not change models and optimizers."""

    num_processes = 1
    process_index = 0
    stepped_by: Engine | None = None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self.stepped_by is not None and self.stepped_by.was_skipped

    def prepare(self, *values: Any, **options: Any) -> Any:
        found = tuple(self.prepare_data_loader(each) if isinstance(each, DataLoader) else each for each in values)
        return found[0] if len(found) == 1 else found

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def gather(self, tensor: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor


class EngineOptimizer(torch.optim.Optimizer):
    """What a trainer steps: the engine applies the gradients. Schedulers set the learning rate of the engine's own optimizer.

    Args:
        engine: that trains.
        rate: on a rank that the plan leaves without parameters.
        scale: factor on the gradients of the next update.
    """

    _engine: Engine | None = None

    def __init__(self, engine: Engine, rate: float, scale: Callable[[], float]) -> None:
        super().__init__([nn.Parameter(torch.zeros(()))], {"lr": rate})
        self._engine, self._scale = engine, scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the engine's present optimizer: loading a checkpoint, or another plan, makes another."""
        own = None if self._engine is None else self._engine.optimizer
        return self._groups if own is None else own.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self._engine is not None, "given when it was made"
        self._engine.update(scale=self._scale())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's gradients go with the update."""


class FiniteLoss(Tensor):
    """A loss that is finite, so that who asks whether it is does not wait for the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.isnan, torch.isinf):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class Computed:
    """Stands for a model whose output was computed already, while `compute_loss` is captured."""

    def __init__(self, model: nn.Module, output: Any, inputs: Mapping[str, Any]) -> None:
        self._model, self._output, self._inputs = model, output, inputs

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        odd = [key for key, value in given.items() if key != _ITEMS and value is not self._inputs.get(key)]
        if arguments or odd:
            raise CaptureError(
                f"compute_loss passes {', '.join(odd) or 'positional arguments'} to the model, which are not parts of the batch",
                hint="change the batch in the data collator, or compute in the model's forward",
            )
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class UncapturedState:
    """Stands for a trainer's state, which changes with each step, while `compute_loss` is captured."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f"compute_loss reads self.state.{name}, but is captured once for all steps",
            hint="make it a part of the batch, in the data collator",
        )


def _on_this_machine(args: TrainingArguments) -> TrainingArguments:
    """A copy that knows of the other ranks, on CPUs too: the arguments alone take each rank for the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and args.world_size == 1 and not torch.accelerator.is_available():
        return replace(args, use_cpu=True)
    return copy.copy(args)


def _check(args: TrainingArguments) -> None:
    """Raises a ConfigError that names what a trainer has and Whale cannot do."""
    refused = {
        "auto_find_batch_size": "leave it out: the plan is made for one batch size, and whale plan shows whether it fits",
        "torch_compile": "set runtime.compile of config= instead",
        "deepspeed": "memory.zero and memory.offload of config= share state out",
        "fsdp": "memory.zero of config= shares state out",
        "predict_with_generate": "generate with the trained model after train()",
        "use_liger_kernel": "leave it out: its kernels are not operators that can be captured",
        "batch_eval_metrics": "leave it out",
        "full_determinism": "set torch.use_deterministic_algorithms in the script",
        "fp16_full_eval": "set fp16=True: evaluation is in the type of the training",
        "bf16_full_eval": "set bf16=True: evaluation is in the type of the training",
        "save_on_each_node": "leave it out: a checkpoint is one folder, to which ranks of all hosts write",
        "enable_jit_checkpoint": "set runtime.save_on_sigterm: FOLDER in config=, which saves on all ranks",
        "torch_empty_cache_steps": "leave it out: whale plan says what fits",
        "parallelism_config": "leave it out: the plan says how the model is divided",
        "debug": "leave it out: it watches a model that does not run; a loss that is not finite is an error that names the rank",
        "ddp_bucket_cap_mb": "set communication.bucket_bytes in config=",
        "ddp_find_unused_parameters": _NO_DDP,
        "ddp_broadcast_buffers": _NO_DDP,
        "ddp_static_graph": _NO_DDP,
    }
    for name, hint in refused.items():
        if (value := getattr(args, name, None)) or (value is not None and name.startswith("ddp_")):
            raise ConfigError(f"WhaleTrainer does not support TrainingArguments.{name} (it is {value!r})", hint=hint)
    if getattr(args.accelerator_config, "split_batches", False):
        hint = "leave it out, and divide per_device_train_batch_size by the number of ranks"
        raise ConfigError("WhaleTrainer does not support TrainingArguments.accelerator_config with split_batches", hint=hint)
    if args.use_cpu and torch.cuda.is_available():
        raise ConfigError(
            "TrainingArguments.use_cpu is set, but WhaleTrainer computes on the devices of the plan, this machine's GPUs",
            hint="leave it out; or hide the GPUs: CUDA_VISIBLE_DEVICES= in the environment",
        )


def _example(loader: Any) -> Mapping[str, Any]:
    """A batch like those of a loader, of its first samples; the random numbers drawn later are not affected."""
    dataset, size = loader.dataset, loader.total_batch_size
    with _random_state_kept():
        if hasattr(dataset, "__getitem__"):
            samples = [dataset[row] for row in range(min(size, len(dataset)))]
        else:
            samples = list(islice(iter(dataset), size))
        found: Mapping[str, Any] = loader.collate_fn(samples)
    return found


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
