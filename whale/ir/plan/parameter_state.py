"""The forms of a plan's parameters: what ops read, the gradient, and what the optimizer steps.

                       compute     gradient                optimizer
trained                the weight  its sum                 the weight that is stepped, and the optimizer's state
cast by every reader   its cast    its sum, uncast         the same
frozen, and buffers    the weight  -                       -

If the compute and the optimizer form have one dtype and home, they share memory. Otherwise, or if gradients are accumulated in another
dtype than the optimizer takes, or only *keepers* among the owners step a weight, the final gradient is *collected* into the optimizer form,
and after the step the weight is *published* into the compute form. If the compute form itself is sharded over owners or on the host, it is
gathered before ops read it, and freed after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from whale.ir.graph import DTYPE_BYTES, Parameter
from whale.ir.patterns import first_match

Layout = Literal["stage", "owners"]
Home = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a parameter."""

    dtype: str
    sharding: Layout = "stage"  # ``stage``: as the stages that hold the parameter say; ``owners``: sharded over all owners
    home: Home = "device"  # memory of the device or of its host
    is_sparse: bool = False  # of a gradient, whether it is values and indices of rows

    @property
    def is_plain(self) -> bool:
        """Whether it is on devices, sharded by stage."""
        return self.sharding == "stage" and self.home == "device"

    def __str__(self) -> str:
        return f"{self.dtype}, sharding {self.sharding}, home {self.home}" + (", sparse" if self.is_sparse else "")


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The forms of some parameters or buffers."""

    parameters: tuple[str, ...]  # names
    compute: Form  # what ops read
    gradient: Form | None = None  # None if not trained
    optimizer: Form | None = None  # the weight that is stepped, and each optimizer tensor of its size; None if not trained
    num_optimizer_tensors: int = 0  # optimizer tensors per trained parameter
    num_outer_tensors: int = 0  # likewise of an outer optimizer (`Rounds`), which are there throughout and used once a round
    sum_dtype: str | None = None  # dtype of gradients where owners sum them; None for that of the gradient form
    feeds_back: bool = False  # whether a device adds the rounding error of that to its next gradient

    @property
    def kept(self) -> Form:
        """The lasting form: for trained parameters that of the optimizer."""
        return self.compute if self.optimizer is None else self.optimizer

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the lasting form, with what the optimizer keeps for it."""
        return DTYPE_BYTES[self.kept.dtype] * (1 + (0 if self.gradient is None else self.num_optimizer_tensors + self.num_outer_tensors))

    @property
    def sent_dtype(self) -> str | None:
        """The dtype in which gradients are sent; None if not trained."""
        return self.sum_dtype or (None if self.gradient is None else self.gradient.dtype)

    @property
    def is_copied(self) -> bool:
        """Whether the optimizer steps other memory than ops read: another dtype, or another home."""
        return (self.kept.dtype, self.kept.home) != (self.compute.dtype, self.compute.home)

    @property
    def casts_gradient(self) -> bool:
        """Whether the optimizer takes another dtype than gradients are accumulated in."""
        return self.gradient is not None and self.gradient.dtype != self.kept.dtype

    @property
    def is_gathered(self) -> bool:
        """Whether the compute form exists only while ops read it, since it is sharded over owners or on the host."""
        return not self.compute.is_plain

    @property
    def is_shared_out(self) -> bool:
        """Whether each owner has only a part of the compute form."""
        return self.compute.sharding == "owners"

    @property
    def forms(self) -> tuple[tuple[str, Form], ...]:
        """The existing forms, by name."""
        found = (("compute", self.compute), ("gradient", self.gradient), ("optimizer", self.optimizer))
        return tuple((name, form) for name, form in found if form is not None)


Zero = int | tuple[tuple[str, int], ...]  # ZeRO stage of all parameters, or by patterns of their names


def zero_of(zero: Zero, name: str) -> int:
    """The ZeRO stage of a parameter: of the first pattern that matches its name; 0 if none does."""
    if isinstance(zero, int):
        return zero
    return dict(zero).get(first_match((pattern for pattern, _ in zero), name) or "", 0)


