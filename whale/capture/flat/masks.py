"""Masks of attention that are known without a batch, in the form that kernels want. Libraries write them out only where they are traced.

    mask = arange(T)[:, None] >= arange(T)      is_causal=True
    mask = ones(T, T), or zeros that are added  no mask
    mask = where(ones, bias, -inf)              bias
    mask = where(causal.expand(rows, ...), bias, -inf)     where(causal, bias, -inf): the kernel repeats it over the rows
    k.expand(b, heads, n, T, d), likewise v     k, v, enable_gqa=True, where a mask has gone: kernels with a mask take no groups

What is not read any more becomes dead code.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from whale.axes.operators import Operator, entry_of_call
from whale.axes.outcome import BROADCAST, NUMBERS
from whale.capture.flat.aliasing import ancestors, memory_roots, takes_shape, viewed_arguments, written_arguments
from whale.capture.flat.ops import what_rows_meet
from whale.capture.flat.sizes import RowSizes, hint_of
from whale.ir.graph import NUM_ROWS, TensorSpec

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
_KEY, _VALUE, _MASK, _DROPOUT, _IS_CAUSAL = 1, 2, 3, 4, 5
_LARGEST_HEAD = 256
"""Largest head of the kernels that take groups of heads."""
_LARGEST = 1 << 26
"""Elements of a mask that is examined."""

_RESHAPES = (aten.view, aten.reshape)
_WHERE = frozenset((aten.where.self, aten.where.ScalarOther))

Kind = Literal["size", "fixed", "rows", "count"]
"""What a value is made of, if it is known without a batch:

