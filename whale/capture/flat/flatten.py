"""Copies an exported program into one flat graph: ties joined, inner regions inlined, sizes read from one ``num_rows``.

exported program                                  flat graph
p_model_wte_weight, p_model_lm_head_weight   ->   p_wte_weight
sym_size(x, 0), 9 * sym_size(x, 0)           ->   num_rows, 9 * num_rows
wrap_with_set_grad_enabled(False, region)    ->   detached inputs, the region's ops
wrap_with_autocast(bfloat16, region)         ->   the region's ops with the casts written out
_assert_tensor_metadata(...)                 ->   nothing
batch_norm(..., a mark, ...)                 ->   batch_norm(..., 1 / its counter, ...)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from whale.capture.batch import BatchStructure
from whale.capture.exporting.functions import CALL, LOSS_PER_ROW, write_loss
from whale.capture.exporting.reads import ReadAnswer, answer_of, held
from whale.capture.exporting.refusals import INNER_HINT, read_type
from whale.capture.exporting.trace import Traced
from whale.capture.flat.aliasing import STRIDED, may_have_gradient, strided, written_arguments
from whale.capture.flat.autocast import Autocast, casts_of, types_of, widened, widening, write_as_parts
from whale.capture.flat.sizes import READS_ROWS, RowSizes, TiedTensors
from whale.capture.source import line_of
from whale.errors import CaptureError
from whale.ir.graph import NUM_ROWS
from whale.ir.precision import Precision

aten = torch.ops.aten

_KEPT = ("val", "stack_trace", "nn_module_stack", "custom")
_CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_MOMENTUM = 6  # position among the arguments of a batch normalisation
_SUBSTITUTES = {aten.lift_fresh_copy.default: aten.clone.default}


@dataclass
class Flat:
    """A flat graph, without an output node."""

    graph: fx.Graph
    rows: fx.Node  # the ``num_rows`` placeholder
    sizes: RowSizes  # how sizes depend on the rows
    results: tuple[Any, ...] = ()  # of the exported program; after the sum of a loss its weight, a number if it is constant
    sources: dict[str, str] = field(default_factory=dict)  # per parameter, buffer and constant placeholder, the key of its tensor
    kinds: dict[str, str] = field(default_factory=dict)  # per placeholder, the kind of its op
    constants: dict[str, Tensor] = field(default_factory=dict)  # lifted constants by op name
    warnings: list[str] = field(default_factory=list)  # of what has no effect on the device type of the run


def flatten(traced: Traced, structure: BatchStructure, held: TiedTensors, device: str | None, autocast: Autocast | None = None) -> Flat:
    """Makes the flat graph of an export; refuses operators with an inner program (a loop, a branch).

    Args:
        device: device type of the run, whose autocast counts; None for any.
        autocast: in force around the whole program.
    """
    rows = _symbolic_rows(traced, structure)
    graph = fx.Graph()
    node = graph.placeholder(NUM_ROWS)
    node.meta["val"] = rows
    node.meta[READS_ROWS] = True
    flat = Flat(graph, node, RowSizes(rows.node.expr if isinstance(rows, torch.SymInt) else None, traced.rows))
    flat.kinds[node.name] = "input"
    _Flattening(traced, structure, held, flat, device, autocast).run()
    if traced.found.weight is not None:
        flat.results = (flat.results[0], traced.found.weight, *flat.results[1:])
    return flat


def _symbolic_rows(traced: Traced, structure: BatchStructure) -> int | torch.SymInt:
    if not traced.dynamic:
        return traced.rows
    specs = [spec for spec in traced.exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    nodes = {node.name: node for node in traced.exported.graph.find_nodes(op="placeholder")}
    found = next(spec for spec, leaf in zip(specs, structure.inputs, strict=True) if leaf.has_rows)
    size = nodes[found.arg.name].meta["val"].shape[0]
    assert isinstance(size, (int, torch.SymInt))
    return size


class _Flattening:
    def __init__(
        self, traced: Traced, structure: BatchStructure, held: TiedTensors, flat: Flat, device: str | None, autocast: Autocast | None
    ) -> None:
        self._device = device
        self._exported, self._calls, self._answers, self._counters = traced.exported, traced.calls, traced.answers, traced.counters
        self._structure = structure
        self._held = held
        self._flat = flat
        self._graph = flat.graph
        self._without_gradients = False
        self._autocasts = {} if autocast is None else {autocast.kind: autocast}
        self._retyped: set[fx.Node] = set()
        self._kept_of: dict[fx.Node, bool] = {}  # of parameters and what is made of them alone, whether their readers compute in float32
        self._cast_weights: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._named: dict[str, fx.Node] = {}
        self._multiples: dict[tuple[int, int], fx.Node | int] = {(1, 0): flat.rows}

    def run(self) -> None:
        values: dict[fx.Node, Any] = {}
        specs = {spec.arg.name: spec for spec in self._exported.graph_signature.input_specs}
        order = {InputKind.USER_INPUT: 0, InputKind.PARAMETER: 1, InputKind.BUFFER: 2}
        placeholders = self._exported.graph.find_nodes(op="placeholder")
        leaves = iter(self._structure.inputs)
        shared: dict[tuple[str, str], fx.Node] = {}
        for node in sorted(placeholders, key=lambda node: order.get(specs[node.name].kind, 3)):
            spec = specs[node.name]
            leaf = next(leaves) if spec.kind is InputKind.USER_INPUT else None
            kind, wanted, source = ("input", leaf.name or "", "") if leaf is not None else self._holding(spec)
            key = kind, source or wanted  # not the op's name: a_b.c and a.b_c would like the same one
            if key not in shared:
                shared[key] = self._placeholder(node, kind, wanted, source)
                shared[key].meta["whale.has_rows"] = leaf is not None and leaf.has_rows
            values[node] = shared[key]
        self._flat.results = self._inline(self._exported.graph_module, values)

    def _holding(self, spec: InputSpec) -> tuple[str, str, str]:
        """Kind, wanted op name and tensor key of a placeholder that is no batch input."""
        if not isinstance(spec.arg, TensorArgument) or spec.target is None:
            raise CaptureError(f"{spec.arg.name} of the model is {spec.kind.name.lower()}, not a tensor")
        name = spec.target.removeprefix("model.")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            if not spec.target.startswith("model.") or name not in self._held.canonical:
                raise CaptureError(f"the loss has a parameter or buffer of its own ({spec.target})", hint="make them part of the model")
            name = self._held.canonical[name]
            kind = next(parameter.kind for parameter in self._held.parameters if parameter.name == name)
            return kind, f"{kind[0]}_{name.replace('.', '_')}", name
        return "constant", f"c_{spec.target.replace('.', '_')}", spec.target

    def _placeholder(self, old: fx.Node, kind: str, wanted: str, source: str) -> fx.Node:
        node = self._graph.placeholder(wanted)
        node.target = node.name
        node.meta["val"] = old.meta["val"]
        self._flat.kinds[node.name] = kind
        if kind == "constant":
            self._flat.constants[node.name] = self._exported.constants[source]
            source = node.name
        for autocast in self._autocasts.values() if kind == "parameter" else ():
            if autocast.precision is not None:
                self._kept_of[node] = autocast.precision.keeps(source)
        if source:
            self._flat.sources[node.name] = source
            self._named[source] = node
        return node

    def _inline(self, module: fx.GraphModule, values: dict[fx.Node, Any]) -> tuple[Any, ...]:
        """Copies a module's ops, whose placeholders have `values`; returns its results."""
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(map_arg(node.args[0], lambda inner: values[inner]))
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif (answer := answer_of(node, self._answers)) is not None:
                self._hold(node, answer, values[node.args[0]])
            elif (dtype := read_type(node)) is not None:
                _check_type(node, dtype, values[node.args[0]])
            elif node.op == "call_function" and node.target not in _CHECKS:
                values[node] = self._call(node, values)
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        number = self._number(node)
        if number is not None:
            return number
        args = tuple(map_arg(node.args, lambda inner: values[inner]))
        kwargs = dict(map_arg(node.kwargs, lambda inner: values[inner]))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(node, args)
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][cast(int, args[1])]
        if node.target is CALL:
            return self._function(node, *cast(Any, args))
        if node.target is LOSS_PER_ROW:
            copied = write_loss(self._graph, node, args)
            copied.meta = _kept(node)
            self._write_casts(copied)
            self._retype(copied)
            return copied
        if node.target is aten.batch_norm.default and args[_MOMENTUM] in self._counters:
            args = self._with_average(node, args)
        if node.target in STRIDED:
            return self._strided(node, *cast(Any, args))
        target: Any = _SUBSTITUTES.get(cast(Any, node.target), node.target)
        if target is aten.detach_.default and len(node.all_input_nodes[0].users) == 1:
            target = aten.detach.default
        copied = self._graph.create_node("call_function", target, args, kwargs, node.name)
        copied.meta = _kept(node)
        self._write_casts(copied)
        self._retype(copied)
        return copied

    def _with_average(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a batch normalisation with momentum 1 / counter, read after it has been incremented."""
        counter = self._named[self._held.canonical[self._counters[args[_MOMENTUM]]]]
        read = self._graph.call_function(aten.item.default, (counter,))
        momentum = self._graph.call_function(operator.truediv, (1.0, read))
        for made, value in ((read, 1), (momentum, 1.0)):
            made.meta = _kept(node) | {"val": value}
        return (*args[:_MOMENTUM], momentum, *args[_MOMENTUM + 1 :])

    def _hold(self, node: fx.Node, answer: ReadAnswer, condition: fx.Node) -> None:
        """Adds the check of every step that a condition has the value assumed in the trace."""
        made = self._graph.call_function(held, (condition, answer.value, answer.other, str(answer.where or "")))
        made.meta = _kept(node) | {"val": condition.meta["val"]}

    def _function(self, node: fx.Node, operands: Sequence[Any], number: int) -> fx.Node | tuple[fx.Node]:
        """A user's autograd function in place of its stand-in; a single result is not indexed."""
        copied = self._graph.create_node("call_function", self._calls[number], tuple(operands), {}, node.name)
        copied.meta = _kept(node)
        if len(node.meta["val"]) > 1:
            return copied
        copied.meta["val"] = node.meta["val"][0]
        return (copied,)

    def _number(self, node: fx.Node) -> fx.Node | int | None:
        """An integer a x rows + b, made from `num_rows` alone whatever tensor it was read from."""
        value = node.meta.get("val")
        linear = self._flat.sizes.linear(value) if isinstance(value, torch.SymInt) else None
        if linear is None:
            return None
        factor, constant = linear
        return self._of_rows(factor, constant)

    def _of_rows(self, factor: int, constant: int) -> fx.Node | int:
        if factor == 0:
            return constant
        linear = factor, constant
        if linear not in self._multiples:
            made: fx.Node | int = self._flat.rows
            made = made if factor == 1 else self._integer(operator.mul, made, factor)
            self._multiples[linear] = made if constant == 0 else self._integer(operator.add, made, constant)
        return self._multiples[linear]

    def _strided(self, node: fx.Node, source: fx.Node, sizes: Any, strides: Any, offset: Any = None) -> fx.Node:
        """An `as_strided` that knows the strides of its operand."""
        value = source.meta["val"]
        own = [self._flat.sizes.linear(stride) for stride in value.stride()]
        start = 0 if offset is None else offset - value.storage_offset() if isinstance(offset, int) else None
        if None in own or not isinstance(start, int):
            raise CaptureError(
                "as_strided has strides that do not grow in proportion to the rows, which is not supported",
                where=line_of(node),
            )
        laid = [self._of_rows(*linear) for linear in own if linear is not None]
        copied = self._graph.create_node("call_function", strided, (source, laid, sizes, strides, start), {}, node.name)
        copied.meta = _kept(node)
        return copied

    def _integer(self, function: Any, left: Any, right: int) -> fx.Node:
        made = self._graph.call_function(function, (left, right))
        made.meta["val"] = function(left.meta["val"], right)
        return made

    def _region(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            return self._gradient_region(node, *args)
        if name == "wrap_with_autocast":
            return self._autocast_region(node, *cast(Any, args))
        raise CaptureError(
            f"the model uses a higher-order operator, which is not supported ({name})",
            where=line_of(node),
            hint=INNER_HINT,
        )

    def _gradient_region(self, node: fx.Node, enabled: bool, module: fx.GraphModule, *inputs: Any) -> tuple[Any, ...]:
        if enabled and self._without_gradients:
            raise CaptureError(
                "the model uses enable_grad() inside no_grad(), which is not supported",
                where=line_of(node),
            )
        before, self._without_gradients = self._without_gradients, not enabled
        given = list(inputs) if enabled else self._detached(inputs)
        results = self._inline(module, dict(zip(_inputs(module), given, strict=True)))
        self._without_gradients = before
        return tuple(_written_input(result, given, inputs) for result in results)

    def _detached(self, inputs: Iterable[Any]) -> list[Any]:
        """The inputs of a region without gradients; `drop_needless_detaches` removes those that change nothing."""
        return [self._detach(item) if isinstance(item, fx.Node) and may_have_gradient(item) else item for item in inputs]

    def _detach(self, node: fx.Node) -> fx.Node:
        made = self._graph.call_function(aten.detach.default, (node,))
        made.meta = _kept(node) | {"val": node.meta["val"].detach()}
        return made

    def _autocast_region(
        self, node: fx.Node, kind: str, dtype: torch.dtype, enabled: bool, caches: bool, module: fx.GraphModule, *inputs: Any
    ) -> tuple[Any, ...]:
        if enabled and self._device not in (None, kind):
            text = f'torch.autocast("{kind}") has no effect: the model is trained on {self._device}'
            self._flat.warnings += [text] if text not in self._flat.warnings else []
        before = self._autocasts
        self._autocasts = {**before, kind: Autocast(kind, dtype if enabled else None)}
        results = self._inline(module, dict(zip(_inputs(module), inputs, strict=True)))
        self._autocasts = before
        if not before:
            self._cast_weights.clear()
        return results

    def _write_casts(self, node: fx.Node) -> None:
        """Writes out the casts of an op's operands under autocast; a parameter is cast once in a region, as torch caches it."""
        for autocast in self._autocasts.values():
            if autocast.dtype is None or self._device not in (None, autocast.kind):
                continue
            casts = (
                widening(node) if autocast.precision is not None and self._is_kept(node, autocast.precision) else casts_of(node, autocast)
            )
            if casts is None and write_as_parts(self._graph, node):
                casts = casts_of(node, autocast)
            if casts is None:
                casts = widened(node, autocast)
            if casts is None:
                raise CaptureError(
                    f"%{node.name} ({node.target}) under torch.autocast to {str(autocast.dtype).removeprefix('torch.')} casts values "
                    "inside the op, which is not supported",
                    where=line_of(node),
                    hint="call it under torch.autocast(..., enabled=False), with operands in the type that it should compute in",
                )
            for source, dtype in casts.operands.items():
                node.replace_input_with(source, self._cast(node, source, dtype))
            if casts.computed_in is not None:
                node.kwargs = {**node.kwargs, "dtype": casts.computed_in}

    def _is_kept(self, node: fx.Node, precision: Precision) -> bool:
        """Whether an op reads a parameter that the precision excludes, or a value made from such and other parameters alone."""
        if not precision.by_name:
            return False
        read = [self._kept_of.get(source) for source in node.all_input_nodes]
        keeps = any(read)
        if None not in read and read:
            self._kept_of[node] = keeps
        return keeps

    def _retype(self, node: fx.Node) -> None:
        """Updates the dtypes of results after casts: an export knows autocast on its own device type alone, and not for all ops."""
        if not self._autocasts and not self._retyped.intersection(node.all_input_nodes):
            return
        leaves, spec = pytree.tree_flatten(node.meta.get("val"))
        own = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        types = types_of(node) if own else ()
        if types is None or types == tuple(leaf.dtype for leaf in own):
            return
        found = iter(types)
        node.meta["val"] = pytree.tree_unflatten([leaf.to(next(found)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        self._retyped.add(node)

    def _cast(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        key = source, dtype
        if key in self._cast_weights:
            return self._cast_weights[key]
        with self._graph.inserting_before(node):
            made = self._graph.call_function(aten.to.dtype, (source, dtype))
        made.meta = _kept(node) | {"val": source.meta["val"].to(dtype)}
        if source.op == "placeholder" and source.meta["val"].requires_grad:
            self._cast_weights[key] = made
        return made


def _written_input(result: Any, given: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """The result of a region without gradients; for an input written in place (through its detached alias) the input, with its gradient."""
    source = result
    while isinstance(source, fx.Node) and written_arguments(source)[:1] == list(source.args[:1]) != []:
        source = source.args[0]
    return next((own for own, detached in zip(inputs, given, strict=True) if source is detached is not own), result)


def _check_type(node: fx.Node, dtype: torch.dtype, source: fx.Node) -> None:
    """Refuses a dtype read by the code that differs from the tensor's on the device type of the run."""
    found = source.meta["val"].dtype
    if found != dtype:
        named, own = (str(each).removeprefix("torch.") for each in (dtype, found))
        raise CaptureError(
            f"the model reads the type of a tensor under torch.autocast: %{source.name} is {named} on the device that the model was built "
            f"on, but {own} on the device type of the autocast",
            where=line_of(node),
            hint=f"name the type (torch.{own}), or build the model on that device type",
        )


def _kept(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _KEPT if key in node.meta}


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")
