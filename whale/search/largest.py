"""The deepest version of a model with repeated blocks that trains on given devices, for each parameter state.

bound      depth at which one copy of all parameter forms fills all memories
   | search    a strategy that fits a depth, by speed
   | repeat    the same strategy at larger depths: one strategy is checked quickly, that none fits is not
   | search    a little deeper; where nothing is found, the last is the deepest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from whale.config import Config
from whale.config.keys import Choice, choice_text
from whale.errors import OutOfMemory, PlanError, WhaleError
from whale.estimate import Costs, StepEstimate
from whale.estimate.memory.memory import state_bytes
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, zero_of
from whale.planning.realizing import Realizer
from whale.planning.strategy import strategy_of
from whale.search.deciding import decide
from whale.search.freedom import freedom_of, pin_of
from whale.search.open import is_divided
from whale.search.searching import search

MAX_BLOCKS = 4096  # a limit of the answer

_EFFORT = 20  # of each search

_TRIES = 2  # plans per search beyond the effort while nothing fits: strategies come in the order of what they seem to lack

_GRAIN = 25  # depths closer than one part in this many count as equal: the precision of the answer; that of memory is coarser

_NUM_KNOWN = 2  # latest strategies that are tried before another search

_STATES = (("0", "none"), ("2", "none"), ("3", "none"), ("3", "optimizer"), ("3", "optimizer+parameters"))
"""``memory.zero`` and ``memory.offload``, from the most device memory to the least."""


@dataclass(frozen=True)
class Largest:
    """The deepest model that fits with a state (`zero`, `offload`), its plan and estimate."""

    zero: str
    offload: str
    num_blocks: int
    graph: ModelGraph
    plan: Plan
    step: StepEstimate

    @property
    def num_parameters(self) -> int:
        return sum(each.spec.num_elements for each in self.graph.parameters if each.kind == "parameter")


@dataclass(frozen=True)
class Depths:
    """One model in all depths, on a cluster."""

    deepened: Callable[[int], ModelGraph]  # makes the model with so many blocks
    num_captured: int  # its own blocks; fewer are not tried
    cluster: Cluster  # the devices
    rows: int | None  # of the global batch; None for the example's
    _graphs: dict[int, ModelGraph] = field(default_factory=dict, init=False, repr=False)

    def graph(self, num_blocks: int) -> ModelGraph:
        if num_blocks not in self._graphs:
            self._graphs[num_blocks] = self.deepened(num_blocks)
        return self._graphs[num_blocks]

    def most(self, config: Config) -> int:
        """An upper bound: each form of each parameter needs room at least once, and grows linearly with the blocks."""
        (one, there), (two, over) = (self._least(self.num_captured + more, config) for more in (0, 1))
        rooms = sum(
            Costs.for_model(config, self.graph(self.num_captured), self.cluster).capacity(each.kind) for each in self.cluster.devices
        )
        hosts = [host.memory for host in self.cluster.hosts]
        known = [(one, two, rooms)]
        if None not in hosts and not config.memory.offload_as_needed:
            known.append((there, over, sum(filter(None, hosts))))
        bounds = (self.num_captured + int((room - first) // (second - first)) for first, second, room in known if second > first)
        return max(self.num_captured, min(MAX_BLOCKS, *bounds))

    def _least(self, num_blocks: int, config: Config) -> tuple[int, int]:
        """Bytes on devices and on hosts with one copy of each form of each parameter."""
        graph = self.graph(num_blocks)
        prices = Prices(graph, self.cluster, Costs.for_model(config, graph, self.cluster))
        held = [state_bytes(each, prices.state_of[each.name], training=prices.training) for each in graph.parameters]
        gone = (zero_of(prices.costs.zero, each.name) == 2 for each in graph.parameters)  # their gradients need not be there all at a time
        total = sum(own.total - (own.gradient if is_gone else 0) for own, is_gone in zip(held, gone, strict=True))
        return total, sum(own.on_host for own in held)

    def searched(self, num_blocks: int, config: Config) -> tuple[Plan, StepEstimate]:
        graph = self.graph(num_blocks)
        if not self._is_free(graph, config) or config.pipeline.num_stages is not None:
            return decide(None, graph, self.cluster, config, rows=self.rows)
        found = search(graph, self.cluster, config, rows=self.rows, tries=_TRIES)
        return found.plan, found.step

    def again(self, num_blocks: int, config: Config, plan: Plan) -> tuple[Plan, StepEstimate]:
        graph = self.graph(num_blocks)
        strategy = strategy_of(plan, self.cluster)
        if not self._is_free(graph, config) or strategy is None:
            raise PlanError("a strategy alone says what a plan is where nothing else does")
        prices = Prices(graph, self.cluster, Costs.for_model(config, graph, self.cluster))
        settings = freedom_of(config, mixes_samples=False).config
        return Realizer(prices, settings, graph.num_rows if self.rows is None else self.rows).realize(strategy).finished()

    def _is_free(self, graph: ModelGraph, config: Config) -> bool:
        """Whether a strategy alone determines a plan."""
        return pin_of(config) is None and not is_divided(graph, config) and len(self.cluster.devices) > 1


def open_states(config: Config) -> tuple[tuple[Choice, str], ...]:
    """The states that settings leave open; where ``memory.offload`` is not set, offloading is tried."""
    zero = None if config.memory.zero == "auto" else config.memory.zero
    is_open = "memory.offload" not in config.explicit or config.memory.offload == "auto"
    return tuple(dict.fromkeys((zero or each, home if is_open else config.memory.offload) for each, home in _STATES))


def largest(depths: Depths, config: Config, tell: Callable[[str], None]) -> Iterator[Largest]:
    """The deepest model for each state that fits at all, from the most device memory to the least.

    Args:
        depths: plans the model.
        config: settings.
        tell: is called with each depth that is tried.

    Raises:
        OutOfMemory: not even the captured blocks fit with any state; of the last.
        WhaleError: there is no plan for another reason.
    """
    fault: OutOfMemory | None = None
    known: list[Plan] = []
    least = depths.num_captured
    for zero, offload in open_states(config):
        settings = config.with_values({"memory.zero": zero, "memory.offload": offload})
        settings = settings.with_values({"planning.effort": min(config.planning.effort, _EFFORT)})

        def tell_depth(depth: int, state: str = f"memory.zero {choice_text(zero)}, memory.offload {offload}") -> None:
            tell(f"{depth} blocks, {state}")

        own = _State(depths, settings, tell_depth, known)
        try:
            least = own.deepest(least)
        except OutOfMemory as error:
            fault = error
            continue
        yield Largest(choice_text(zero), offload, least, depths.graph(least), *own.found[least])
    if not known:
        assert fault is not None
        raise fault


@dataclass(frozen=True)
class _State:
    """The depths that fit with one state."""

    depths: Depths
    config: Config
    tell: Callable[[int], None]
    known: list[Plan]  # plans that fitted some depth with any state, latest last; extended here
    found: dict[int, tuple[Plan, StepEstimate]] = field(default_factory=dict, init=False)  # by depth, the fastest plan that fits
    _too_deep: dict[int, int] = field(default_factory=dict, init=False)  # by index in `known`, the least depth that did not fit

    def deepest(self, least: int) -> int:
        """The largest depth that fits, to one part in `_GRAIN`, starting from `least`.

        Raises:
            OutOfMemory: the least does not fit.
        """
        best, too_many = least, self.depths.most(self.config) + 1
        if not any(self._fits(best, number) for number in self._recent):
            self._search(best)
        while True:
            for number in self._recent:
                bound = min(too_many, self._too_deep.get(number, too_many))
                best = _deepest(partial(self._fits, number=number), best, bound)
            if too_many - best <= _grain(best):
                return best
            more = best + max(_grain(best), (too_many - best) // 3 if 2 * best < too_many else 0)
            try:
                self._search(more)
                best = more
            except OutOfMemory:
                too_many = more

    @property
    def _recent(self) -> Sequence[int]:
        """Indices of the latest strategies; split ones last, as they take ten times as long to plan."""
        last = range(len(self.known))[: -_NUM_KNOWN - 1 : -1]
        return sorted(last, key=lambda number: self.known[number].is_sharded)

    def _search(self, num_blocks: int) -> None:
        self.tell(num_blocks)
        self._add(num_blocks, self.depths.searched(num_blocks, self.config))
        self.known.append(self.found[num_blocks][0])

    def _fits(self, num_blocks: int, number: int) -> bool:
        """Whether the strategy of a known plan fits."""
        self.tell(num_blocks)
        try:
            self._add(num_blocks, self.depths.again(num_blocks, self.config, self.known[number]))
        except WhaleError:
            self._too_deep[number] = num_blocks
            return False
        return True

    def _add(self, num_blocks: int, planned: tuple[Plan, StepEstimate]) -> None:
        known = self.found.get(num_blocks, planned)
        self.found[num_blocks] = min(planned, known, key=lambda each: each[1].step_seconds)


def _deepest(fits: Callable[[int], bool], least: int, too_many: int) -> int:
    """The largest number that fits, to one part in `_GRAIN`.

    Steps start small and double, since failures take longest; the rest is narrowed from below.
    """
    best, step = least, _grain(least)
    while too_many - best > _grain(best):
        more = min(best + step, too_many - 1)
        if not fits(more):
            too_many = more
            break
        best, step = more, 2 * step
    while too_many - best > (grain := _grain(best)):
        middle = best + max(grain, (too_many - best) // 3)
        if fits(middle):
            best = middle
        else:
            too_many = middle
    return best


def _grain(num_blocks: int) -> int:
    return max(1, num_blocks // _GRAIN)
