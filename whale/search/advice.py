"""Advice about a cluster: what each device type, more devices or faster links bring, which type runs the first stages, the least memory.

Each piece of advice compares two searches, or two plans of one search, and states both numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from whale.config import Config
from whale.config.keys import choice_text
from whale.errors import AnnotationError, ConfigError, OutOfMemory, PlanError
from whale.estimate import Costs, StepEstimate, estimate_with
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, Replica
from whale.search.changes import faster_between, faster_inside, one_more, with_plenty
from whale.search.deciding import with_states, without_recomputation
from whale.search.freedom import pin_of
from whale.search.largest import Largest
from whale.search.searching import Candidate, SearchResult, search
from whale.units import format_bytes, format_seconds

EFFORT = 30.0  # plans per search of a changed cluster where ``planning.effort`` is not set: there are many such searches

WORTH = 1.02  # a smaller ratio is no gain: two searches of one choice differ by less

FACTOR = 2  # links are asked about at this multiple of their bandwidth

About = Literal["devices", "front", "state", "more", "link", "memory", "redundancy", "depth"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence, and the two numbers behind it."""

    about: About  # topic
    subject: str  # which devices, links or settings
    says: str  # the sentence
    value: float | None  # of the plan it argues for, by the objective (memory: bytes; depth: blocks)
    beside: float | None  # of the plan it is compared with; None where there is none


@dataclass(frozen=True)
class Advised:
    """All advice."""

    found: SearchResult | None  # the search on the cluster as it is; None where nothing fits
    fault: str  # why nothing fits, or ""
    advice: tuple[Advice, ...]  # all of it
    state: str = ""  # ``memory.zero`` and ``memory.offload`` of the plan; "" where nothing fits


def advise(
    graph: ModelGraph, cluster: Cluster, config: Config, *, rows: int | None = None, tell: Callable[[str], None] | None = None
) -> Advised:
    """Searches on a cluster and on changed ones, and says what the differences mean.

    Args:
        graph: the captured model.
        cluster: the devices.
        config: settings, with the objective and, where set, the effort of each search.
        rows: of the global batch; None for the example's.
        tell: is called before each search with what it looks for.

    Raises:
        ConfigError: nothing is left to search for.
    """
    pin = pin_of(config)
    if pin is not None:
        raise ConfigError(f"nothing to advise on: {pin} leaves nothing to search", hint="remove it")
    if config.planning.batch_rows is not None:
        raise ConfigError(
            f"planning.batch_rows: {config.planning.batch_rows} is a range; advice needs one number of rows",
            hint="find it with `whale plan`, and give it by --rows",
        )
    own = _Adviser(graph, cluster, config, rows, tell)
    try:
        found = own.searched("the whole cluster", cluster, effort=config.planning.effort)
    except OutOfMemory as fault:
        return Advised(None, fault.message, (*own.on_hosts(), *own.more(None), own.memory(None)))
    states = tuple(own.states(found))
    before = (*own.groups(found), *own.front(found), *states)
    advice = (*before, *own.more(found), *own.links(found), *own.redundancy(found), own.memory(found))
    return Advised(found, "", advice, said_state(found.plan, config))


