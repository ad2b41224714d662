"""The model as a value: ops in execution order, parameters, inputs and the terms of the loss."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, Union

from whale.ir.scope import ScopePath, SourceLine
from whale.units import counted

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

MOST_ROWS = 2**24  # of a global batch: the planner's tables have a number for each count of rows

OpKind = Literal["input", "parameter", "buffer", "constant", "call"]


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the result of another op."""

    op: str

    def __str__(self) -> str:
        return f"%{self.op}"


NUM_ROWS = "num_rows"  # the input that is the number of rows of a piece

# of float16, and of bfloat16, limits as Python writes them, by their names in ``torch.finfo``
_LIMITS = {"max": ("65504.0", "3.3895313892515355e+38"), "tiny": ("6.103515625e-05", "1.1754943508222875e-38")}
_LIMITS |= {"min": _LIMITS["max"], "smallest_normal": _LIMITS["tiny"], "eps": ("0.0009765625", "0.0078125")}

REGION = "region "  # prefix of the tag of an op in a block that the model recomputes, before its number

# a literal, the result of another op, or a tuple of arguments (also for a list); dtypes, devices and memory formats are text
# (``dtype:float32``)
Argument = Union[None, bool, int, float, str, Ref, tuple["Argument", ...]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, and how its shape grows with the rows of the batch."""

    shape: tuple[int, ...]  # sizes at the example's number of rows
    dtype: str  # torch's name without the prefix (``float32``)
    # per dimension, f > 0 if its size is f x rows, 0 if constant, -1 for any other dependence (the op mixes samples)
    row_factors: tuple[int, ...]

    def shape_at(self, num_rows: int) -> tuple[int, ...]:
        """The shape for a batch of this many rows."""
        return tuple(f * num_rows if f > 0 else size for size, f in zip(self.shape, self.row_factors, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes at the example's number of rows."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def has_rows(self) -> bool:
        """Whether some dimension is in proportion to the rows of the batch."""
        return any(f > 0 for f in self.row_factors)

    def __str__(self) -> str:
        sizes = ", ".join(f"{f}b" if f > 1 else "b" if f == 1 else str(size) for size, f in zip(self.shape, self.row_factors, strict=True))
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True)
class Op:
    """One node of the captured graph."""

    name: str  # unique; programs have a node of the same name
    kind: OpKind  # ``call`` computes; the others bring a batch input, a parameter, a buffer or a constant
    target: str  # ``aten.linear.default`` for a call, ``operator.getitem``; else the name of the input, parameter, buffer or constant
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec, ...] = ()  # specs of its tensors; empty if it makes an integer (a size)
    scope: ScopePath = ()  # the user's scopes around it
    module: str = ""  # path of the module that ran it (``transformer.h.0.attn``), "" at the root
    where: SourceLine | None = None  # the user's line
    forward_flops: int = 0  # at the example's rows, as `backward_flops`; a multiply-add is 2
    backward_flops: int = 0
    # ``pointwise``, ``view``, ``in_place``, ``random``, ``reads_rows`` (its result is an integer that depends on the rows), ``checks``
    # (needed although nothing reads its result), ``decides`` (and it decides what is computed), ``region 0`` (of a block that the model
    # recomputes)
    tags: frozenset[str] = frozenset()
    requires_grad: bool = False  # whether a gradient flows into its output

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the ops it reads, each once, in argument order."""
        found: dict[str, None] = {}
        for argument in (*self.args, *(value for _, value in self.kwargs)):
            _collect(argument, found)
        return tuple(found)

    @cached_property
    def operator(self) -> str:
        """Its operator without namespace and overload."""
        return operator_name(self.target)

    @property
    def region(self) -> str | None:
        """Its block among those that the model recomputes; None outside."""
        return next((tag for tag in self.tags if tag.startswith(REGION)), None)

    @property
    def has_own_size(self) -> bool:
        """Whether a result's size is not in proportion to the rows, as of what a mask selects."""
        return any(factor < 0 for spec in self.outputs for factor in spec.row_factors)

    @property
    def num_bytes(self) -> int:
        """Bytes of its outputs at the example's rows."""
        return sum(spec.num_bytes for spec in self.outputs)

    def __str__(self) -> str:
        arguments = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs]
        result = ", ".join(str(spec) for spec in self.outputs) or "int"
        body = f"{self.kind} {self.target}" if self.kind != "call" else f"{self.target}({', '.join(arguments)})"
        return f"%{self.name} = {body} -> {result}"


