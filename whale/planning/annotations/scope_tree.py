"""The user's scopes as a tree: nesting, device counts, and which scopes share devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from whale.errors import AnnotationError
from whale.ir.graph import ModelGraph, Op
from whale.ir.scope import Scope, ScopePath
from whale.units import counted


@dataclass
class ScopeNode:
    """A scope with the scopes inside it.

    `inner` scopes have their own devices, and this one makes copies of them; `hosted` ones run on its devices (all inside a scope that also
    has layers; under a default strategy the splits).
    """

    scope: Scope  # as first entered
    number: int  # order of nodes by their first op
    inner: dict[str, ScopeNode] = field(default_factory=dict)
    hosted: list[ScopeNode] = field(default_factory=list)

    @property
    def leaves(self) -> Iterator[ScopeNode]:
        """The TaskGraphs under this node."""
        if not self.inner:
            yield self
        for node in (*self.hosted, *self.inner.values()):
            yield from node.leaves

    @property
    def count(self) -> int | None:
        """Devices that it asks for: its own count, else the largest of the scopes on its devices.

        A default strategy is copied onto the devices of a split that asks for more.
        """
        own, asked = self.scope.device_count, [leaf.count for leaf in self.hosted if leaf.count is not None]
        if not asked or (own is not None and not self.scope.is_default):
            return own
        return max(asked) if own is None else max(own, *asked)

    @property
    def states_count(self) -> bool:
        """Whether it, or any scope inside, states a device count."""
        return self.count is not None or any(node.states_count for node in self.inner.values())


@dataclass(frozen=True)
class ScopeTree:
    """The scopes of a model."""

    roots: tuple[ScopeNode, ...]  # outermost scopes that run on no other's devices, in order of first appearance
    by_path: Mapping[tuple[str, ...], ScopeNode]  # every scope, by the keys of its path

    def task_graph_of(self, op: Op) -> ScopeNode | None:
        """The TaskGraph of an op; None for one without scope, between scopes, or no call."""
        if op.kind != "call" or not op.scope:
            return None
        node = self.by_path[_keys(effective_path(op.scope))]
        return None if node.inner else node


def effective_path(path: ScopePath) -> ScopePath:
    """The scopes that apply to an op: a default strategy only where there is no other."""
    chosen = tuple(scope for scope in path if not scope.is_default)
    return chosen or path[-1:]


def _keys(path: ScopePath) -> tuple[str, ...]:
    return tuple(scope.key for scope in path)


def scope_tree(graph: ModelGraph) -> tuple[ScopeTree, list[AnnotationError]]:
    """The scopes as a tree, and its faults."""
    by_path: dict[tuple[str, ...], ScopeNode] = {}
    parents: dict[str, tuple[str, ...]] = {}
    faults: list[AnnotationError] = []
    number = 0
    defaults: dict[tuple[str, ...], str] = {}
    for full in dict.fromkeys(op.scope for op in graph.ops if op.kind == "call" and op.scope):
        path = effective_path(full)
        faults += _split_faults(path)
        for depth, scope in enumerate(path, start=1):
            keys = _keys(path[:depth])
            if keys not in by_path:
                by_path[keys] = ScopeNode(scope, number)
                if depth > 1:
                    by_path[keys[:-1]].inner[scope.key] = by_path[keys]
            number += 1
            faults += _name_faults(scope, by_path[keys].scope)
            if scope.name is not None and parents.setdefault(scope.key, keys[:-1]) != keys[:-1]:
                faults.append(
                    AnnotationError(
                        f"scopes named {scope.name!r} are in different outer scopes; scopes of one name are one TaskGraph",
                        where=scope.where,
                    )
                )
        if len(path) == 1 and path[0].kind == "split" and full[0].is_default and full[0] is not path[0]:
            defaults[_keys(path)] = full[0].key
    faults += _host_beside_layers(graph, by_path)
    hosted = {keys: default for keys, default in defaults.items() if (default,) in by_path}
    for keys, default in hosted.items():
        by_path[default,].hosted.append(by_path[keys])
    roots = tuple(node for keys, node in by_path.items() if len(keys) == 1 and keys not in hosted)
    return ScopeTree(roots, by_path), faults


def _split_faults(path: ScopePath) -> Iterator[AnnotationError]:
    for outer, inner in pairwise(path):
        if outer.kind == "split":
            yield AnnotationError(
                f"{outer} at {outer.where} encloses {inner}; only replicate may enclose other scopes",
                where=inner.where,
                hint="end the split before, or put replicate around it",
            )


def _name_faults(scope: Scope, first: Scope) -> Iterator[AnnotationError]:
    asked = [(each.kind, each.device_count, each.axis) for each in (scope, first)]
    if asked[0] != asked[1]:
        yield AnnotationError(
            f"{scope} and {first} (at {first.where}) have one name, but differ; scopes of one name are one TaskGraph", where=scope.where
        )


def _host_beside_layers(graph: ModelGraph, by_path: Mapping[tuple[str, ...], ScopeNode]) -> Iterator[AnnotationError]:
    """In a scope with both layers and inner scopes all run on its devices; yields counts that contradict that.

        with replicate(2): a; with split(2): b; c        a and c are copied, b is split, on the same two devices

    Ops without parameters (a residual between two scopes) join their neighbours and do not count as layers.
    """
    layers: dict[tuple[str, ...], Op] = {}
    for op in graph.ops:
        if op.kind == "call" and op.scope and any(graph.by_name[source].kind == "parameter" for source in op.inputs):
            layers.setdefault(_keys(effective_path(op.scope)), op)
    for keys in sorted(by_path, key=len, reverse=True):
        node = by_path[keys]
        if not node.inner or keys not in layers:
            continue
        inside = [by_path[below] for below in by_path if len(below) > len(keys) and below[: len(keys)] == keys]
        stated = node.scope.device_count or next((each.scope.device_count for each in inside if each.scope.device_count), None)
        for each in inside:
            if each.scope.device_count not in (None, stated):
                yield _two_readings(node.scope, each.scope, layers[keys])
        node.hosted = [leaf for child in node.inner.values() for leaf in child.leaves]
        for leaf in node.hosted:
            leaf.hosted = []
        node.inner = {}


def _two_readings(outer: Scope, inner: Scope, layer: Op) -> AnnotationError:
    wide, narrow = outer.device_count, inner.device_count
    assert narrow is not None, "it says another count than the one that is stated"
    together = f"on the same devices, if both ask for as many ({inner.kind}({wide if wide else ''}))"
    copies = f"in {wide or 'several'} copies of {counted(narrow, 'device')}, if the other layers have a scope of their own"
    return AnnotationError(
        f"{inner} inside {outer} (from {outer.where}) is ambiguous: {outer} also has layers of its own ({layer.name} at {layer.where})",
        where=inner.where,
        hint=f"it runs {together}; or {copies}",
    )


@dataclass(frozen=True)
class Copies:
    """Copies of the pipeline inside a scope, which divide the rows (outermost: whole model replicas). Members are stages or `Copies`."""

    count: int
    members: tuple[int | Copies, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for member in self.members for stage in ((member,) if isinstance(member, int) else member.stages))


@dataclass(frozen=True)
class Sizes:
    """Devices of every virtual device."""

    place_of: Mapping[int, int]  # per TaskGraph (number of its node), its virtual device
    devices: tuple[int, ...]  # per virtual device, how many
    copies: Copies  # the nesting of virtual devices
    widths: Mapping[int, int]  # per split TaskGraph, devices of its split group


def resolve_sizes(nodes: Sequence[ScopeNode], num_devices: int, *, colocate: bool) -> Sizes:
    """Device counts of all TaskGraphs.

    A count of None means all devices of the enclosing scope, shared with its siblings, if none of these states a count, and
    else 1. TaskGraphs are colocated on one virtual device if `colocate` is set, if each asks for all devices, or if one hosts
    the others.

    Raises:
        AnnotationError: a split does not divide the devices that it is colocated on.
    """
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


def share_devices(sizes: Sizes, num_devices: int) -> Sizes:
    """Merges consecutive virtual devices where there are more than devices.

    Unchanged where a split divides one of them, where scopes nest, or where their device counts differ.
    """
    num_places, each = len(sizes.devices), sizes.devices[0]
    is_plain = sizes.copies == Copies(1, tuple(range(num_places))) and not sizes.widths and set(sizes.devices) == {each}
    num_left = num_devices // each
    if not is_plain or not 1 <= num_left < num_places:
        return sizes
    place_of = {leaf: place * num_left // num_places for leaf, place in sizes.place_of.items()}
    return Sizes(place_of, (each,) * num_left, Copies(1, tuple(range(num_left))), sizes.widths)


def _divisor(leaf: ScopeNode, size: int) -> int:
    """The width of a split group on a virtual device of `size` devices."""
    width = leaf.scope.device_count or size
    if size % width:
        raise AnnotationError(
            f"{leaf.scope} cannot divide the {size} devices that it is colocated on into groups of {width}",
            where=leaf.scope.where,
            hint=f"a count that divides them, devices of its own, or {width} devices for the scope that it runs in",
        )
    return width


def _in_order_of_appearance(walk: _Walk, copies: Copies) -> Sizes:
    """Renumbers the virtual devices by their first op."""
    stage_of, devices = walk.place_of, walk.devices
    order = list(dict.fromkeys(stage_of[number] for number in sorted(stage_of)))
    new = {old: index for index, old in enumerate(order)}

    def renumber(node: Copies) -> Copies:
        return Copies(node.count, tuple(new[member] if isinstance(member, int) else renumber(member) for member in node.members))

    places = {leaf: new[stage] for leaf, stage in stage_of.items()}
    return Sizes(places, tuple(devices[old] for old in order), renumber(copies), walk.widths)


def _leaf_count(node: ScopeNode, budget: int, stated: bool) -> int:
    if node.count is not None:
        return node.count
    return 1 if stated else max(budget, 1)


def _widest(node: ScopeNode, budget: int, stated: bool) -> int:
    """Devices of the widest TaskGraph under a node, with its copies."""
    if not node.inner:
        return _leaf_count(node, budget, stated)
    copies = node.scope.device_count or 1
    inner_stated = any(inner.states_count for inner in node.inner.values())
    return copies * max(_widest(inner, budget // copies, inner_stated) for inner in node.inner.values())


@dataclass
class _Walk:
    """The virtual devices found so far: one per leaf or per set of leaves that share."""

    place_of: dict[int, int] = field(default_factory=dict)
    devices: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)

    def level(self, nodes: Sequence[ScopeNode], budget: int, outer: int) -> tuple[int | Copies, ...]:
        """Places the nodes of one level, inside `outer` copies."""
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
        for leaf in node.hosted:
            self.place_of[leaf.number] = len(self.devices)
            if leaf.scope.kind == "split":
                self.widths[leaf.number] = _divisor(leaf, width)
