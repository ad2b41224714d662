"""torch.compile for runs of ops of a stage's program, one graph each; ops between them stay eager.

    linear gelu dropout add layer_norm | exchange | linear ...
    compiled                             eager      compiled

Dropout draws by the place of each element, from a seed that is an input. Eager are: other random ops, whose numbers depend on their
place in the generator's sequence; communication, gathering of weights, deferred weight gradients and the user's own functions, which a
graph cannot hold; and ops around memory that is written in place on both sides of one of these.

The first number of rows gets graphs of static shapes, as usual in torch.compile; all other numbers share dynamic graphs. So a
number of rows always runs the same graph, and a recomputed segment saves the same tensors as the first time.
"""

from __future__ import annotations

import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from whale.deferred import deferred
from whale.errors import first_few, warn
from whale.ir.scope import SourceLine
from whale.ir.writes import SILENT_WRITERS, TRAINING, marked_arguments
from whale.runtime.program.marks import op_of
from whale.runtime.program.randomness import dropout, dropout_
from whale.runtime.program.segments import extract
from whale.runtime.program.weight_gathers import free_backward, free_forward, gather_backward, gather_forward
from whale.units import counted

BACKEND = "inductor"
FEWEST = 2
"""Fewest computing ops of a run that is worth a graph; a dropout by place is one alone, since it takes many kernels otherwise."""

_BETWEEN = (gather_forward, gather_backward, free_forward, free_backward)

_DROPOUTS = (dropout, dropout_)

_SCALARS = ("_operator", "math")
"""Modules of functions on Python numbers."""


@dataclass(eq=False)
class Compilation:
    """What is compiled on a rank, and its cost."""

    where: Mapping[str, SourceLine | None] = field(default_factory=dict)  # per op, the user's line
    mode: str = "default"  # of torch.compile
    note: Callable[[str], None] = lambda _: None  # called with a message before each compilation
    num_graphs: int = 0
    num_cached: int = 0  # of these, found in torch's cache on disk
    seconds: float = 0.0  # spent
    _shared: dict[Any, _Graph] = field(default_factory=dict)
    _left: dict[str, str] = field(default_factory=dict)
    _alike: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    _told: tuple[int, int] = 0, 0

    def add(self, runs: Iterable[CompiledRun], left: Iterable[fx.Node]) -> None:
        """Notes a program's runs and its ops outside of them."""
        for run in runs:
            self._alike.setdefault(run.code, set()).add(run.ops)
        self._left |= {op_of(node) or node.name: _title(node) for node in left}

    @property
    def compiled(self) -> Mapping[tuple[str, str], Counter[str]]:
        """The compiled runs with the names of their ops, each once, however many graphs it has."""
        return {ops: names for graph in self._shared.values() if graph.function is not None for ops, names in graph.runs.items()}

    @property
    def eager(self) -> Counter[str]:
        """The other ops by name: those outside of runs, and those of runs on which torch.compile fails."""
        failed = {ops: names for graph in self._shared.values() if graph.function is None for ops, names in graph.runs.items()}
        return sum(failed.values(), Counter(self._left.values()))

    def news(self) -> str | None:
        """A message about what was compiled since the last call; None for nothing."""
        num_failed = sum(graph.function is None for graph in self._shared.values())
        if (self.num_graphs, num_failed) == self._told:
            return None
        self._told = self.num_graphs, num_failed
        compiled, fails = self.compiled, f" and fails on {num_failed}" if num_failed else ""
        eager = [f"{count} x {name}" for name, count in self.eager.most_common()]
        rest = f"; not compiled: {first_few(eager, 4)}" if eager else ""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return (
            f"torch.compile made {counted(self.num_graphs, 'graph')}{fails} in {self.seconds:.1f} s, {self.num_cached} from its cache "
            f"({cache_dir()}): {counted(len(compiled), 'run')} of {counted(sum(map(Counter.total, compiled.values())), 'op')}{rest}"
        )

    def graph_of(self, run: CompiledRun, inputs: Sequence[Any]) -> _Graph:
        """The graph of a run at its first call; runs of equal code and inputs of equal form share one."""
        key = run.is_dynamic, run.code, tuple(_form(value) for value in inputs)
        if key not in self._shared:
            self._shared[key] = _Graph(torch.compile(run.module, dynamic=run.is_dynamic, fullgraph=True, backend=self._backend(run.name)))
        self._shared[key].runs[run.ops] = run.names
        return self._shared[key]

    def _backend(self, name: str) -> Callable[..., Any]:
        import torch._functorch.config  # takes a second with Dynamo, so only imported where something is compiled
        from torch._dynamo import lookup_backend
        from torch._dynamo.utils import counters

        compile_graph: Callable[..., Any] = lookup_backend(BACKEND)
        if self.mode != "default":
            compile_graph = partial(compile_graph, config_patches=torch._inductor.list_mode_options(self.mode))

        def timed(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            self.note(f"torch.compile has {name}")
            start, hits = time.perf_counter(), counters["aot_autograd"]["autograd_cache_hit"]
            # The backward pass too: a failure must show before the graph runs.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                made = compile_graph(module, inputs)
            self.seconds += time.perf_counter() - start
            self.num_graphs += 1
            self.num_cached += counters["aot_autograd"]["autograd_cache_hit"] > hits
            return made

        return timed

    def failed(self, run: CompiledRun, error: Exception) -> None:
        """Warns that the ops of a run stay eager."""
        first, last = run.ops
        place = f" ({where})" if (where := self.where.get(first)) else ""
        inner = getattr(error, "inner_exception", error)
        first_line, cause = str(inner).partition("\n")[0], re.search(r"got (\w+\(.*\))$", str(inner), re.MULTILINE)
        reason = cause[1] if cause else f"{type(inner).__name__}: {first_line}"
        alike = len(self._alike[run.code]) - 1
        others = f" (and {counted(alike, 'equal run')})" if alike else ""
        warn(f"torch.compile fails on %{first} .. %{last}{place}, which run eagerly{others}: {reason}")


@dataclass(eq=False)
class _Graph:
    """What torch.compile makes of runs of equal code."""

    function: Callable[..., Any] | None  # None where it failed
    # the runs that have called it, by first and last op, with the names of their ops
    runs: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)