size       the number of rows, and numbers made from it
fixed      constants alone
rows       constants repeated along the rows: equal in each, whatever their number
count      0, 1, 2 ... over the rows, which may only pick rows
"""


def settle_masks(graph: fx.Graph, sizes: RowSizes) -> None:
    """Rewrites the masks of all attentions. Not for a graph of fixed rows, in which a length may be their number."""
    nodes = graph.find_nodes(op="call_function", target=_ATTENTION)
    known = _Known(graph, sizes) if nodes else None
    for node in nodes:
        mask, is_causal = (*node.args, None, 0.0, False)[_MASK], (*node.args[_IS_CAUSAL:], node.kwargs.get("is_causal", False))[0]
        if known is None or len(node.args) <= _MASK or not isinstance(mask, fx.Node) or is_causal or not _has_fixed_lengths(node):
            continue
        value = known.value(mask)
        is_neutral, is_lower = value is not None and _is_neutral(value), value is not None and _is_causal(value)
        if is_neutral or (is_lower and _is_square(node)):
            dropout = node.args[_DROPOUT] if len(node.args) > _DROPOUT else node.kwargs.get("dropout_p", 0.0)
            node.args = (*node.args[:_MASK], None, dropout, not is_neutral)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("dropout_p", "is_causal")}
            _group_heads(node, known)
        else:
            node.update_arg(_MASK, _without_rows(mask, known))


def _has_fixed_lengths(node: fx.Node) -> bool:
    lengths = [node.args[place].meta["val"].shape[-2] for place in (0, _KEY)]  # type: ignore[union-attr]
    return all(isinstance(length, int) for length in (*lengths, *node.args[_MASK].meta["val"].shape[-2:]))  # type: ignore[union-attr]


def _is_square(node: fx.Node) -> bool:
    lengths = [node.args[place].meta["val"].shape[-2] for place in (0, _KEY)]  # type: ignore[union-attr]
    return bool(lengths[0] == lengths[1])


def _is_neutral(value: Tensor) -> bool:
    """Whether a mask leaves all as it is."""
    return bool(value.all()) if value.dtype is torch.bool else value.is_floating_point() and not value.any()


def _is_causal(value: Tensor) -> bool:
    if value.dtype is not torch.bool or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return False
    causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    return bool((value.reshape(-1, *value.shape[-2:]) == causal).all())


class _Known:
    """The values in a graph that depend on no batch and no weights, and are the same for each row, for any number of rows."""

    def __init__(self, graph: fx.Graph, sizes: RowSizes) -> None:
        self._graph, self._sizes = graph, sizes
        self._roots = memory_roots(graph)
        self._written = {self._roots[written] for node in graph.nodes for written in written_arguments(node)}
        self._kinds = dict[fx.Node, Kind | None]()
        for node in graph.nodes:
            self._kinds[node] = self._kind(node)
        self._values = dict[fx.Node, Tensor | None]()

    def is_written(self, node: fx.Node) -> bool:
        """Whether an op writes the memory of a value, so that it matters when it is read."""
        return self._roots.get(node, node) in self._written

    def value(self, node: fx.Node) -> Tensor | None:
        """A known value, for the rows of the example."""
        if self._kinds.get(node) not in ("fixed", "rows"):
            return None
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Tensor | None:
        made_of, values = ancestors(node), dict[fx.Node, Any]()
        try:
            for each in self._graph.nodes:
                if each in made_of:
                    values[each] = self._sizes.rows if each.op == "placeholder" else _on_host(each, values)
        except Exception:  # what cannot be computed here is not known
            return None
        found: Tensor = values[node]
        return found

    def _kind(self, node: fx.Node) -> Kind | None:
        if node.op == "placeholder":
            return "size" if node.target == NUM_ROWS else None
        if node.op != "call_function":
            return None
        value, kinds = node.meta.get("val"), {source: self._kinds[source] for source in node.all_input_nodes}
        if not isinstance(value, Tensor):
            return "size" if isinstance(value, (int, torch.SymInt)) and set(kinds.values()) == {"size"} else None
        if None in kinds.values() or self.is_written(node) or _is_unknown(node):
            return None
        if set(kinds.values()) <= {"fixed"} and not _has_rows(node):
            return "fixed"
        return self._kind_over_rows(node, entry_of_call(str(node.target)), set(kinds.values()))

    def _kind_over_rows(self, node: fx.Node, entry: Operator, kinds: set[Kind | None]) -> Kind | None:
        """What an op makes of constants, of some along the rows, or for so many rows: by its rule."""
        if entry.looks_up and entry.indexed == "per dimension":
            return "rows" if self._picks_equal(node) else None
        read, is_moved = node.all_input_nodes, entry.rows in ("same", "moved") and not entry.looks_up
        if is_moved and "size" not in kinds and not _has_rows(node):  # of one of them
            return None if "count" in kinds else "rows"
        specs = {each: self._sizes.spec(value, each) for each in (node, *read) if isinstance(value := each.meta["val"], Tensor)}
        roles = set(what_rows_meet(node, specs))
        if roles == {NUMBERS}:
            return "count"
        if "size" in kinds and not self._takes_sizes(node, is_moved):
            return None
        is_regrouped = is_moved and BROADCAST not in roles and len({_factors_of_rows(specs[each]) for each in (node, read[0])}) > 1
        if is_regrouped or not all(role.kind == "kept" or role == BROADCAST for role in roles):
            return None
        return "rows" if "count" not in kinds else "count" if is_moved else None

    def _takes_sizes(self, node: fx.Node, is_moved: bool) -> bool:
        """Whether an op that reads the number of rows does so for the shape of its result alone."""
        is_view = is_moved and (bool(viewed_arguments(node)) or _calls(node, _RESHAPES))
        given = (self._kinds[each] for each in (*node.args, *node.kwargs.values()) if isinstance(each, fx.Node))
        return "size" not in given and (is_view or takes_shape(node))

    def _picks_equal(self, node: fx.Node) -> bool:
        """Whether an index by rows picks among rows, which are equal."""
        source, indices = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(indices, (list, tuple))
        by_rows = [place for place, index in enumerate(indices) if isinstance(index, fx.Node) and self._kinds[index] == "count"]
        sizes = source.meta["val"].shape
        return self._kinds[source] != "count" and all(not isinstance(sizes[place], int) for place in by_rows)


def _has_rows(node: fx.Node) -> bool:
    return any(not isinstance(size, int) for size in node.meta["val"].shape)


def _factors_of_rows(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(sorted(filter(None, spec.row_factors)))


def _calls(node: Any, packets: Collection[Any]) -> bool:
    return isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in packets


def _are_same(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for any number of rows; asks no guard."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is type(other) and bool(one == other)


def _is_unknown(node: fx.Node) -> bool:
    """Whether an op draws random numbers, writes, is no op of torch's, or makes too large a tensor."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return True
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return bool(hint_of(node.meta["val"].numel()) > _LARGEST)


