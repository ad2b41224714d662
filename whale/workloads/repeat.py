"""The graph of a deeper model, made from a capture with fewer blocks.

captured   prefix | block | block | suffix
repeated   prefix | block | block | block' | block'' | suffix'
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from whale.errors import CaptureError
from whale.ir.blocks import RepeatedBlocks, find_repeated_blocks
from whale.ir.graph import REGION, Argument, ModelGraph, Op, Parameter, Ref
from whale.ir.scope import Scope
from whale.progress import progress


def count_blocks(graph: ModelGraph) -> int:
    """The number of consecutive equal blocks of a model.

    Raises:
        CaptureError: no blocks repeat in it.
    """
    return _blocks_of(graph).count


MOST_BLOCKS = 10_000  # each takes a millisecond, and is planned


def repeat_blocks(graph: ModelGraph, num_blocks: int) -> ModelGraph:
    """The graph of the model with this many blocks.

    Args:
        graph: with at least two blocks, one after another.
        num_blocks: at least as many as it has.

    Raises:
        CaptureError: no blocks repeat in it, it has more, or they are more than `MOST_BLOCKS`.
    """
    if num_blocks > MOST_BLOCKS:
        raise CaptureError(f"{num_blocks} blocks are more than {MOST_BLOCKS:,}, of which a graph can be made")
    run = _blocks_of(graph)
    if num_blocks < run.count:
        raise CaptureError(f"--blocks {num_blocks} is fewer than the {run.count} blocks of the captured model")
    if num_blocks == run.count:
        return graph
    with progress(f"repeating the model's blocks until there are {num_blocks}"):
        return _Repeated(graph, run, num_blocks - run.count).graph()


def _blocks_of(graph: ModelGraph) -> RepeatedBlocks:
    run = find_repeated_blocks(graph)
    if run is None:
        raise CaptureError(
            "the model has no repeated blocks: no run of ops does the same as the one before it",
            hint="capture it with two blocks or more, of the same code, none of them special",
        )
    return run


class _Names:
    """Makes unique names that continue those of the captured blocks."""

    def __init__(self, graph: ModelGraph, run: RepeatedBlocks) -> None:
        self._taken = {op.name for op in graph.ops} - {op.name for op in run.calls[run.stop :]}
        numbers = [(_numbered(a.name), _numbered(b.name)) for a, b in run.pairs]
        self.steps = {base: after - before for (base, before), (other, after) in numbers if base == other}

    def call(self, name: str, times: int) -> str:
        """The name of a call so many blocks later."""
        base, number = _numbered(name)
        number += self.steps.get(base, 0) * times
        return self.fresh(f"{base}_{number}" if number else base)

    def fresh(self, name: str) -> str:
        """The name, made longer if it is taken."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _numbered(name: str) -> tuple[str, int]:
    """``linear_3`` as ``linear`` and 3; ``linear`` is number 0."""
    base, _, digits = name.rpartition("_")
    return (base, int(digits)) if base and digits.isdecimal() else (name, 0)


def _step(before: str, name: str, times: int) -> str:
    """A name so many steps further, by the numbers in it: ``blocks.0.norm``, ``blocks.1.norm``, ``blocks.2.norm``."""
    old, new = re.split(r"(\d+)", before), re.split(r"(\d+)", name)
    if old[::2] != new[::2]:
        return f"{name}.{times}" if before != name else name
    new[1::2] = [str(int(b) + times * (int(b) - int(a))) for a, b in zip(old[1::2], new[1::2], strict=True)]
    return "".join(new)


@dataclass(frozen=True)
class _RepeatedBlock:
    """An added block."""

    names: Mapping[str, str]  # of its ops, by those of the last captured block
    leaves: tuple[Op, ...]  # ops of its parameters
    calls: tuple[Op, ...]
    parameters: tuple[Parameter, ...]  # its own