def operator_name(target: str) -> str:
    """An operator without namespace and overload: ``aten.add.Tensor`` is ``add``, and so is ``aten.add_.Tensor``."""
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else target
    return name if name.endswith("__") else name.rstrip("_")


def _collect(argument: Argument, found: dict[str, None]) -> None:
    if isinstance(argument, Ref):
        found[argument.op] = None
    elif isinstance(argument, tuple):
        for item in argument:
            _collect(item, found)


def _show(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(_show(item) for item in argument) + "]"
    return str(argument)


def storages(ops: Iterable[Op]) -> dict[str, str]:
    """Per op (in order), the owner of its result's storage: itself, or another through views and in-place ops."""
    owner: dict[str, str] = {}
    for op in ops:
        source = op.inputs[0] if op.inputs and (op.tags & {"view", "in_place"} or op.target == "operator.getitem") else op.name
        owner[op.name] = owner.get(source, source)
    return owner


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the model."""

    name: str  # its first name in the model
    spec: TensorSpec
    kind: Literal["parameter", "buffer"] = "parameter"
    trainable: bool = True  # whether it gets a gradient
    ties: tuple[str, ...] = ()  # its other names, if one tensor has several
    scope: ScopePath = ()  # the scopes under which it was made, if no op reads it
    read_as: str | None = None  # the dtype that ops read it in, if another: it is cast once per step, outside the program
    num_lookups: int = 0  # for a sparse gradient, the rows looked up for the example's batch; 0 if dense

    @property
    def gradient_elements(self) -> int:
        """Elements of its gradient; a row's index counts as 8 bytes of them."""
        if not self.num_lookups:
            return self.spec.num_elements
        return self.num_lookups * (self.spec.num_elements // self.spec.shape[0] + -(-8 // DTYPE_BYTES[self.spec.dtype]))


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of the loss or a metric: ``coefficient x (sum of its sums over the batch) / max(sum of weights + offset, minimum)``."""

    coefficient: float
    sum: str  # op of this piece's sum (a scalar tensor)
    weight: str | None  # op of this piece's weight (a scalar tensor or an integer); None for a plain sum, whose divisor is 1
    # whether the weight depends on the batch alone, so that the global weight is known before the forward pass
    weight_from_inputs: bool = True
    where: SourceLine | None = None  # the user's line
    offset: float = 0.0  # added to the whole batch's weight
    minimum: float | None = None  # least divisor of the whole batch; None for no bound
    # why the term is no sum over samples (a plan that divides rows then weighs it by rows, with a warning); "" if it is one
    reason: str = ""
    metric: str = ""  # the metric that it is a term of; "" for the loss

    @property
    def exact(self) -> bool:
        """Whether it is a sum over samples, so that pieces of the batch add up to it."""
        return not self.reason


@dataclass(frozen=True)
class ModelGraph:
    """A captured model: what the planner knows of it, without torch."""

    ops: tuple[Op, ...]  # in execution order, which matters: the graph may hold in-place ops
    parameters: tuple[Parameter, ...]  # every parameter and buffer, tied names merged
    num_rows: int  # rows of the example batch
    loss: tuple[LossTerm, ...] = ()  # the terms of the loss, then those of metrics; empty if the graph returns outputs only
    outputs: tuple[str, ...] = ()  # ops whose values the graph returns besides the loss terms (for ``predict`` and ``eval_predict``)
    mode: Literal["train", "eval", "predict", "eval_predict"] = "train"
    dynamic: bool = True  # whether one capture serves any number of rows
    warnings: tuple[str, ...] = ()  # about the model, whatever the plan (it is captured anew for other numbers of rows, ...)
    half_by_device: bool = False  # whether `HALF` stands for the half-precision type that each device has
    half_limits: tuple[str, ...] = ()  # names of the limits of that type (of ``torch.finfo``) that the model reads

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def position(self) -> dict[str, int]:
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def storage(self) -> dict[str, str]:
        """Per op, the owner of its result's storage (`storages`)."""
        return storages(self.ops)

    def resized(self, ops: Mapping[str, Op], parameters: Mapping[str, Parameter]) -> ModelGraph:
        """The graph with some ops and parameters, by name, in other sizes; names, arguments and order stay."""
        made = list(self.ops)
        for name, op in ops.items():
            made[self.position[name]] = op
        found = replace(self, ops=tuple(made), parameters=tuple(parameters.get(each.name, each) for each in self.parameters))
        # what follows from names and arguments need not be found again
        vars(found).update(by_name={**self.by_name, **ops}, position=self.position, storage=self.storage)
        return found

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Per op, the ops that read it, in order."""
        users: dict[str, list[str]] = {op.name: [] for op in self.ops}
        for op in self.ops:
            for name in op.inputs:
                users[name].append(op.name)
        return {name: tuple(readers) for name, readers in users.items()}

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        """Parameters and buffers by name, tied names included."""
        return {name: parameter for parameter in self.parameters for name in (parameter.name, *parameter.ties)}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The trained parameters, by name, in order."""
        return tuple(each.name for each in self.parameters if each.kind == "parameter" and each.trainable)

    @cached_property
    def read_as(self) -> Mapping[str, str]:
        """The dtypes in which ops read parameters that are cast once per step."""
        return {each.name: each.read_as for each in self.parameters if each.read_as is not None}

    def parameters_among(self, names: Iterable[str]) -> Iterator[Parameter]:
        """The parameters and buffers among some ops, such as the inputs of another op, as often as they occur."""
        for name in names:
            op = self.by_name[name]
            if op.kind in ("parameter", "buffer"):
                yield self.parameter_by_name[op.target]

    def parameters_read(self, ops: Iterable[str]) -> set[str]:
        """The names of the parameters and buffers that some ops read."""
        return {each.name for each in self.parameters_among({source for name in ops for source in self.by_name[name].inputs})}

    @cached_property
    def first_reads(self) -> dict[str, int]:
        """Per parameter, by its own name, the position of its first reader: when backward reaches it, its gradient is complete."""
        found: dict[str, int] = {}
        for position, op in enumerate(self.ops):
            for parameter in self.parameters_among(op.inputs):
                if parameter.kind == "parameter":
                    found.setdefault(parameter.name, position)
        return found

    @cached_property
    def last_reads(self) -> dict[str, int]:
        """Per parameter, by its own name, the position of the last op that reads it."""
        return {each.name: place for place, op in enumerate(self.ops) for each in self.parameters_among(op.inputs)}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal graphs; ranks compare it before they communicate."""
        return hashlib.sha256(self.comparable(str(self)).encode()).hexdigest()[:16]

    def comparable(self, text: str) -> str:
        """Text of ops, equal whichever device captured them: limits of half-precision types that devices choose are one number. So are
        literals that equal a limit that the model reads too.
        """
        for own, other in (_LIMITS[name] for name in self.half_limits if name in _LIMITS):
            text = re.sub(rf"(?<![\w.]){re.escape(own)}(?!\d)", other, text)  # whole numbers
        return text

    def __str__(self) -> str:
        kind = ("" if self.dynamic else ", fixed") + (", half types by device" if self.half_by_device else "")
        lines = [f"model graph ({self.mode}, {counted(self.num_rows, 'row')}{kind}):"]
        for parameter in self.parameters:
            ties = f" = {' = '.join(parameter.ties)}" if parameter.ties else ""
            frozen = "" if parameter.trainable or parameter.kind == "buffer" else " frozen"
            read_as = f" read as {parameter.read_as}" if parameter.read_as else ""
            sparse = f", gradient of {counted(parameter.num_lookups, 'row')}" if parameter.num_lookups else ""
            lines.append(f"  {parameter.kind} {parameter.name}{ties}: {parameter.spec}{frozen}{read_as}{sparse}")
        lines += [f"  {op}" for op in self.ops]
        lines += [f"  {t.metric or 'loss'} {t.coefficient:g} * %{t.sum}" + (f" / %{t.weight}" if t.weight else "") for t in self.loss]
        lines += [f"  output %{name}" for name in self.outputs]
        return "\n".join(lines)
