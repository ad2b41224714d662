"""Attributes of modules and trainers that an engine lacks: the error says what to use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from whale.config import nearest
from whale.errors import ConfigError, warn

_NO_MODE = "step trains; evaluate and predict run in evaluation mode; no call changes that"
_NO_BACKWARD = (
    "engine.step(batch) runs forward, backward and the optimizer; or in parts: engine.forward_backward(batch) adds gradients, which "
    "engine.gradients() has, and engine.update() applies and forgets them"
)
_NO_MOVE = "the plan says where a parameter lives, and the model its type: set it before parallelize (model.to(torch.bfloat16))"

_ANSWERS: Mapping[str, str] = {
    "train": _NO_MODE,
    "eval": _NO_MODE,
    "training": _NO_MODE,
    "forward": "engine.step(batch) trains, engine.evaluate(batch) gives the loss, engine.predict(batch) the output",
    "backward": _NO_BACKWARD,
    "zero_grad": _NO_BACKWARD,
    "scale": "precision.dtype fp16 scales the loss by itself; engine.loss_scale has the factor",
    "unscale_": "gradient.clip_norm clips the gradients of a step",
    "no_sync": "engine.forward_backward(batch) accumulates gradients and engine.update() applies them; pipeline.num_micro_batch "
    "accumulates over parts of a batch",
    "fit": "call engine.step(batch) in a loop over engine.loader(dataset, global_batch_size=...)",
    "named_parameters": "engine.parameters is a mapping: engine.parameters.items()",
    "buffers": "engine.tensors is a mapping of parameters and buffers",
    "named_buffers": "engine.tensors is a mapping of parameters and buffers",
    "modules": "the model is captured as a graph: see engine.model_graph",
    "module": "your model object is left as it was; engine.state_dict() has the trained weights",
    "to": _NO_MOVE,
    "cuda": _NO_MOVE,
    "cpu": _NO_MOVE,
    "half": _NO_MOVE,
    "bfloat16": _NO_MOVE,
    "float": _NO_MOVE,
    "double": _NO_MOVE,
    "requires_grad_": "set requires_grad before parallelize: the capture decides what is trained",
    "register_forward_hook": "return what you want to see from forward; engine.predict(batch) gives it",
    "explain": "engine.plan has what was decided, and engine.plan.choices why; `whale plan --explain` prints them",
    "estimate": "engine.plan.step_seconds is the predicted time of a step; `whale simulate` prints where it goes",
    "save_checkpoint": "engine.save(path)",
    "load_checkpoint": "engine.load(path), or engine.resume(folder) for the newest there",
}


class NotOfAnEngine(ConfigError, AttributeError):
    """An attribute of modules or trainers that an engine has not."""


def answer(name: str, known: Iterable[str]) -> AttributeError:
    """The error for an attribute that an engine lacks; ``known`` are those that it has."""
    if name not in _ANSWERS:
        found = nearest(name, (each for each in known if not each.startswith("_")), cutoff=0.75)
        meant = f", did you mean {found!r}?" if found else ""
        return AttributeError(f"'Engine' object has no attribute {name!r}{meant}", name=name)
    return NotOfAnEngine(f"an Engine has no {name}", hint=_ANSWERS[name])


def warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warns where the whole model is in evaluation mode when it is passed; single parts stay in it."""
    if not model.training:
        warn(
            f"the model is in evaluation mode, but step runs all of it in training mode ({_NO_MODE}): call model.train() before "
            "parallelize, then eval() on the parts that should stay in evaluation mode"
        )


def call_answer() -> ConfigError:
    return ConfigError("an Engine is not callable", hint=_ANSWERS["forward"])


def copy_answer() -> ConfigError:
    return ConfigError(
        "an Engine cannot be copied or pickled: it holds this rank's devices and process groups",
        hint="engine.state_dict() has the weights, for a copy of the model too; engine.save(path) writes a checkpoint",
    )