class CompiledRun(nn.Module):
    """A run of ops, compiled at its first call.

    Args:
        module: returns a tuple.
        ops: the first and the last.
        is_dynamic: whether sizes of inputs may change.
    """

    def __init__(
        self, module: fx.GraphModule, ops: tuple[str, str], names: Counter[str], compilation: Compilation, *, is_dynamic: bool
    ) -> None:
        super().__init__()
        self.module, self.ops, self.names, self.is_dynamic = module, ops, names, is_dynamic
        self.code = _code(module.graph)
        self._compilation = compilation
        self._graph: _Graph | None = None

    @property
    def name(self) -> str:
        return f"%{self.ops[0]} .. %{self.ops[1]}"

    def forward(self, *inputs: Any) -> Any:
        graph = self._graph
        if graph is None:
            graph = self._graph = self._compilation.graph_of(self, inputs)
        if graph.function is None:
            return self.module(*inputs)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return _called(graph.function, inputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            graph.function = None
            found = self.module(*inputs)  # an op that fails on its arguments fails here, too
            self._compilation.failed(self, error)
            return found
        except (RuntimeError, IndexError, AssertionError):
            self.module(*inputs)  # raises the error of the op
            raise


def _called(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Calls a compiled function.

    Dynamo refuses tensors with a gradient of another type, so while it traces such gradients are detached.
    """
    from torch._dynamo.exc import Unsupported

    try:
        return function(*inputs)
    except Unsupported:
        leaves = [(each, each.grad) for each in inputs if isinstance(each, torch.Tensor) and each.is_leaf and each.grad is not None]
        if all(grad.dtype == leaf.dtype for leaf, grad in leaves):
            raise
    for leaf, _ in leaves:
        leaf.grad = None
    try:
        return function(*inputs)
    finally:
        for leaf, grad in leaves:
            leaf.grad = grad


def compile_runs(graph: fx.Graph, root: nn.Module, random: Collection[str], *, compilation: Compilation, is_dynamic: bool) -> None:
    """Replaces runs of ops of a graph by calls of `CompiledRun`.

    Args:
        graph: of a stage or a segment, its nodes marked with their op's name; changed in place.
        is_dynamic: whether the graph serves several numbers of rows.
    """
    runs, left = _runs(graph, random)
    made = []
    for number, nodes in enumerate(runs):
        name = f"compiled{number}"
        ops = [each for node in nodes if (each := op_of(node)) is not None] or [nodes[0].name, nodes[-1].name]
        names = Counter(_title(node) for node in nodes if _computes(node))
        run = CompiledRun(extract(graph, nodes, name), (ops[0], ops[-1]), names, compilation, is_dynamic=is_dynamic)
        root.add_module(name, run)
        made.append(run)
    compilation.add(made, left)


def _runs(graph: fx.Graph, random: Collection[str]) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """The runs that are compiled, and the other computing ops."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    fit = set[fx.Node]()
    for node in calls:
        if _is_pure(node, random) and not (node.target is operator.getitem and node.args[0] not in fit):
            fit.add(node)
    memory = _Memory(graph)
    while True:
        runs = list(_unbroken(calls, fit))
        outside = memory.written_outside(runs)
        if not outside & fit:
            break
        fit -= outside
    found = [run for run in runs if sum(map(_computes, run)) >= FEWEST or any(node.target in _DROPOUTS for node in run)]
    inside = {node for run in found for node in run}
    return found, [node for node in calls if node not in inside and node.op == "call_function" and _computes(node)]


def _unbroken(calls: Iterable[fx.Node], fit: Collection[fx.Node]) -> Iterator[list[fx.Node]]:
    run: list[fx.Node] = []
    for node in calls:
        if node in fit:
            run.append(node)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _is_pure(node: fx.Node, random: Collection[str]) -> bool:
    if node.op != "call_function":
        return False
    target, op = node.target, op_of(node)
    if target in _DROPOUTS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in _SCALARS
    draws = torch.Tag.nondeterministic_seeded in target.tags if op is None else op in random
    return target.namespace == "aten" and not draws and not target.__name__.startswith("_assert")


def _computes(node: fx.Node) -> bool:
    """Whether a node computes tensors, rather than views or properties of them."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return op_of(node) is not None and target not in _BETWEEN and getattr(target, "__module__", None) not in _SCALARS
    returns = target._schema.returns
    return bool(returns) and (returns[0].alias_info is None or returns[0].alias_info.is_write) and "Tensor" in str(returns[0].type)


class _Memory:
    """Which nodes of a graph may share, touch and write which memory; conservative."""

    def __init__(self, graph: fx.Graph) -> None:
        self._touching: dict[fx.Node, list[fx.Node]] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        owner: dict[fx.Node, fx.Node] = {}
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            read = node.all_input_nodes
            shares = node.op == "call_function" and bool(read) and _may_share(node.target)
            owner[node] = owner[read[0]] if shares else node
            if node.op == "output":
                continue
            for own in dict.fromkeys((owner[node], *(owner[source] for source in read))):
                self._touching.setdefault(own, []).append(node)
            for written in _written(node):
                self._writers.setdefault(owner[written], []).append(node)

    def written_outside(self, runs: Sequence[Sequence[fx.Node]]) -> set[fx.Node]:
        """Nodes around memory that is written outside of a single run, or touched before it."""
        number = {node: index for index, run in enumerate(runs) for node in run}
        found = set[fx.Node]()
        for own, writers in self._writers.items():
            places = {number.get(node) for node in writers}
            (place,) = places if len(places) == 1 else (None,)
            before = [] if place is None else [node for node in self._touching[own] if self._place[node] < self._place[runs[place][0]]]
            if place is None or any(node.op != "placeholder" for node in before):
                found.update(self._touching[own])
        return found


def _may_share(target: Any) -> bool:
    """Whether a function's result may share memory with its first argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is not dropout
    shares = any(each.alias_info is not None for each in target._schema.returns)
    return shares or torch.Tag.maybe_aliasing_or_mutating in target.tags


def _written(node: fx.Node) -> list[fx.Node]:
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.removeprefix("aten::") in SILENT_WRITERS:
        trains = len(node.args) <= TRAINING or node.args[TRAINING] is not False
        return [source for source in node.args[3:5] if trains and isinstance(source, fx.Node)]
    return [*node.all_input_nodes[:1]] if node.target is dropout_ else marked_arguments(node, writes=True)


def _code(graph: fx.Graph) -> str:
    """What a graph computes, independent of the names of its nodes."""
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        lines.append("placeholder" if node.op == "placeholder" else f"{node.op} {node.target} {args} {kwargs}")
    return "\n".join(lines)


def _form(value: Any) -> Any:
    """What a graph is specialized on, of one input."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, type(value)


def _title(node: fx.Node) -> str:
    """The name of an op in messages."""
    target: Any = node.args[1] if node.target is deferred else node.target
    name = str(getattr(target, "__name__", target)).partition(".")[0]
    return f"{name} (weight gradient deferred)" if node.target is deferred else name