class _Repeated:
    """Makes the graph with blocks added after the last."""

    def __init__(self, graph: ModelGraph, run: RepeatedBlocks, num_added: int) -> None:
        self._graph, self._run = graph, run
        self._names = _Names(graph, run)
        self._before = {after: first for first, after in run.own.items()}
        self._blocks: list[_RepeatedBlock] = []
        self._inside = {
            b.key: (a, b) for first, after in run.pairs for a, b in zip(first.scope, after.scope, strict=True) if a.key != b.key
        }
        entries = [b.entry for _, b in self._inside.values()]
        self._last_entry = max(entries, default=0)
        # of a block: those of scopes without ops too, so that no two scopes get one number
        self._num_entries = max((max(b.entry - a.entry, self._last_entry - min(entries) + 1) for a, b in self._inside.values()), default=0)
        self._num_added = num_added
        for times in range(1, num_added + 1):
            self._blocks.append(self._block(times))
        self._num_regions = len({op.region for _, op in run.pairs} - {None}) * num_added
        self._suffix = {op.name: self._names.call(op.name, num_added) for op in run.calls[run.stop :]}

    def graph(self) -> ModelGraph:
        graph, name = self._graph, self._name
        loss = (
            dataclasses.replace(term, sum=name(term.sum), weight=None if term.weight is None else name(term.weight)) for term in graph.loss
        )
        return dataclasses.replace(
            graph, ops=tuple(self._ops()), parameters=tuple(self._parameters()), loss=tuple(loss), outputs=tuple(map(name, graph.outputs))
        )

    def _name(self, name: str) -> str:
        """The name, after the blocks were added, of a value that a captured op after them reads."""
        return self._suffix.get(name) or self._blocks[-1].names.get(name, name)

    def _ops(self) -> Iterator[Op]:
        last_leaf = {op.kind: op.name for op in self._graph.ops if op.name in self._before}
        last_call = self._run.calls[self._run.stop - 1].name
        for op in self._graph.ops:
            if self._inside:
                op = dataclasses.replace(op, scope=tuple(map(self._renumbered, op.scope)))
            yield self._behind(op) if op.name in self._suffix else op
            if op.name == last_leaf.get(op.kind):
                yield from (leaf for block in self._blocks for leaf in block.leaves if leaf.kind == op.kind)
            if op.name == last_call:
                yield from (call for block in self._blocks for call in block.calls)

    def _renumbered(self, scope: Scope) -> Scope:
        """A captured scope; those that were entered after the blocks follow the new ones."""
        is_behind = scope.entry > self._last_entry
        return dataclasses.replace(scope, entry=scope.entry + self._num_added * self._num_entries) if is_behind else scope

    def _scope(self, scope: Scope, times: int) -> Scope:
        """A scope of the last captured block, so many blocks later."""
        if scope.key not in self._inside:
            return self._renumbered(scope)
        before, last = self._inside[scope.key]
        name = None if before.name is None or last.name is None else _step(before.name, last.name, times)
        return dataclasses.replace(last, entry=last.entry + times * self._num_entries, name=name)

    def _behind(self, op: Op) -> Op:
        """An op after the blocks; regions there are numbered after those of the blocks."""
        tags = op.tags
        if op.region is not None:
            tags = tags - {op.region} | {f"{REGION}{int(op.region.removeprefix(REGION)) + self._num_regions}"}
        return _with_names(dataclasses.replace(op, tags=tags), self._name)

    def _parameters(self) -> Iterator[Parameter]:
        own = {self._parameter(leaf).name for leaf in self._before}
        last = next((each.name for each in reversed(self._graph.parameters) if each.name in own), None)
        for parameter in self._graph.parameters:
            yield parameter
            if parameter.name == last:
                yield from (added for block in self._blocks for added in block.parameters)

    def _parameter(self, leaf: str) -> Parameter:
        return self._graph.parameter_by_name[self._graph.by_name[leaf].target]

    def _block(self, times: int) -> _RepeatedBlock:
        """The block so many steps after the last captured one."""
        leaves = [self._leaf(op, times) for op in self._graph.ops if op.name in self._before]
        names = dict(zip((op.name for op in self._graph.ops if op.name in self._before), (leaf.name for leaf in leaves), strict=True))
        names |= {op.name: self._names.call(op.name, times) for _, op in self._run.pairs}
        previous = self._blocks[-1].names if self._blocks else {}
        entering = {a.name: previous.get(b.name, b.name) for a, b in self._run.pairs}
        calls = []
        for a, b in self._run.pairs:
            tags = b.tags if a.region is None or b.region is None else b.tags - {b.region} | {_step(a.region, b.region, times)}
            scopes = tuple(self._scope(scope, times) for scope in b.scope)
            op = dataclasses.replace(b, tags=tags, module=_step(a.module, b.module, times), scope=scopes)
            calls.append(_with_names(op, lambda name: names.get(name) or entering.get(name, name)))
        known = {self._parameter(op).name: (self._parameter(self._before[op]), self._parameter(op)) for op in self._before}
        own = [known[each.name] for each in self._graph.parameters if each.name in known]
        return _RepeatedBlock(names, tuple(leaves), tuple(calls), tuple(_stepped(a, b, times) for a, b in own))

    def _leaf(self, op: Op, times: int) -> Op:
        before = self._graph.by_name[self._before[op.name]]
        name = self._names.fresh(_step(before.name, op.name, times))
        return dataclasses.replace(op, name=name, target=_step(before.target, op.target, times))


def _stepped(before: Parameter, parameter: Parameter, times: int) -> Parameter:
    ties = zip(before.ties, parameter.ties, strict=True)
    return dataclasses.replace(parameter, name=_step(before.name, parameter.name, times), ties=tuple(_step(a, b, times) for a, b in ties))


def _with_names(op: Op, name: Callable[[str], str]) -> Op:
    """The op with other names for itself and what it reads."""

    def of(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(name(argument.op))
        return tuple(map(of, argument)) if isinstance(argument, tuple) else argument

    return dataclasses.replace(
        op, name=name(op.name), args=tuple(map(of, op.args)), kwargs=tuple((key, of(value)) for key, value in op.kwargs)
    )
