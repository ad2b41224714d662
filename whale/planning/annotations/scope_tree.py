"""The user's scopes as a tree: what encloses what, how many devices each asks for, and which share theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from whale.errors import AnnotationError
from whale.ir.graph import ModelGraph
from whale.ir.scope import Scope, ScopePath


@dataclass
class ScopeNode:
    """A scope with the scopes inside it, in order of first appearance; a leaf is one TaskGraph.

    `number` counts nodes in the order of their first op. `default` is the key of the default strategy under which a split
    stands.
    """

    scope: Scope
    number: int
    inner: dict[str, ScopeNode] = field(default_factory=dict)
    default: str | None = None

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
    for full in dict.fromkeys(op.scope for op in graph.ops if op.kind == "call" and op.scope):
        path = effective_path(full)
        level: dict[str, ScopeNode] = roots
        above: tuple[str, ...] = ()
        for outer, inner in pairwise(path):
            if outer.kind == "split":
                fault = AnnotationError(
                    f"only replicate encloses other scopes ({outer} at {outer.where} encloses {inner})",
                    where=inner.where,
                    hint="end the split before, or put replicate around it",
                )
                faults[str(fault)] = fault
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
        if len(path) == 1 and path[0].kind == "split" and full[0].is_default and full[0] is not path[0]:
            roots[path[0].key].default = full[0].key
    return roots, list(faults.values())


def _faults(scope: Scope, first: Scope) -> Iterable[AnnotationError]:
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
    """Devices of every virtual device.

    Attributes:
        place_of: per TaskGraph (the number of its node), its virtual device.
        devices: per virtual device, how many.
        copies: the nesting of virtual devices.
        widths: per TaskGraph that is a split, devices of its split group.
    """

    place_of: Mapping[int, int]
    devices: tuple[int, ...]
    copies: Copies
    widths: Mapping[int, int]


def resolve_sizes(roots: Mapping[str, ScopeNode], num_devices: int, *, colocate: bool) -> Sizes:
    """How many devices each TaskGraph gets, by the rules for scopes.

    None means all devices of the enclosing scope, together with its siblings, if none of these states a count, and
    else 1. TaskGraphs are colocated on one virtual device if `colocate` says so, if each asks for all devices there are, or
    if they are a default strategy and the splits under it.

    Args:
        num_devices: devices of the cluster.

    Raises:
        AnnotationError: a split does not divide the devices that it is colocated on.
    """
    hosted = {key: node for key, node in roots.items() if node.default in roots}
    if hosted and not colocate:
        return _with_hosted(roots, hosted, num_devices)
    nodes = list(roots.values())
    stated = any(node.states_count for node in nodes)
    all_leaves = not any(node.inner for node in nodes)
    if colocate or (all_leaves and all(_leaf_count(node, num_devices, stated) == num_devices for node in nodes)):
        size = max(_widest(node, num_devices, stated) for node in nodes)
        leaves = [leaf for node in nodes for leaf in node.leaves]
        widths = {leaf.number: _divisor(leaf, size) for leaf in leaves if leaf.scope.kind == "split"}
        return Sizes({leaf.number: 0 for leaf in leaves}, (size,), Copies(1, (0,)), widths)
    walk = _Walk()
    copies = Copies(1, walk.level(nodes, num_devices, 1))
    return _in_order_of_appearance(walk, copies)


def _with_hosted(roots: Mapping[str, ScopeNode], hosted: Mapping[str, ScopeNode], num_devices: int) -> Sizes:
    """Sizes where splits stand under a default strategy: they run on its devices.

    A default strategy without a count has as many as the widest split under it asks for.
    """
    others = {key: node for key, node in roots.items() if key not in hosted}
    asked: dict[str, int] = {}
    for node in hosted.values():
        assert node.default is not None
        asked[node.default] = max(asked.get(node.default, 0), node.scope.device_count or 0)
    sized = {
        key: replace(node, scope=replace(node.scope, device_count=node.scope.device_count or asked.get(key) or None))
        for key, node in others.items()
    }
    sizes = resolve_sizes(sized, num_devices, colocate=False)
    place_of, widths = dict(sizes.place_of), dict(sizes.widths)
    for node in hosted.values():
        assert node.default is not None
        place_of[node.number] = place_of[roots[node.default].number]
        widths[node.number] = _divisor(node, sizes.devices[place_of[node.number]])
    return Sizes(place_of, sizes.devices, sizes.copies, widths)


def _divisor(leaf: ScopeNode, size: int) -> int:
    """The devices of a split group on a virtual device of `size` devices."""
    width = leaf.scope.device_count or size
    if size % width:
        raise AnnotationError(
            f"a split divides the devices that it is colocated on into equal groups ({leaf.scope}: {width} of {size} devices)",
            where=leaf.scope.where,
            hint="a count that divides them, or devices of its own",
        )
    return width


def _in_order_of_appearance(walk: _Walk, copies: Copies) -> Sizes:
    """Renumbers the virtual devices by their first op; the walk over the tree met them scope by scope."""
    stage_of, devices = walk.place_of, walk.devices
    order = list(dict.fromkeys(stage_of[number] for number in sorted(stage_of)))
    new = {old: index for index, old in enumerate(order)}

    def renumber(node: Copies) -> Copies:
        return Copies(node.count, tuple(new[member] if isinstance(member, int) else renumber(member) for member in node.members))

    places = {leaf: new[stage] for leaf, stage in stage_of.items()}
    return Sizes(places, tuple(devices[old] for old in order), renumber(copies), walk.widths)


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


@dataclass
class _Walk:
    """The virtual devices met so far on a walk over the tree, one per leaf or per set of leaves that share."""

    place_of: dict[int, int] = field(default_factory=dict)
    devices: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)

    def level(self, nodes: Sequence[ScopeNode], budget: int, outer: int) -> tuple[int | Copies, ...]:
        """Gives places to the nodes of one level; `outer` copies enclose it."""
        stated = any(node.states_count for node in nodes)
        if len(nodes) > 1 and not stated and not any(node.inner for node in nodes):  # each asks for all: one place
            for node in nodes:
                self._put(node, max(budget, 1))
            self.devices.append(outer * max(budget, 1))
            return (len(self.devices) - 1,)
        members: list[int | Copies] = []
        for node in nodes:
            if node.inner:
                count = node.scope.device_count or 1
                members.append(Copies(count, self.level(list(node.inner.values()), budget // count, outer * count)))
            else:
                width = _leaf_count(node, budget, stated)
                self._put(node, width)
                self.devices.append(outer * width)
                members.append(len(self.devices) - 1)
        return tuple(members)

    def _put(self, node: ScopeNode, width: int) -> None:
        self.place_of[node.number] = len(self.devices)
        if node.scope.kind == "split":
            self.widths[node.number] = width
