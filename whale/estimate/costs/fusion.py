"""Which ops a compiler puts into one kernel, and what their backward passes keep then.

    linear -> to.float -> pow, mul, add, tanh, mul -> to.half -> linear         (GELU by its formula)
    eager       7 kernels, each reads and writes memory; what each keeps: 5 tensors in float32, one in half precision
    compiled    1 kernel, reads the first product and writes what the second one reads; these two are kept

An op is *fusible* if it is pointwise, a normalisation, a softmax, a reduction or a loss. Fusible ops over equally many elements are one
kernel where one reads another, unless a third op stands between them. A tensor that only fusible ops keep is not kept if they can
compute it again from what is kept anyway, or from less (the rule of torch's partitioner: what a product keeps is never computed again).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from whale.axes.operators import FAMILIES, is_pointwise, operator_of
from whale.estimate.costs.line import Line
from whale.estimate.costs.op_table import Kernels, is_free
from whale.ir.graph import ModelGraph, Op

_REDUCING, _NORMALISING = (
    frozenset(name for family in families for names in FAMILIES[family] for name in names.split())
    for families in (("Losses", "Reductions"), ("Normalisations",))
)
_FUSIBLE = _REDUCING | _NORMALISING


def is_fusible(op: Op) -> bool:
    """Whether a compiler makes the op a part of a kernel. What draws from a generator is none (`whale.runtime.program.compiled`)."""
    if is_free(op) or ("random" in op.tags and not operator_of(op).by_place):
        return False
    return is_pointwise(op) or op.operator in _FUSIBLE


def fused(graph: ModelGraph) -> Kernels:
    """The kernels of a compiled graph."""
    number, depth, members = dict[str, int](), dict[str, int](), dict[int, list[str]]()
    for op in graph.ops:
        if is_free(op):
            continue
        sources = _sources(graph, op)
        near = [source for source in sources if _are_one(graph.by_name[source], op, graph)]
        # kernels on the longest way to the op: a kernel has ops of one depth, so none waits for itself
        depth[op.name] = max((depth[source] + (source not in near) for source in sources), default=0)
        joined = sorted({number[source] for source in near if depth[source] == depth[op.name]}) or [len(depth)]
        for other in joined[1:]:
            members[joined[0]] += members.pop(other)
        members.setdefault(joined[0], []).append(op.name)
        number |= dict.fromkeys(members[joined[0]], joined[0])
    return _kernels(graph, number)


def _sources(graph: ModelGraph, op: Op) -> tuple[str, ...]:
    """The ops whose results an op reads, itself or views of them; no inputs or parameters."""
    found = dict.fromkeys(_made_by(graph, name) for name in op.inputs)
    return tuple(name for name in found if not is_free(graph.by_name[name]))


def _made_by(graph: ModelGraph, name: str) -> str:
    op = graph.by_name[name]
    while op.kind == "call" and is_free(op) and op.inputs:
        op = graph.by_name[op.inputs[0]]
    return op.name


def _are_one(source: Op, op: Op, graph: ModelGraph) -> bool:
    """Whether an op and one that it reads may be in one kernel."""
    return is_fusible(source) and is_fusible(op) and source.operator not in _REDUCING and _size(source) == _size(op, graph)


def _size(op: Op, graph: ModelGraph | None = None) -> tuple[int, bool]:
    """Elements that an op runs over, of a reduction those that it reads, at the example's rows; and whether they grow with the rows."""
    specs = [op.outputs[0]]
    if graph is not None and op.operator in _REDUCING:
        specs += [spec for name in op.inputs for spec in graph.by_name[name].outputs[:1]]
    most = max(specs, key=lambda spec: spec.num_elements)
    return most.num_elements, most.has_rows


def _kernels(graph: ModelGraph, number: Mapping[str, int]) -> Kernels:
    reads, starts, left = dict[str, tuple[str, ...]](), dict[int, str](), set[str]()
    read, seen = set[str](), dict[int, set[str]]()
    for op in (graph.by_name[name] for name in graph.position if name in number):
        own = number[op.name]
        starts.setdefault(own, op.name)
        sources = _sources(graph, op)
        read.update(sources)
        left.update(source for source in sources if number[source] != own)
        outside = [name for name in op.inputs if number.get(_made_by(graph, name)) != own]
        known = seen.setdefault(own, set())
        reads[op.name] = tuple(name for name in outside if name not in known)
        known.update(outside)
    return Kernels(number, frozenset(left | (number.keys() - read)), reads, frozenset(starts.values()))


def kept_by_kernels(graph: ModelGraph, sizes: Mapping[str, Line], kept: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Per op, what it keeps for backward in a compiled graph.

    Args:
        sizes: bytes of each op's results.
        kept: what it keeps in an eager one (`whale.estimate.memory.memory.kept_tensors`).
    """
    keepers: dict[str, list[Op]] = {}
    for keeper, names in kept.items():
        for name in names:
            keepers.setdefault(name, []).append(graph.by_name[keeper])
    stays = {name for name, ops in keepers.items() if not is_fusible(graph.by_name[name]) or not all(map(is_fusible, ops))}
    again, kernel = dict[str, frozenset[str]](), fused(graph).of  # of what is computed again, from which kept tensors
    for op in graph.ops:
        if op.name in stays or not is_fusible(op) or graph.storage[op.name] != op.name:
            continue
        sources = dict.fromkeys(graph.storage[name] for name in op.inputs)
        calls = [name for name in sources if graph.by_name[name].kind == "call" and graph.by_name[name].outputs]
        lacking = [name for name in calls if name not in stays and not (name in again and kernel[name] == kernel[op.name])]
        if lacking and (op.name not in keepers or _bytes(sizes, lacking, graph) >= _bytes(sizes, [op.name], graph)):
            if op.name in keepers:
                stays.add(op.name)
            continue
        stays.update(lacking)  # what another kernel reads is not computed again for it, or residuals would be from the first layer on
        for name in lacking:
            again.pop(name, None)
        again[op.name] = frozenset().union(*(again.get(name, {name}) for name in calls))

    def roots(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            yield from sorted(again[name], key=graph.position.__getitem__) if name in again else (name,)

    return {keeper: tuple(dict.fromkeys(roots(names))) for keeper, names in kept.items()}


def _bytes(sizes: Mapping[str, Line], names: Iterable[str], graph: ModelGraph) -> float:
    return Line.sum(sizes[name] for name in names).at(graph.num_rows)
