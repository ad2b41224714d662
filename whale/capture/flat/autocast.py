"""The casts that `torch.autocast` makes of an op's operands, found by running each op once on fake tensors.

linear(%x, %w)      float32, under autocast to bfloat16
linear(bf16(%x), bf16(%w))                                 as it is written into the graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.capture.exporting.refusals import quiet_export
from whale.capture.flat.aliasing import memory_roots, written_arguments
from whale.capture.flat.sizes import hint_of
from whale.capture.source import line_of
from whale.errors import CaptureError
from whale.ir.precision import Precision

aten = torch.ops.aten


@dataclass(frozen=True)
class Autocast:
    """The autocast in force in a region."""

    kind: str  # device type
    dtype: torch.dtype | None  # that it casts to; `None` if it is off
    # of the whole program, which excludes ops by the names of their parameters; None for a region of the model's own
    precision: Precision | None = None

    @staticmethod
    def of(precision: Precision, kind: str) -> Autocast:
        return Autocast(kind, getattr(torch, precision.dtype), precision)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, torch casts tensors of this device type, also on machines without it, where `torch.autocast` would be off."""
        before = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind), torch.is_autocast_cache_enabled()
        _set(self.kind, self.dtype is not None, self.dtype or before[1], False)
        try:
            yield
        finally:
            _set(self.kind, *before)


@dataclass(frozen=True)
class _Seen:
    own: Mapping[fx.Node, torch.dtype]  # the dtype that each operand was cast to
    others: tuple[torch.dtype, ...]  # the dtypes of all further casts, in order
    all: tuple[torch.dtype, ...]  # the dtypes of all casts
    types: tuple[torch.dtype, ...] | None  # of its results; None if it does not run on fake tensors


def _set(kind: str, is_on: bool, dtype: torch.dtype, caches: bool) -> None:
    torch.set_autocast_enabled(kind, is_on)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)


def types_of(node: fx.Node) -> tuple[torch.dtype, ...] | None:
    """The dtypes of an op's results for its operands; None if it does not run on fake tensors."""
    with quiet_export():
        return _watch(node, {}, Autocast("cpu", None)).types


@dataclass(frozen=True)
class Casts:
    """How an op without autocast computes what it computes under it."""

    operands: Mapping[fx.Node, torch.dtype]  # the dtypes that operands are cast to
    computed_in: torch.dtype | None = None  # the argument `dtype`; None if it stays


def casts_of(node: fx.Node, autocast: Autocast) -> Casts | None:
    """The casts that autocast makes of an op; None if it casts intermediate values inside the op.

    On a GPU sums and softmaxes are given a `dtype`: the kernel reads half precision and computes and returns float32.
    """
    off = Autocast(autocast.kind, None)
    with quiet_export():
        under, plain = _watch(node, {}, autocast), _watch(node, {}, off)
        if under == plain or (not under.all and None in (under.types, plain.types)):
            return Casts({})
        if not under.all:
            return Casts({}, torch.float32) if _takes_dtype(node) and _watch(node, {}, off, torch.float32) == under else None
        own = {source: dtype for source, dtype in under.own.items() if plain.own.get(source) != dtype}
        after = _watch(node, own, off)
        if (after.types, after.all) == (under.types, under.others):
            return Casts(own)
        # What is cast may be a copy of an operand in another layout: cast sooner, it is the same.
        floats = [
            source
            for source in node.all_input_nodes
            if isinstance(value := source.meta.get("val"), Tensor) and value.dtype is torch.float32
        ]
        sooner = dict.fromkeys(floats, cast(torch.dtype, autocast.dtype))
        after, still = _watch(node, sooner, off), _watch(node, sooner, autocast)
        return Casts(sooner) if after == still and after.types == under.types else None


