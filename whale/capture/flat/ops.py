"""Describes the nodes of a flat graph as ops of the ModelGraph: arguments, specs, lines, FLOPs and tags, without torch.

FLOPs are those of forward and backward, at the example's sizes; a multiply-add is 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from whale.axes.operators import Operator, entry_of
from whale.axes.over_rows import roles_of_rows
from whale.axes.values import Role
from whale.capture.exporting.functions import region_of
from whale.capture.exporting.reads import held
from whale.capture.flat.aliasing import gradient_flow, may_have_gradient, viewed_arguments, written_arguments
from whale.capture.flat.flatten import Flat
from whale.capture.flat.sizes import hint_of, tensors_of
from whale.capture.scopes import DEFAULT_KEY, PATH_KEY, under_default
from whale.capture.source import line_of
from whale.capture.tagging import default_tags, effective_tags, parameter_tags
from whale.errors import CaptureError
from whale.ir.graph import REGION, Argument, Op, OpKind, Parameter, Ref, TensorSpec
from whale.ir.scope import Scope, ScopePath

_CALL_NUMBER = re.compile(r"@\d+")
_TEXT = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}


def describe(flat: Flat, model: nn.Module, default: Scope | None) -> tuple[Op, ...]:
    """The ops of a flat graph, in order, with the scopes as they were entered (`default`: for a model without a tag)."""
    flow = gradient_flow(flat.graph)
    tags = effective_tags(model)
    rest = () if default is None or tags else (default,)
    known = Tags(tags, default_tags(model), _scopes_of_parameters(flat, model), rest)
    return tuple(_op(node, flat, flow, known) for node in flat.graph.nodes if node.op != "output")


def with_scopes(parameters: Sequence[Parameter], ops: Sequence[Op], model: nn.Module) -> tuple[Parameter, ...]:
    """The parameters; those that no op reads get the scopes under which they were made."""
    read, own, of_modules = {op.target for op in ops if op.kind == "parameter"}, parameter_tags(model), effective_tags(model)

    def made_under(name: str) -> ScopePath:
        parts = name.split(".")[:-1]
        return own.get(name) or _innermost([".".join(parts[: depth + 1]) for depth in range(len(parts))], of_modules)

    return tuple(each if each.name in read else replace(each, scope=made_under(each.name)) for each in parameters)


@dataclass(frozen=True)
class Tags:
    """The scopes that the model's modules carry."""

    scopes: Mapping[str, ScopePath]  # per path of a tagged module, its scopes
    defaults: Mapping[str, ScopePath]  # per path of a module, the default strategy under which it was made, if any
    of_parameters: Mapping[fx.Node, ScopePath]  # per node that reads a parameter with scopes of its own, those
    rest: ScopePath  # the scopes of everything else


def _scopes_of_parameters(flat: Flat, model: nn.Module) -> dict[fx.Node, ScopePath]:
    """The scopes of ops that read a bare parameter made under them, directly or through ops on nothing else (a transpose)."""
    known = parameter_tags(model)
    first = {id(value): name for name, value in reversed(list(model.named_parameters(remove_duplicate=False)))}
    by_name = {first[id(model.get_parameter(name))]: path for name, path in known.items()}
    alone: dict[fx.Node, ScopePath] = {}
    found: dict[fx.Node, ScopePath] = {}
    for node in flat.graph.nodes if by_name else ():
        sources = node.all_input_nodes
        path = by_name.get(flat.sources.get(node.name, "")) or next((alone[source] for source in sources if source in alone), None)
        if path is not None:
            found[node] = path
            if all(source in alone for source in sources):
                alone[node] = path
    return found


def _op(node: fx.Node, flat: Flat, flow: Mapping[fx.Node, bool], tags: Tags) -> Op:
    outputs = _outputs(node, flat)
    if node.op == "placeholder":
        kind = cast(OpKind, flat.kinds[node.name])
        reads_rows = frozenset({"reads_rows"} if flat.sizes.reads_rows(node) else ())
        target = flat.sources.get(node.name, node.name)
        return Op(node.name, kind, target, outputs=outputs, tags=reads_rows, requires_grad=flow[node])
    modules = _modules(node)
    forward, backward = op_flops(node, flow)
    return Op(
        name=node.name,
        kind="call",
        target=target_name(node.target),
        args=tuple(argument(item) for item in node.args),
        kwargs=tuple((name, argument(item)) for name, item in node.kwargs.items()),
        outputs=outputs,
        scope=_scope(node, modules, tags),
        module=modules[-1] if modules else "",
        where=line_of(node),
        forward_flops=forward,
        backward_flops=backward,
        tags=_tags(node, flat),
        requires_grad=flow[node],
    )


def what_rows_meet(node: fx.Node, specs: Mapping[fx.Node, TensorSpec]) -> tuple[Role, ...]:
    """What an op does with each axis of rows, by its rule and the sizes of its tensors (`specs`, those that it reads and makes) alone."""
    sources = [Op(each.name, "input", each.name, outputs=(specs[each],) if each in specs else ()) for each in node.all_input_nodes]
    named = tuple((name, argument(item)) for name, item in node.kwargs.items())
    tags = frozenset({"pointwise"} if torch.Tag.pointwise in getattr(node.target, "tags", ()) else ())
    op = Op(node.name, "call", target_name(node.target), tuple(map(argument, node.args)), named, (specs[node],), tags=tags)
    return roles_of_rows(op, sources)


