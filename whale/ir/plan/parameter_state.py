"""In which forms the parameters of a plan live: what ops read, the gradient, and what the optimizer keeps.

            compute       gradient      optimizer
trained     the weight    its sum       2 tensors (Adam)
fixed       the weight    -             -                    frozen parameters and buffers
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.graph import Parameter

TRAINED, FIXED = "trained", "fixed"
"""The classes of parameters."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a class of parameters.

    Attributes:
        sharding: where its elements lie: ``stage`` as the stages say that hold the parameter.
        dtype: ``own`` for the parameter's, else a dtype's name.
        home: the memory that it lies in, ``device`` or ``host``.
    """

    sharding: str = "stage"
    dtype: str = "own"
    home: str = "device"

    def __str__(self) -> str:
        return f"sharding {self.sharding}, dtype {self.dtype}, home {self.home}"


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The forms of one class of parameters.

    Attributes:
        parameters: the class.
        compute: what ops read.
        gradient: None where there is none.
        optimizer: of each tensor that the optimizer keeps of its size; None where it keeps none.
        num_optimizer_tensors: how many these are.
    """

    parameters: str
    compute: Form
    gradient: Form | None
    optimizer: Form | None
    num_optimizer_tensors: int

    @property
    def forms(self) -> tuple[tuple[str, Form], ...]:
        """The forms that are there, by name."""
        found = (("compute", self.compute), ("gradient", self.gradient), ("optimizer", self.optimizer))
        return tuple((name, form) for name, form in found if form is not None)


def plain_states(num_optimizer_tensors: int = 2) -> tuple[ParameterState, ...]:
    """Everything on the devices of the stages, in the parameters' own types."""
    optimizer = Form() if num_optimizer_tensors else None
    return (
        ParameterState(TRAINED, Form(), Form(), optimizer, num_optimizer_tensors),
        ParameterState(FIXED, Form(), None, None, 0),
    )


def class_of(parameter: Parameter, *, training: bool = True) -> str:
    """The class of a parameter or buffer."""
    return TRAINED if training and parameter.kind == "parameter" and parameter.trainable else FIXED
