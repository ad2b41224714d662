"""The user's scopes as a tree: what encloses what, how many devices each asks for, and which share theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from whale.errors import AnnotationError
from whale.ir.graph import ModelGraph
from whale.ir.scope import Scope, ScopePath


@dataclass
class ScopeNode:
    """A scope with the scopes inside it, in order of first appearance; a leaf is one TaskGraph.

    `number` counts nodes in the order of their first op.
    """

    scope: Scope
    number: int
    inner: dict[str, ScopeNode] = field(default_factory=dict)

    @property
    def leaves(self) -> Iterator[ScopeNode]:
        """The TaskGraphs under this node."""
        if not self.inner:
            yield self
        for node in self.inner.values():
            yield from node.leaves

    @property
    def states_count(self) -> bool:
        """Whether a device count is written on it or on any scope inside."""
        return self.scope.device_count is not None or any(node.states_count for node in self.inner.values())


def effective_path(path: ScopePath) -> ScopePath:
    """The scopes that speak of an op: a default strategy counts only where no other scope does."""
    chosen = tuple(scope for scope in path if not scope.is_default)
    return chosen or path[-1:]


def scope_tree(graph: ModelGraph) -> tuple[dict[str, ScopeNode], list[AnnotationError]]:
    """The outermost scopes by key, in order of first appearance, and what is wrong with them."""
    roots: dict[str, ScopeNode] = {}
    parents: dict[str, tuple[str, ...]] = {}
    faults: dict[str, AnnotationError] = {}
    number = 0
    for path in dict.fromkeys(effective_path(op.scope) for op in graph.ops if op.kind == "call" and op.scope):
        level: dict[str, ScopeNode] = roots
        above: tuple[str, ...] = ()
        for scope in path:
            node = level.setdefault(scope.key, ScopeNode(scope, number))
            number += 1
            faults.update((str(fault), fault) for fault in _faults(scope, node.scope))
            if scope.name is not None and parents.setdefault(scope.key, above) != above:
                fault = AnnotationError(
                    f"scopes of one name are one TaskGraph and stand in the same scope (name {scope.name!r} stands in several)",
                    where=scope.where,
                )
                faults[str(fault)] = fault
            level, above = node.inner, (*above, scope.key)
    return roots, list(faults.values())


def _faults(scope: Scope, first: Scope) -> Iterable[AnnotationError]:
    if scope.kind == "split":
        yield AnnotationError(f"split is not there yet ({scope})", where=scope.where, hint="use replicate")
    asked = [(each.kind, each.device_count, each.axis) for each in (scope, first)]
    if asked[0] != asked[1]:
        yield AnnotationError(f"scopes of one name are one TaskGraph: {scope} and {first} (at {first.where})", where=scope.where)


@dataclass(frozen=True)
class Copies:
    """Copies of the pipeline inside a scope; the outermost one is a whole model replica.

    Attributes:
        count: how many; they divide the rows among them.
        members: stages, or further copies.
    """

    count: int
    members: tuple[int | Copies, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """All stages inside."""
        return tuple(stage for member in self.members for stage in ((member,) if isinstance(member, int) else member.stages))


@dataclass(frozen=True)
class Sizes:
    """Devices of every stage.

    Attributes:
        stage_of: per TaskGraph (the number of its node), its stage.
        devices: per stage, devices of its virtual device.
        copies: the nesting.
    """

    stage_of: Mapping[int, int]
    devices: tuple[int, ...]
    copies: Copies


def resolve_sizes(roots: Mapping[str, ScopeNode], num_devices: int, *, colocate: bool) -> Sizes:
    """How many devices each TaskGraph gets, by the rules for scopes.

    None means all devices of the enclosing scope, together with its siblings, if none of these states a count, and
    else 1. TaskGraphs are colocated in one stage if `colocate` says so, or if each asks for all devices there are.

    Args:
        num_devices: devices of the cluster.
    """
    nodes = list(roots.values())
    stated = any(node.states_count for node in nodes)
    all_leaves = not any(node.inner for node in nodes)
    if colocate or (all_leaves and all(_leaf_count(node, num_devices, stated) == num_devices for node in nodes)):
        size = max(_widest(node, num_devices, stated) for node in nodes)
        return Sizes({leaf.number: 0 for node in nodes for leaf in node.leaves}, (size,), Copies(1, (0,)))
    devices: list[int] = []
    stage_of: dict[int, int] = {}
    copies = Copies(1, _level(nodes, num_devices, 1, stage_of, devices))
    return _in_order_of_appearance(stage_of, devices, copies)


def _in_order_of_appearance(stage_of: Mapping[int, int], devices: Sequence[int], copies: Copies) -> Sizes:
    """Renumbers the stages by their first op; the walk over the tree met them scope by scope."""
    order = list(dict.fromkeys(stage_of[number] for number in sorted(stage_of)))
    new = {old: index for index, old in enumerate(order)}

    def renumber(node: Copies) -> Copies:
        return Copies(node.count, tuple(new[member] if isinstance(member, int) else renumber(member) for member in node.members))

    return Sizes({leaf: new[stage] for leaf, stage in stage_of.items()}, tuple(devices[old] for old in order), renumber(copies))


def _leaf_count(node: ScopeNode, budget: int, stated: bool) -> int:
    if node.scope.device_count is not None:
        return node.scope.device_count
    return 1 if stated else max(budget, 1)


def _widest(node: ScopeNode, budget: int, stated: bool) -> int:
    """Devices of the widest TaskGraph under a node, its copies counted."""
    if not node.inner:
        return _leaf_count(node, budget, stated)
    copies = node.scope.device_count or 1
    inner_stated = any(inner.states_count for inner in node.inner.values())
    return copies * max(_widest(inner, budget // copies, inner_stated) for inner in node.inner.values())


def _level(nodes: Sequence[ScopeNode], budget: int, outer: int, stage_of: dict[int, int], devices: list[int]) -> tuple[int | Copies, ...]:
    """Gives stages to the nodes of one level; `outer` copies enclose it."""
    stated = any(node.states_count for node in nodes)
    if len(nodes) > 1 and not stated and not any(node.inner for node in nodes):  # each asks for all: one stage
        stage_of.update((node.number, len(devices)) for node in nodes)
        devices.append(outer * max(budget, 1))
        return (len(devices) - 1,)
    members: list[int | Copies] = []
    for node in nodes:
        if node.inner:
            count = node.scope.device_count or 1
            members.append(Copies(count, _level(list(node.inner.values()), budget // count, outer * count, stage_of, devices)))
        else:
            stage_of[node.number] = len(devices)
            devices.append(outer * _leaf_count(node, budget, stated))
            members.append(len(devices) - 1)
    return tuple(members)