def target_name(target: Any) -> str:
    """``aten.linear.default``, ``operator.getitem``, ``torch.sym_max``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = str(getattr(target, "__module__", "")).lstrip("_")
    return f"{module.split('.')[0]}.{target.__name__}"


def argument(value: Any) -> Argument:
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(argument(item) for item in value)
    for kind, word in _TEXT.items():
        if isinstance(value, kind):
            return f"{word}:{str(value).removeprefix('torch.')}"
    if isinstance(value, complex):
        return f"complex:{value}"
    raise CaptureError(f"an op has an argument of type {type(value).__name__}, not a tensor or a constant")


def _outputs(node: fx.Node, flat: Flat) -> tuple[TensorSpec, ...]:
    return tuple(flat.sizes.spec(tensor, node, position) for position, tensor in enumerate(tensors_of(node)))


def _modules(node: fx.Node) -> list[str]:
    """Paths of the modules around a node, outermost first."""
    found = []
    for path, *_ in node.meta.get("nn_module_stack", {}).values():
        path = _CALL_NUMBER.sub("", path)
        if path.startswith("model."):
            found.append(path.removeprefix("model."))
    return found


def _scope(node: fx.Node, modules: list[str], tags: Tags) -> ScopePath:
    """The scope open in `forward`, else the innermost tagged module's; the default strategy's come last."""
    custom = node.meta.get("custom") or {}
    default: ScopePath = (custom[DEFAULT_KEY],) if DEFAULT_KEY in custom else ()
    if custom.get(PATH_KEY):
        opened = cast(ScopePath, custom[PATH_KEY])
        return under_default(opened, default or _innermost(modules, tags.defaults) or tags.rest)
    tag = tags.of_parameters.get(node) or _innermost(modules, tags.scopes)
    if default and (not tag or tag[-1].is_default):
        return default
    return tag or tags.rest


def _innermost(modules: list[str], found: Mapping[str, ScopePath]) -> ScopePath:
    return next((found[path] for path in reversed(["", *modules]) if path in found), ())


def _tags(node: fx.Node, flat: Flat) -> frozenset[str]:
    found = set()
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        found.add("pointwise")
    if written_arguments(node):
        found.add("in_place")
    elif viewed_arguments(node):
        found.add("view")
    if is_random(node):
        found.add("random")
    if (region := region_of(node)) is not None:
        found.add(f"{REGION}{region}")
    if flat.sizes.reads_rows(node):
        found.add("reads_rows")
    if node.target is held:
        found |= {"checks"} if node.args[2] else {"checks", "decides"}
    return frozenset(found)


def is_random(node: fx.Node) -> bool:
    """Whether this call draws random numbers: a dropout of probability 0, or outside training, does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = {item.name: item.default_value for item in schema if item.has_default_value()}
    values.update(zip((item.name for item in schema), node.args, strict=False))
    values.update(node.kwargs)
    probabilities = [values[name] for name in ("p", "dropout", "dropout_p") if isinstance(values.get(name), (int, float))]
    active = [values[name] for name in ("train", "training") if isinstance(values.get(name), bool)]
    return all(probability != 0 for probability in probabilities) and all(active)


aten = torch.ops.aten


def op_flops(node: Node, gradients: Mapping[Node, bool] | None = None) -> tuple[int, int]:
    """FLOPs of one call, forward and backward; symbolic sizes count at their hints, `gradients` None as one into each floating-point node.

    A matrix product costs its forward FLOPs again for each operand that gets a gradient; any other op costs one per element that it makes
    or reads, forward, and one per element and operand with a gradient, backward. Views, integers and ops without a tensor result are free.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or _is_view(node.target):
        return 0, 0
    operands = [source for source in node.all_input_nodes if may_have_gradient(source) and (gradients is None or gradients[source])]
    gets_gradient = may_have_gradient(node) and (gradients is None or gradients[node])
    entry = entry_of(str(node.target))
    product = _product_flops(node, entry)
    if product is not None:
        places = (node.args[place] for place in entry.factors if place < len(node.args))
        factors = {item for place in places for item in (place if isinstance(place, (list, tuple)) else (place,)) if isinstance(item, Node)}
        backward = product * sum(operand in factors for operand in operands)
        return product, backward if gets_gradient else 0
    read = (node,) if entry.looks_up else (node, *node.all_input_nodes)
    elements = max(sum(math.prod(shape) for shape in _shapes_of(each)) for each in read)
    return elements, elements * len(operands) if gets_gradient else 0


def _product_flops(node: Node, entry: Operator) -> int | None:
    """FLOPs of a matrix product, convolution, attention or recurrence; None for anything else."""
    args, results = [_as_shapes(argument) for argument in node.args], _shapes_of(node)
    if entry.flops is not None:
        return entry.flops(args, results)
    registered = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if registered is None:
        return None
    named = {name: _as_shapes(argument) for name, argument in node.kwargs.items()}
    return int(registered(*args, **named, out_val=results[0] if len(results) == 1 else results))


def _as_shapes(argument: Any) -> Any:
    """An argument with tensors replaced by their shapes, and sizes by their hints."""
    if isinstance(argument, (list, tuple)):
        return [_as_shapes(item) for item in argument]
    if not isinstance(argument, Node):
        return argument
    shapes = _shapes_of(argument)
    return shapes[0] if shapes else hint_of(argument.meta.get("val"))


def _shapes_of(node: Node) -> list[torch.Size]:
    return [torch.Size(map(hint_of, tensor.shape)) for tensor in tensors_of(node)]


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    if not returns:
        return True
    alias = returns[0].alias_info
    return (alias is not None and not alias.is_write) or target.overloadpacket in (aten.reshape, aten.to, aten.contiguous)