@dataclass(frozen=True)
class _Adviser:
    """What all searches share; arguments as of `advise`."""

    graph: ModelGraph
    cluster: Cluster
    config: Config
    rows: int | None
    tell: Callable[[str], None] | None
    _by_state: list[SearchResult] = field(default_factory=list, init=False, compare=False)  # of the last search, those that fit

    def searched(
        self,
        what: str,
        cluster: Cluster,
        start: Sequence[Candidate | SearchResult] = (),
        using: Device | None = None,
        effort: float | None = None,
    ) -> SearchResult:
        """Reports and runs a search; `start` are known good strategies, `using` a device type that every plan must have.

        As in any plan, as little state is sharded or offloaded as fits, or more where that is faster.
        """
        if self.tell is not None:
            self.tell(what)
        if effort is None:
            effort = self.config.planning.effort if "planning.effort" in self.config.explicit else EFFORT
        known = [each.strategy for each in start]
        self._by_state.clear()

        def under(config: Config) -> tuple[Plan, StepEstimate]:
            least = min(effort, config.planning.effort)  # less for a state that is only compared
            found = search(self.graph, cluster, config, rows=self.rows, effort=least, start=known, using=using)
            self._by_state.append(found)
            return found.plan, found.step

        compares = self.config.planning.objective == "step_time"
        least = without_recomputation(self.graph, cluster, self.config)
        plan, step = with_states(self.config, len(cluster.devices), under, may_compare=compares, least=least)
        return replace(next(each for each in self._by_state if each.step is step), plan=plan)

    def groups(self, found: SearchResult) -> Iterator[Advice]:
        """Whether each device type is worth using."""
        for kind, num_devices in self.counts.items():
            if len(self.counts) > 1 or num_devices > 1:
                used = sum(self.cluster.by_name[name].kind == kind for name in found.plan.devices)
                yield self._used(found, kind, used) if used else self._unused(found, kind)

    def _used(self, found: SearchResult, kind: Device, used: int) -> Advice:
        name, count = self.names[kind], self.counts[kind]
        subject = f"the {count} {name}" if used == count else f"{used} of the {count} {name}"
        others = [device.name for device in self.cluster.devices if device.kind != kind]
        if not others:
            return self._fewer(found, name, subject)
        text = found.objective.text
        try:
            known = [each for each in found.others if not self._uses(each.estimated.plan, kind)][:1]
            without = self.searched(f"without the {name}", self.cluster.only(others), known).value
        except (PlanError, AnnotationError):  # nothing fits, or scopes ask for more devices
            return Advice(
                "devices", name, f"use {subject}: without them there is no plan ({text(found.value)} with them)", found.value, None
            )
        ratio = without / found.value
        numbers = self._numbers(found, found.value, without)
        if ratio < WORTH:
            return self._as_good(name, numbers, without, found.value)
        return Advice("devices", name, f"use {subject}: {ratio:.2f}x ({numbers})", found.value, without)

    def _fewer(self, found: SearchResult, name: str, subject: str) -> Advice:
        """For identical devices: all against one of them."""
        text = found.objective.text
        try:
            alone = self.searched(f"one {name}", self.cluster.only([found.plan.devices[0]])).value
        except (PlanError, AnnotationError):
            return Advice("devices", name, f"use {subject}: one alone has no plan ({text(found.value)} together)", found.value, None)
        ratio = alone / found.value
        if ratio < WORTH:
            return Advice("devices", name, f"one {name} is as good ({text(alone)}, {text(found.value)} on all)", alone, found.value)
        return Advice("devices", name, f"use {subject}: {ratio:.2f}x one ({text(found.value)}, {text(alone)} on one)", found.value, alone)

    def _unused(self, found: SearchResult, kind: Device) -> Advice:
        name, text = self.names[kind], found.objective.text
        other = next(self._with(found.others, kind), None) or self._best_with(kind)
        if other is None:
            return Advice(
                "devices", name, f"leave the {name} out: no plan with them was found ({text(found.value)} without)", found.value, None
            )
        value, step = other
        numbers, ratio = self._numbers(found, value, found.value), value / found.value
        if ratio < 1 / WORTH:
            says = f"use the {name}: {1 / ratio:.2f}x, found by a search of plans with them only ({numbers})"
            return Advice("devices", name, says, value, found.value)
        if ratio < WORTH:
            return self._as_good(name, numbers, found.value, value)
        says = f"leave the {name} out: with them it is {ratio - 1:.0%} worse ({numbers}; {why_slower(step, found.step.step_seconds)})"
        return Advice("devices", name, says, found.value, value)

    def _best_with(self, kind: Device) -> tuple[float, StepEstimate] | None:
        """Value and step of the best plan with a device type, by a search of such plans only; None where there is none."""
        try:
            found = self.searched(f"with the {self.names[kind]}", self.cluster, using=kind)
        except (PlanError, AnnotationError):
            return None
        if self._uses(found.plan, kind):
            return found.value, found.step
        return next(self._with(found.others, kind), None)  # around scopes a plan need not take all that it may

    def _with(self, candidates: Sequence[Candidate], kind: Device) -> Iterator[tuple[float, StepEstimate]]:
        return ((each.value, each.estimated.step) for each in candidates if self._uses(each.estimated.plan, kind))

    @staticmethod
    def _numbers(found: SearchResult, value: float, without: float) -> str:
        return f"{found.objective.text(value)} with them, {found.objective.text(without)} without"

    @staticmethod
    def _as_good(name: str, numbers: str, without: float, value: float) -> Advice:
        return Advice("devices", name, f"the {name} may be left out: the others alone are as good ({numbers})", without, value)

    def front(self, found: SearchResult) -> Iterator[Advice]:
        """Which device type computes the first stage, and the time with another there."""
        replica = self._mixed(found.plan)
        if replica is None:
            return
        kind, text = self._front(replica), found.objective.text
        name = self.names[kind]
        first, last = (format_bytes(replica.stages[end].estimates[0].activation_bytes) for end in (0, -1))
        says = f"the {name} takes the front of the pipeline: besides parameters the first stage keeps {first}, the last {last}; "
        for other in found.others:
            mixed = self._mixed(other.estimated.plan)
            if mixed is not None and self._front(mixed) != kind:
                says += f"with the {self.names[self._front(mixed)]} in front {text(other.value)} ({text(found.value)} with this one)"
                yield Advice("front", name, says, found.value, other.value)
                return
        yield Advice(
            "front", name, f"{says}no plan with another device type there was tried (a larger planning.effort tries more)", None, None
        )

    def _uses(self, plan: Plan, kind: Device) -> bool:
        return any(self.cluster.by_name[name].kind == kind for name in plan.devices)

    def _front(self, replica: Replica) -> Device:
        return self.cluster.by_name[replica.stages[0].virtual_device.devices[0]].kind

    def _mixed(self, plan: Plan) -> Replica | None:
        """A replica whose pipeline runs over several device types."""
        for replica in plan.replicas:
            names = (stage.virtual_device.devices[0] for stage in replica.stages)
            if len({self.cluster.by_name[name].kind for name in names}) > 1:
                return replica
        return None

    def states(self, found: SearchResult) -> Iterator[Advice]:
        """Why state is sharded or offloaded, where settings leave it open; must follow the search directly, which fills `_by_state`."""
        said = state_choice(found.plan)
        if said is None:
            return
        others = [each.value for each in self._by_state if each.step is not found.step]
        if not others:
            yield Advice("state", "memory", f"{said.decision}: {said.bound}", found.value, None)
        elif min(others) >= WORTH * found.value:
            numbers = f"{found.objective.text(found.value)}, {said.bound}"
            yield Advice("state", "memory", f"{said.decision}: {min(others) / found.value:.2f}x ({numbers})", found.value, min(others))

    def on_hosts(self) -> Iterator[Advice]:
        """Whether offloading would make the model fit, where settings do not set it."""
        if "memory.offload" in self.config.explicit:
            return
        try:
            found = replace(self, config=self.config.with_values({"memory.offload": "auto"})).searched("with memory of hosts", self.cluster)
        except PlanError:
            yield Advice("state", "memory.offload", "memory.offload: auto: still nothing fits", None, None)
            return
        says = f"memory.offload: auto: then it fits ({found.objective.text(found.value)}; {said_state(found.plan, self.config)})"
        yield Advice("state", "memory.offload", says, found.value, None)

    def more(self, found: SearchResult | None) -> Iterator[Advice]:
        """What one more device of each type would bring; the present plan stays possible."""
        for kind, name in self.names.items():
            cluster, where = one_more(self.cluster, kind)
            yield self._changed(found, "more", name, f"one more {name} {where}", cluster)

    def links(self, found: SearchResult) -> Iterator[Advice]:
        """What links twice as fast would bring, also where the plan avoids them because they are slow."""
        hosts = self.cluster.hosts
        if len(hosts) > 1:
            faster = faster_between(self.cluster, FACTOR)
            yield self._changed(found, "link", "between hosts", "links between hosts twice as fast", faster, self._as_it_is(found, faster))
        if any(len(host.devices) > 1 for host in hosts):
            faster = faster_inside(self.cluster, FACTOR)
            yield self._changed(found, "link", "inside hosts", "links inside hosts twice as fast", faster, self._as_it_is(found, faster))

    def _as_it_is(self, found: SearchResult, cluster: Cluster) -> float:
        """The value of the present plan on a changed cluster, which a search there may miss."""
        prices = Prices(self.graph, cluster, Costs.for_model(self.config, self.graph, cluster))
        return found.objective.of(found.plan, estimate_with(prices, found.plan))

    def _changed(
        self, found: SearchResult | None, about: About, subject: str, what: str, cluster: Cluster, as_it_is: float | None = None
    ) -> Advice:
        """What a changed cluster brings; `as_it_is` is the value of the present plan there, where known."""
        try:
            changed = self.searched(what, cluster, [] if found is None else [found])
        except PlanError:
            changed = None
        if found is None:
            if changed is None:
                return Advice(about, subject, f"{what}: still nothing fits", None, None)
            return Advice(about, subject, f"{what}: then it fits ({changed.objective.text(changed.value)})", changed.value, None)
        text = found.objective.text
        values = [value for value in (as_it_is, None if changed is None else changed.value) if value is not None]
        if not values:
            return Advice(about, subject, f"{what}: no gain was found ({text(found.value)} now)", None, found.value)
        value = min(values)
        if found.value < WORTH * value:
            says = f"{what}: no gain above {WORTH - 1:.0%} was found ({text(found.value)} now)"
            return Advice(about, subject, says, value, found.value)
        return Advice(about, subject, f"{what}: {found.value / value:.2f}x ({text(value)}, {text(found.value)} now)", value, found.value)

    def memory(self, found: SearchResult | None) -> Advice:
        """The least memory per device that trains the model."""
        if self.tell is not None:
            self.tell("the least memory")
        config = self.config.with_values({"planning.objective": "memory"})
        small = search(self.graph, with_plenty(self.cluster), config, rows=self.rows)
        if self.config.memory.zero == "auto" and len(self.cluster.devices) > 1:
            shared, known = config.with_values({"memory.zero": "3"}), [small.strategy]
            least = search(self.graph, with_plenty(self.cluster), shared, rows=self.rows, effort=EFFORT, start=known)
            small = min(small, least, key=lambda each: each.value)
        costs = Costs.of(self.config)
        need = small.value / costs.memory_fraction
        says = f"the model would train on devices of {format_bytes(need)}: {small.strategy}"
        if found is None:
            there = max(device.memory for device in self.cluster.devices)
            return Advice("memory", "the fullest device", f"{says} (the largest has {format_bytes(there)})", need, float(there))
        now = max(each.peak.total for each in found.step.devices) / costs.memory_fraction
        return Advice("memory", "the fullest device", f"{says} (the plan above needs devices of {format_bytes(now)})", need, now)

    def redundancy(self, found: SearchResult) -> Iterator[Advice]:
        """The best plan with redundant copies on other hosts."""
        if len(self.cluster.devices) == 1 or found.step.redundancy is not None:  # the plan says it
            return
        own = replace(self, config=self.config.with_values({"memory.redundancy": 1}))
        try:
            best = own.searched("copies on second hosts", self.cluster, [found])
        except PlanError:
            yield Advice("redundancy", "memory.redundancy", "memory.redundancy: 1: nothing fits with it", None, found.value)
            return
        if (copies := best.step.redundancy) is not None:
            says = f"memory.redundancy: 1 {copies}: {best}, {found.objective.text(found.value)} without"
            yield Advice("redundancy", f"any one {copies.survives}", says, best.value, found.value)

    @cached_property
    def counts(self) -> Counter[Device]:
        return Counter(device.kind for device in self.cluster.devices)

    @cached_property
    def names(self) -> dict[Device, str]:
        """What each device type is called: its model, with its memory where several types share the model."""
        models = Counter(kind.model for kind in self.counts)
        return {kind: kind.model if models[kind.model] == 1 else f"{kind.model} of {format_bytes(kind.memory)}" for kind in self.counts}