def _on_host(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _without_rows(mask: fx.Node, known: _Known) -> fx.Node:
    """A mask that adds a bias where a condition holds: the bias alone where it always holds, and not made for each row again."""
    if mask.target is aten.contiguous.default and len(mask.args) == 1 and not mask.kwargs:
        source = mask.args[0]
        assert isinstance(source, fx.Node)
        inner = _without_rows(source, known)
        return mask if inner is source else _call(mask, aten.contiguous.default, inner)
    if _is_cast(mask):
        source = mask.args[0]
        assert isinstance(source, fx.Node)
        inner = _without_rows(source, known)
        return mask if inner is source else _call(mask, aten.to.dtype, inner, mask.args[1])
    if mask.target not in _WHERE or known.is_written(mask):
        return mask
    condition, bias = mask.args[:2]
    if not isinstance(bias, fx.Node) or not isinstance(condition, fx.Node) or bias.meta["val"].dtype != mask.meta["val"].dtype:
        return mask
    holds = known.value(condition)
    if holds is not None and bool(holds.all()) and bias.meta["val"].dim() >= 2 and not known.is_written(bias):
        return bias
    operands = [_of_all_rows(operand, known) if isinstance(operand, fx.Node) else operand for operand in mask.args]
    if operands == list(mask.args) or any(isinstance(operand, fx.Node) and _has_rows(operand) for operand in operands):
        return mask
    return _call(mask, mask.target, *operands)


def _of_all_rows(operand: fx.Node, known: _Known) -> fx.Node:
    """What is expanded over the rows, before it is."""
    source = operand.args[0] if operand.target is aten.expand.default else None
    if not isinstance(source, fx.Node) or _has_rows(source) or known.is_written(source):
        return operand
    after = operand.meta["val"].shape
    before = (*(1,) * (len(after) - source.meta["val"].dim()), *source.meta["val"].shape)
    changed = [size for size, old in zip(after, before, strict=True) if not _are_same(size, old)]
    return source if all(not isinstance(size, int) for size in changed) else operand


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """An op in the place of another."""
    with like.graph.inserting_after(like):
        made = like.graph.call_function(target, args)
    values = map_arg(args, lambda source: source.meta["val"])
    made.meta = {**like.meta, "val": target(*values)}
    return made


def _group_heads(node: fx.Node, known: _Known) -> None:
    """Takes back the repetition of key and value heads of an attention."""
    heads = [_before_repetition(node.args[place], known) for place in (_KEY, _VALUE)]
    if any(each is None for each in heads) or node.kwargs.get("enable_gqa"):
        return
    key, value = (each.meta["val"].shape for each in heads if each is not None)
    if key[1] == value[1] and key[-1] == value[-1] <= _LARGEST_HEAD:
        node.args = (node.args[0], *heads, *node.args[_MASK:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}


def _is_cast(node: fx.Node) -> bool:
    """Whether an op is a cast as autocast makes it."""
    return node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs


def _before_repetition(heads: Any, known: _Known) -> fx.Node | None:
    """``k`` of ``k[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)``, cast where that is."""
    if isinstance(heads, fx.Node) and _is_cast(heads):
        source = _before_repetition(heads.args[0], known)
        return None if source is None else _call(heads, aten.to.dtype, source, heads.args[1])
    chain = [heads]
    for packets in (_RESHAPES, (aten.expand,), (aten.unsqueeze,)):
        last = chain[-1]
        if not _calls(last, packets) or known.is_written(last):
            return None
        chain.append(last.args[0])
    result, expanded, source = (chain[place].meta["val"].shape for place in (0, 1, 3))
    if len(result) != 4 or len(expanded) != 5 or len(source) != 4 or chain[2].args[1] not in (2, -3):
        return None
    rest = all(_are_same(one, other) for one, other in zip((*expanded[:2], *expanded[3:]), source, strict=True))
    merged = all(_are_same(one, other) for one, other in zip((result[0], *result[2:]), (source[0], *source[2:]), strict=True))
    numbers = expanded[1], expanded[2], result[1]
    is_repeated = all(isinstance(number, int) for number in numbers) and numbers[0] * numbers[1] == numbers[2]
    found: fx.Node = chain[3]
    return found if rest and merged and is_repeated and numbers[1] > 1 else None
