"""Lightning's `Trainer` on the devices of a plan: it runs as in one process, and a Whale engine computes what its hooks do.

Lightning                            here
one process, global batches          every rank, the same global batches; the engine takes its own rows of each
training_step, loss.backward()       engine.forward_backward; training_step is captured as the model's forward
optimizer.step()                     the user's optimizer holds settings for the engine's own, which engine.update steps
self.log in a step hook              engine.metrics: what the captured hook logs is returned with the loss
validation_step                      engine.evaluate
x.ckpt                               Lightning's own file, with whole weights; next to it ``x.ckpt.whale/``, which any plan reads
"""

from __future__ import annotations

import inspect
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from whale.api import Engine, parallelize
from whale.comm import World, connect
from whale.config import Source, load_config
from whale.errors import CaptureError, CheckpointError, ConfigError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan

_PREFIX, _LOGGED = "module.", "logged "
_HOOKS = ("training_step", "validation_step", "test_step", "predict_step")
_OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]  # behind self, name and value


class WhaleStrategy(Strategy):  # type: ignore[misc]
    """Trains a `LightningModule` on the devices of a plan: ``Trainer(strategy=WhaleStrategy(...))``.

    Each rank runs the same script. A batch of a data loader is the global batch, equal on every rank (`seed_everything`); the plan says
    which rows of it a rank computes. Weights, losses and what is logged are those of the `Trainer` in one process.

    Args:
        config: settings, as `whale.parallelize` takes them.
        cluster, plan: as of `whale.parallelize`.

    Attributes:
        engine: of the training; None before its first batch.

    Raises:
        ConfigError: something is asked for that cannot be had this way; see `_check`.
    """

    def __init__(self, config: Source = None, cluster: Cluster | str | Path | None = None, plan: Plan | str | Path | None = None) -> None:
        settings = load_config(config, environment={})
        self._sources: dict[str, Any] = {"config": settings, "cluster": cluster, "plan": plan}
        self.engine: Engine | None = None
        self._seen = Hooks()
        self._resumes_from: Path | None = None
        self._own_precision = EnginePrecision(self)
        self.global_rank, self.local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        super().__init__()

    # ---- one process -----------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin is not self._own_precision and plugin.precision != "32-true":
            raise ConfigError(
                f"WhaleStrategy does not support Trainer(precision={plugin.precision!r})",
                hint='leave precision= out and pass WhaleStrategy(config={"precision.dtype": "bf16"}), or "fp16"',
            )

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")  # batches and logged numbers; the engine's ranks have devices of their own

    def setup_environment(self) -> None:
        """The engine's ranks choose their devices."""

    def model_to_device(self) -> None:
        """It stays where it is: ranks get what they own."""

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @cached_property
    def _world(self) -> World:
        return connect(self._sources["config"].communication.timeout_seconds)

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor  # of the global batch

    def all_gather(self, tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return tensor

    def barrier(self, name: str | None = None) -> None:
        self._world.gather_objects(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._world.gather_objects(obj)[src]

    # ---- training --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            if self.engine is not None:
                self.engine.close()
            self.engine = None
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _check(self.lightning_module, self.optimizers)

    def _open(self, batch: Any) -> Engine:
        hooks, given = CapturedHooks(self.lightning_module, self._seen), {"training_step": batch}
        self.engine = parallelize(hooks, loss=_own_loss, optimizer=self._make_optimizer, batch=given, **self._sources)
        if self._resumes_from is not None:
            self.engine.load(self._resumes_from)
            self._resumes_from = None
        return self.engine

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """One like the user's, over the parameters that this rank owns."""
        made, owned = self.optimizers[0], dict(named)
        names = {id(parameter): f"{_PREFIX}{name}" for name, parameter in self.lightning_module.named_parameters()}
        groups = [
            {**group, "params": [owned[names[id(each)]] for each in group["params"] if names.get(id(each)) in owned]}
            for group in made.param_groups
        ]
        taken = inspect.signature(type(made)).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        settings = {key: value for key, value in made.defaults.items() if takes_all or key in taken}
        found: torch.optim.Optimizer = type(made)(groups, **settings)
        return found

    def training_step(self, batch: Any, *others: Any) -> Tensor:
        engine = self.engine if self.engine is not None else self._open(batch)
        loss = self._plain(engine.forward_backward({"training_step": batch}))
        self._log("training_step")
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **options: Any) -> Tensor:
        return closure_loss  # the gradients are there

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        value = super().optimizer_step(optimizer, closure, model, **options)  # the closure, hooks, clipping; it has no gradients itself
        assert self.engine is not None, "the closure has made it"
        own = self.engine.optimizer
        for mine, theirs in zip([] if own is None else own.param_groups, self.optimizers[0].param_groups, strict=False):
            mine.update({key: setting for key, setting in theirs.items() if key != "params"})
        self.engine.update(scale=1 / self.num_means)
        return value

    @property
    def num_means(self) -> int:
        """How many losses an update is the mean of."""
        return int(self.lightning_module.trainer.accumulate_grad_batches)

    # ---- evaluation ------------------------------------------------------------------------------------------

    def validation_step(self, *arguments: Any) -> Any:
        return self._evaluate("validation_step", *arguments)

    def test_step(self, *arguments: Any) -> Any:
        return self._evaluate("test_step", *arguments)

    def predict_step(self, batch: Any, *others: Any) -> Any:
        if self.engine is None:
            return super().predict_step(batch, *others)
        return self.engine.predict({"predict_step": batch})

    def _evaluate(self, hook: str, batch: Any, *others: Any) -> Any:
        """Logs what a hook logs; before the first step as in one process, on every rank."""
        if self.engine is None:
            return getattr(super(), hook)(batch, *others)
        if len(others) > 1:
            raise ConfigError(f"WhaleStrategy does not support several data loaders in {hook} (dataloader_idx={others[1]})")
        self.engine.evaluate({hook: batch, "logged": {}})
        found = self._log(hook)
        returned = self._seen.returned[hook]
        return found.get(returned) if isinstance(returned, str) else returned and self.engine.predict({hook: batch})

    def _log(self, hook: str) -> dict[str, Tensor]:
        """Logs, and returns, what the captured hook logged in the last pass."""
        assert self.engine is not None, "it has run"
        found = {name.removeprefix(_LOGGED): self._plain(value) for name, value in self.engine.metrics.items()}
        for name, value in found.items():
            how = {**self._seen.options[hook][name], "sync_dist": True}  # it is that of all ranks
            self.lightning_module.log(name, value, **how)
        return found

    def _plain(self, value: Tensor) -> Tensor:
        return value.as_subclass(Tensor).to(self.root_device, torch.float32)

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.engine is None:
            return dict(super().lightning_module_state_dict())
        self.engine.sync_weights()
        state = self.engine.state_dict()
        assert state is not None, "gathered on every rank"
        return {name.removeprefix(_PREFIX): value for name, value in state.items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.engine is not None:
            self.engine.sync_weights()
            self.engine.load_state_dict({f"{_PREFIX}{name}": value for name, value in checkpoint["state_dict"].items()})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.engine is not None:
            self.engine.sync_weights()
            self.engine.save(_beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._resumes_from = _beside(checkpoint_path)
        return dict(super().load_checkpoint(checkpoint_path, weights_only))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._resumes_from is None or not self._resumes_from.is_dir():
            raise CheckpointError(
                f"the checkpoint has no optimizer state of WhaleStrategy (there is no {self._resumes_from})",
                hint="start from the weights alone: load_from_checkpoint, without ckpt_path=",
            )
        super().load_optimizer_state_dict(checkpoint)

    def teardown(self) -> None:
        if self.engine is not None:
            self.lightning_module.load_state_dict(self.lightning_module_state_dict())
        super().teardown()


class EnginePrecision(Precision):  # type: ignore[misc]
    def __init__(self, strategy: WhaleStrategy) -> None:
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        engine = self._strategy.engine
        assert engine is not None, "there are gradients"
        engine.clip_grad_norm_(clip_val, scale=1 / self._strategy.num_means)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> NoReturn:
        raise ConfigError('WhaleStrategy does not support gradient_clip_algorithm="value"', hint='leave it out, or set it to "norm"')


@dataclass(eq=False)
class Hooks:
    """What was seen of hooks when they were captured."""

    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # per hook and name that it logs, how
    returned: dict[str, str | bool] = field(default_factory=dict)  # per hook, the name of its result; else whether it has one


class CapturedHooks(nn.Module):
    """The step hooks of a `LightningModule` as one forward: a batch comes by the name of its hook. ``seen`` is no part of the capture."""

    def __init__(self, module: LightningModule, seen: Hooks) -> None:
        super().__init__()
        self.module, self._seen = module, weakref.ref(seen)
        self._with_index = tuple(name for name in _HOOKS if is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2))

    def forward(
        self,
        training_step: Any = None,
        validation_step: Any = None,
        test_step: Any = None,
        predict_step: Any = None,
        logged: Mapping[str, None] | None = None,
    ) -> Any:
        """What a hook returns; for the training, or where ``logged`` is given, its loss with what it logs."""
        given = zip(_HOOKS, (training_step, validation_step, test_step, predict_step), strict=True)
        hook, batch = next((name, value) for name, value in given if value is not None)
        values: dict[str, Tensor] = {}
        logs: dict[str, Tensor] = {}
        with self._logging(hook, values, logs) as options:
            call = getattr(self.module, hook)
            found = call(batch, BatchIndex(hook)) if hook in self._with_index else call(batch)
        loss = found["loss"] if hook == "training_step" and isinstance(found, Mapping) else found
        if loss is not found and (others := [name for name in found if name != "loss"]):
            raise CaptureError(
                f"WhaleStrategy does not support training_step returning more than its loss ({', '.join(map(str, others))})",
                hint="leave it out: outputs are what validation_step and predict_step return",
            )
        seen = self._seen()
        assert seen is not None, "the strategy has it"
        seen.options.setdefault(hook, {}).update(options)  # captures for other batches may log other values
        seen.returned[hook] = next((name for name, value in values.items() if _is_same(value, loss)), loss is not None)
        if hook != "training_step":
            if logged is None:
                return found
            if not values:
                hint = "outputs are what predict_step returns"
                raise CaptureError(f"{hook} logs nothing, so WhaleStrategy has nothing to evaluate", hint=hint)
            first = next(iter(logs.values()))
            loss = first if first.is_floating_point() else first.float()
        return {"loss": loss, **logs}

    @contextmanager
    def _logging(self, hook: str, values: dict[str, Tensor], logs: dict[str, Tensor]) -> Iterator[dict[str, dict[str, Any]]]:
        """Collects what is logged in place of the module, and refuses access to the trainer, which changes with each step.

        Args:
            hook: that is captured.
            values: gets the tensors by name.
            logs: gets what they are when they are logged, as metrics.
        """
        options: dict[str, dict[str, Any]] = {}
        trainer = self.module._trainer

        def log(name: str, value: Any, *others: Any, **how: Any) -> None:
            if not isinstance(value, Tensor):
                raise CaptureError(
                    f"WhaleStrategy does not support self.log of a value that is not a tensor ({name}: {type(value).__name__})",
                    hint="log the value of a function of this batch (torchmetrics.functional); other values in a callback",
                )
            values[name], logs[_LOGGED + name] = value, value.clone()
            options[name] = {**dict(zip(_OPTIONS, others, strict=False)), **how}
            if not isinstance(options[name].get("batch_size", 0), int | None):
                del options[name]["batch_size"]  # it is of the example; Lightning finds that of each batch

        self.module.log, self.module._trainer = log, CapturedTrainer(hook)
        try:
            yield options
        finally:
            self.module._trainer = trainer
            del self.module.log


class CapturedTrainer:
    """Stands for the trainer, and so for its loggers, epoch and step, on which a captured hook cannot depend."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f"{self._hook} reads trainer.{name} (by self.trainer, self.{name} or the like), but is captured once for all batches",
            hint="do what depends on it in a hook that is not captured: on_train_batch_start, on_train_batch_end; self.log logs the loss",
        )


class BatchIndex:
    """Stands for batch_idx, on which a captured hook cannot depend."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"{self._hook} uses its batch_idx, but is captured once for all batches",
            hint="do what depends on it in a hook that is not captured: on_train_batch_end, on_validation_batch_end",
        )

    __bool__ = __int__ = __index__ = __float__ = __hash__ = __str__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse


def _own_loss(output: Any, batch: Any) -> Any:
    return output


def _is_same(value: Tensor, returned: Any) -> bool:
    """Whether what is logged is what is returned, detached or not."""
    if not isinstance(returned, Tensor) or (value.dtype, value.shape) != (returned.dtype, returned.shape):
        return False
    is_shared = value.untyped_storage()._cdata == returned.untyped_storage()._cdata
    return is_shared and value.storage_offset() == returned.storage_offset()


def _beside(filepath: Any) -> Path:
    return Path(f"{filepath}.whale")


def _check(module: LightningModule, optimizers: list[Any]) -> None:
    """Raises a ConfigError that names what a module has and this strategy cannot do."""
    name = type(module).__name__
    if not module.automatic_optimization:
        hint = "use whale.parallelize in a loop of your own"
        raise ConfigError(f"WhaleStrategy does not support manual optimization ({name}.automatic_optimization is False)", hint=hint)
    if len(optimizers) != 1 or isinstance(optimizers[0], torch.optim.LBFGS):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ConfigError(f"configure_optimizers returned {kinds}; WhaleStrategy supports one optimizer that steps once per update")
    hooks = ("backward", "optimizer_step", "optimizer_zero_grad")
    if odd := [each for each in hooks if getattr(type(module), each) is not getattr(LightningModule, each)]:
        raise ConfigError(f"WhaleStrategy does not call {', '.join(odd)}, which {name} overrides", hint="leave them out")