def _takes_dtype(node: fx.Node) -> bool:
    names = [argument.name for argument in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
    return "dtype" in names[len(node.args) :] and node.kwargs.get("dtype") is None


def write_as_parts(graph: fx.Graph, node: fx.Node) -> bool:
    """Splits a cross entropy of class numbers into the two ops that torch computes it by, so that autocast can cast between them.

    On a GPU autocast leaves the logarithm of the softmax in half precision and casts it for the loss. False for other ops.
    """
    if node.target is not aten.cross_entropy_loss.default:
        return False
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    logits, target = given["self"], given["target"]
    assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
    value: Tensor = logits.meta["val"]
    if given.get("label_smoothing", 0.0) != 0.0 or target.meta["val"].is_floating_point():
        return False
    with graph.inserting_before(node):
        made = graph.call_function(aten.log_softmax.int, (logits, 0 if value.dim() == 1 else 1))
    made.meta = {**node.meta, "val": value.clone()}
    node.target = aten.nll_loss_nd.default
    node.args = (
        made,
        target,
        *(given.get(name, default) for name, default in (("weight", None), ("reduction", 1), ("ignore_index", -100))),
    )
    node.kwargs = {}
    return True


def widening(node: fx.Node) -> Casts:
    """Casts with which an op computes in float32, whatever autocast says."""
    halves = (torch.bfloat16, torch.float16)
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    return Casts({source: torch.float32 for source, value in values.items() if isinstance(value, Tensor) and value.dtype in halves})


def widened(node: fx.Node, autocast: Autocast) -> Casts | None:
    """`widening` of an op that casts inside and returns float32, which rounds less than under autocast; None for others."""
    casts = widening(node)
    with quiet_export():
        types = _watch(node, {}, autocast).types
        return casts if types is not None and _watch(node, casts.operands, Autocast(autocast.kind, None)).types == types else None


def _watch(node: fx.Node, casts: Mapping[fx.Node, torch.dtype], autocast: Autocast, computed_in: torch.dtype | None = None) -> _Seen:
    """Runs an op on fake tensors of the example's sizes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made: dict[fx.Node, Any] = {}

        def value(source: fx.Node) -> Any:
            if source not in made:
                made[source] = pytree.tree_map(lambda item: _empty_like(item, casts.get(source), autocast.kind), source.meta.get("val"))
            return made[source]

        args, kwargs = map_arg((node.args, node.kwargs), value)
        operands = {id(item): source for source, item in made.items() if isinstance(item, Tensor)}
        storages = {item.untyped_storage()._cdata: source for source, item in made.items() if isinstance(item, Tensor)}
        recorder = _CastRecorder(lambda tensor: operands.get(id(tensor)) or storages.get(tensor.untyped_storage()._cdata))
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        types = None
        with suppress(Exception):  # some kernels cannot say what they would do; their casts come before
            with autocast.in_force(), recorder:
                found = target(*args, **kwargs) if computed_in is None else target(*args, **{**kwargs, "dtype": computed_in})
            types = tuple(item.dtype for item in pytree.tree_leaves(found) if isinstance(item, Tensor))
    return _Seen(recorder.own, tuple(recorder.others), tuple(recorder.all), types)


class _CastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes casts; `operand` gives the operand that a tensor is, or is a view of."""

    def __init__(self, operand: Callable[[Tensor], fx.Node | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operand = operand
        self.own: dict[fx.Node, torch.dtype] = {}
        self.others: list[torch.dtype] = []
        self.all: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and kwargs.get("dtype") not in (None, args[0].dtype):
            source = self._operand(args[0])
            self.all.append(kwargs["dtype"])
            if source is None or self.own.setdefault(source, kwargs["dtype"]) != kwargs["dtype"]:
                self.others.append(kwargs["dtype"])
        return func(*args, **kwargs)


def lift_casts(graph: fx.Graph, trained: Mapping[fx.Node, str], others: Mapping[str, str] | None) -> dict[str, str]:
    """Removes the casts of parameters that ops read in one half-precision dtype alone: the runtime casts those once per step.

    Args:
        trained: the placeholders of trained parameters, with their names.
        others: the result for the first capture of the model, which holds for all later ones, or they are refused; None in the first.

    Returns:
        Per parameter without its cast, the dtype in which ops read it.
    """
    roots = memory_roots(graph)
    written = {roots[argument] for node in graph.nodes for argument in written_arguments(node)}
    found: dict[str, str] = {}
    for node, name in trained.items():
        made = next(iter(node.users), None)
        if made is None or (others is not None and name not in others):
            continue
        dtype = None if made in written else _read_in(node, made)
        if dtype is not None and (others is None or others[name] == dtype):
            found[name] = dtype
            node.meta["val"] = made.meta["val"]
            made.replace_all_uses_with(node)
            graph.erase_node(made)
        elif others is not None:
            raise CaptureError(
                f"parameter {name} is read in {others[name]} in training, but in another type by %{made.name}; it is cast once per step, "
                "for all modes",
                where=line_of(made),
                hint="keep the autocast regions the same in training and in evaluation, and for all plain values",
            )
    return found if others is None else dict(others)


def _read_in(parameter: fx.Node, made: fx.Node) -> str | None:
    """The half-precision dtype in which all readers of a parameter have it; None unless one cast, which is no output, reads it."""
    is_cast = made.target is aten.to.dtype and len(made.args) == 2 and not made.kwargs and len(parameter.users) == 1
    if not is_cast or any(user.op == "output" for user in made.users):
        return None
    is_half = parameter.meta["val"].dtype is torch.float32 and made.args[1] in (torch.bfloat16, torch.float16)
    return str(made.args[1]).removeprefix("torch.") if is_half else None


def _empty_like(item: Any, dtype: torch.dtype | None, kind: str) -> Any:
    """A number as in the example; a tensor of its layout, on a device type."""
    if isinstance(item, Tensor):
        sizes, strides = (tuple(map(hint_of, each)) for each in (item.shape, item.stride()))
        return torch.empty_strided(sizes, strides, dtype=dtype or item.dtype, device=kind)
    return hint_of(item)