def states_of(
    parameters: Iterable[Parameter],
    num_optimizer_tensors: int = 2,
    *,
    gradient: Form | None = None,
    optimizer: Form | None = None,
    zero: Zero = 0,
    on_host: Collection[str] = (),
    gradient_dtype: str | None = None,
    sum_dtype: str | None = None,
    feeds_back: bool = False,
    num_outer_tensors: int = 0,
) -> tuple[ParameterState, ...]:
    """The states of a model's parameters and buffers, equal ones together.

    Args:
        parameters: of the model.
        num_optimizer_tensors: that the optimizer keeps per trained parameter.
        gradient: form for all trained parameters; None for the model's own, as for `optimizer`.
        zero: ZeRO stage: from 1 on the optimizer form is sharded over owners, from 2 on the gradient form too, from 3 on the compute form,
            of
            frozen parameters too. Parameters with sparse gradients are whole on each device.
        on_host: the forms on the host: ``optimizer``, or that and ``compute``, which is then sharded as the optimizer form is.
        gradient_dtype: dtype in which real gradients are accumulated; None for that of the form.
        sum_dtype: dtype in which real gradients are summed; None for their own.
        feeds_back: whether the error of rounding to a dtype that is no wider is added to the next gradient.
        num_outer_tensors: that an outer optimizer keeps per trained parameter.
    """
    found = _states(parameters, num_optimizer_tensors, gradient, optimizer, zero, on_host)
    made = ((name, _accumulated_in(state, gradient_dtype)) for name, state in found)
    summed = ((name, _summed_in(state, sum_dtype, feeds_back=feeds_back)) for name, state in made)
    if not num_outer_tensors:
        return _grouped(summed)
    return _grouped(
        (name, state if state.optimizer is None else replace(state, num_outer_tensors=num_outer_tensors)) for name, state in summed
    )


def brought_back(states: Iterable[ParameterState], names: Collection[str], *, compute_only: bool = False) -> tuple[ParameterState, ...]:
    """The states with these parameters on devices: all of their forms, or the compute form alone."""

    def back(state: ParameterState, name: str) -> ParameterState:
        if name not in names:
            return state
        found = replace(state, compute=replace(state.compute, home="device"))
        if compute_only or state.optimizer is None:
            return found
        return replace(found, optimizer=replace(state.optimizer, home="device"))

    return _grouped((name, back(state, name)) for state in states for name in state.parameters)


def _accumulated_in(state: ParameterState, dtype: str | None) -> ParameterState:
    """The state with another dtype for real gradients."""
    if dtype is None or state.gradient is None or state.gradient.dtype.startswith("complex") or state.gradient.is_sparse:
        return state
    return replace(state, gradient=replace(state.gradient, dtype=dtype))


def _summed_in(state: ParameterState, dtype: str | None, *, feeds_back: bool) -> ParameterState:
    """The state with the dtype in which real gradients are summed, if it is another."""
    own = None if state.gradient is None or state.gradient.is_sparse else state.gradient.dtype
    if dtype is None or own is None or own.startswith("complex") or own == dtype:
        return state
    return replace(state, sum_dtype=dtype, feeds_back=feeds_back and DTYPE_BYTES[dtype] <= DTYPE_BYTES[own])


def _grouped(states: Iterable[tuple[str, ParameterState]]) -> tuple[ParameterState, ...]:
    """The states of parameters by name, equal ones together."""
    found: dict[ParameterState, list[str]] = {}
    for name, state in states:
        found.setdefault(replace(state, parameters=()), []).append(name)
    return tuple(replace(state, parameters=tuple(names)) for state, names in found.items())


def _states(
    parameters: Iterable[Parameter],
    num_optimizer_tensors: int,
    gradient: Form | None,
    optimizer: Form | None,
    zero: Zero,
    on_host: Collection[str],
) -> Iterator[tuple[str, ParameterState]]:
    """The state of each parameter, with the arguments of `states_of`."""
    reads_there = "compute" in on_host
    levels = 1 if reads_there else 3, 2, 1
    for parameter in parameters:
        stage = zero_of(zero, parameter.name)
        read_by, summed, stepped = ({"sharding": "owners"} if stage >= level else {} for level in levels)
        stepped |= {"home": "host"} if "optimizer" in on_host else {}
        own, read = Form(parameter.spec.dtype), Form(parameter.read_as or parameter.spec.dtype)
        trains = parameter.kind == "parameter" and parameter.trainable
        if trains and parameter.num_lookups:
            yield parameter.name, ParameterState((), read, replace(own, is_sparse=True), own, num_optimizer_tensors)
            continue
        if parameter.kind == "parameter":
            read = replace(read, **read_by, home="host" if reads_there else "device")  # type: ignore[arg-type]
        state = ParameterState((), read)
        if trains:
            forms = replace(gradient or own, **summed), replace(optimizer or own, **stepped)  # type: ignore[arg-type]
            state = ParameterState((), read, *forms, num_optimizer_tensors)
        yield parameter.name, state