def of_depth(sizes: Sequence[Largest]) -> Advice:
    """How deep the model may become; `sizes` as `largest` yields them, from the state that needs most device memory to the least."""
    most, plain = max(each.num_blocks for each in sizes), sizes[0]
    best = next(each for each in sizes if WORTH * each.num_blocks >= most)  # no more is shared out or on hosts than brings something
    told = [f"memory.zero: {own.zero}, memory.offload: {own.offload}, {format_seconds(own.step.step_seconds)}" for own in (best, plain)]
    says = f"with {best.num_blocks} blocks, {best.num_parameters / 1e6:,.0f} M parameters, the model still trains ({told[0]}"
    beside = "" if best is plain else f"; with {plain.num_blocks}: {told[1]}"
    return Advice("depth", "blocks", f"{says}{beside})", float(best.num_blocks), float(plain.num_blocks))


def state_choice(plan: Plan) -> Choice | None:
    """The choice about parameter state, where settings left it open and it is not plain."""
    return next((each for each in plan.choices if (each.pass_name, each.subject) == ("memory", "state")), None)


def said_state(plan: Plan, config: Config) -> str:
    """``memory.zero`` and ``memory.offload`` of a plan made with these settings."""
    said = state_choice(plan)
    if said is not None:
        return said.decision
    zero, offload = (
        setting if setting != "auto" else plain for setting, plain in ((config.memory.zero, "0"), (config.memory.offload, "none"))
    )
    return f"memory.zero: {choice_text(zero)}, memory.offload: {offload}"


def why_slower(step: StepEstimate, seconds: float) -> str:
    """Why a step is slower than `seconds`: compute, links, or waiting for other stages."""
    slow = step.straggler
    work, waits = f"{slow.name} {slow.does('computes')} for {format_seconds(slow.busy)}", slow.does("waits")
    if slow.busy >= seconds:
        return f"compute-bound: {work}"
    if slow.exposed >= step.idle(slow):
        return f"communication-bound: {work} and {waits} {format_seconds(slow.exposed)} for messages"
    return f"schedule-bound: {work} and {waits} {format_seconds(step.idle(slow))} for other devices"
