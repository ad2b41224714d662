"""Advice about a cluster and a training: which devices to use, and what another setting, more devices or a faster network would bring.

questions   the search, asked for plans with and without each device type, then for plans with one thing changed
facts       per question the best plan that any answer has; a better plan for the question as it is replaces the first one
lines       each compares two facts, and states both values
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from whale.config import Config
from whale.errors import ConfigError, OutOfMemory, WhaleError
from whale.estimate import Costs, StepEstimate
from whale.hardware import compute_type
from whale.hardware.precision import HALVES
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import MOST_ROWS, ModelGraph
from whale.search.asking import Answer, PlanQuestion, answers
from whale.search.changes import faster_between, one_more, with_plenty
from whale.search.freedom import pin_of
from whale.search.largest import Largest
from whale.search.searching import search
from whale.units import format_bytes, format_rate, format_seconds, format_share

QUESTIONS = 8  # as many as share the effort of so many plans: all advice takes less time than ten

MOST_TYPES = 4  # device types that are asked about, the slowest; and those of which one more is, the fastest: for a short answer

WORTH = 1.02  # a smaller ratio is not called a gain; what is searched does not depend on it

FACTOR = 2  # the network is asked about at this multiple of its bandwidth, and the batch at this multiple of its rows

About = Literal["devices", "precision", "batch", "more", "speed", "link", "redundancy", "state", "none", "memory", "depth"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence, and the two values behind it."""

    about: About  # topic
    subject: str  # which devices, links or settings
    says: str  # the sentence
    value: float | None  # of the plan it argues for, by the objective (batch: per sample; memory: bytes; depth: blocks)
    beside: float | None  # of the plan it is compared with; None where there is none


@dataclass(frozen=True)
class Advised:
    """All advice."""

    best: Answer | None  # the plan; None where nothing fits
    fault: str  # why nothing fits, or ""
    advice: tuple[Advice, ...]  # all of it
    facts: tuple[Answer, ...] = ()  # that it is made of: the best answer to each question that has one, the plan first


@dataclass(frozen=True)
class _Change:
    """A question with one thing changed."""

    about: About
    subject: str
    setting: str
    question: PlanQuestion


def advise(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    rows: int | None = None,
    recapture: Callable[[Config], ModelGraph] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Advised:
    """Searches on a cluster and on changed ones, and says what the differences mean.

    Args:
        graph: the captured model.
        cluster: the devices.
        config: settings, with the objective and, where set, the effort of each search.
        rows: of the global batch; None for the example's.
        recapture: captures the model for other settings; None where it cannot be, then half precision is not asked about.
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
    base = PlanQuestion(graph, cluster, config, graph.num_rows if rows is None else rows)
    own = _Adviser(base, recapture, (lambda what: None) if tell is None else tell)
    try:
        own.begin()
    except OutOfMemory as fault:
        return Advised(None, fault.message, tuple(own.what_fits()))
    own.settle()
    own.ask_changes()
    if own.ask_again():
        own.settle()
    lines = (*own.devices(), *own.gains())
    return Advised(own.best, "", lines, (own.best, *own.facts))


@dataclass(frozen=True)
class _Adviser:
    """What was asked, and what is known."""

    base: PlanQuestion  # as it is
    recapture: Callable[[Config], ModelGraph] | None
    tell: Callable[[str], None]
    known: list[Answer] = field(default_factory=list, init=False)  # plans for `base`
    answered: list[tuple[_Change, Answer]] = field(default_factory=list, init=False)  # changes that have a plan
    _asked: set[tuple[Device | None, bool]] = field(default_factory=set, init=False)  # device types, and whether with them

    @property
    def best(self) -> Answer:
        return replace(min(self.known, key=lambda each: each.value), setting="")

    @cached_property
    def counts(self) -> Counter[Device]:
        return Counter(device.kind for device in self.base.cluster.devices)

    @cached_property
    def names(self) -> Mapping[Device, str]:
        """What the devices of each type are called: ``T4``, ``2 x T4``."""
        return {
            kind: f"{self.counts[kind]} x {name}" if self.counts[kind] > 1 else name for kind, name in self.base.cluster.kind_names.items()
        }

    @cached_property
    def types(self) -> tuple[Device, ...]:
        """The device types that are asked about, in the cluster's order."""
        slowest = sorted(self.counts, key=lambda kind: kind.reached_flops("float32"))[:MOST_TYPES]
        return tuple(kind for kind in self.counts if kind in slowest) if len(self.counts) > 1 else ()

    @cached_property
    def _question(self) -> PlanQuestion:
        """`base` with the effort of the questions after the first."""
        number = 2 * min(len(self.counts), MOST_TYPES) + 4  # each type, and more of it; precision, rows, links, copies
        effort = max(1, round(self.base.config.planning.effort * min(1, QUESTIONS / number)))
        return replace(self.base, config=self.base.config.with_values({"planning.effort": effort}))

    def begin(self) -> None:
        """Asks for plans for `base`. Raises OutOfMemory: there is none."""
        self.tell("the whole cluster")
        self.known.extend(answers(self.base))
        self._asked.update((kind, kind in self.best.kinds) for kind in self.counts)

    def ask(self, setting: str, question: PlanQuestion, start: Sequence[Answer] = ()) -> tuple[Answer, ...]:
        """The answers to a question; none where there is no plan."""
        self.tell(setting)
        try:
            found = answers(question, setting, [each.strategy for each in start])
        except WhaleError:
            return ()
        return tuple(each for each in found if not each.is_apart or not self.known or self.best.is_apart)

    def settle(self) -> None:
        """Asks for plans with each device type that the best plan does not use, and without each that it uses, until both are known."""
        question, everyone = self._question, self.base.cluster.devices
        while (kind := next((each for each in self.types if (each, each not in self.best.kinds) not in self._asked), None)) is not None:
            is_with = kind not in self.best.kinds
            self._asked.add((kind, is_with))
            if is_with:
                asked = replace(question, using=kind)
            else:
                asked = replace(question, cluster=self.base.cluster.only([each.name for each in everyone if each.kind != kind]))
            self.known.extend(self.ask(f"{'with' if is_with else 'without'} the {self.names[kind]}", asked))
        if len(self.counts) == 1 and len(everyone) > 1 and (None, False) not in self._asked:
            self._asked.add((None, False))
            alone = replace(question, cluster=self.base.cluster.only([self.best.plan.devices[0]]))
            self.known.extend(self.ask(f"one {everyone[0].model}", alone))

    def ask_changes(self) -> None:
        for change in self._changes():
            found = self.ask(change.setting, change.question)
            stays = [] if change.question.cluster is self.base.cluster else [self.best]  # the plan is possible there too
            self.answered.extend((change, each) for each in (*found, *stays)[:1])

    def ask_again(self) -> bool:
        """Asks for `base` once more, with the strategies that are best on other devices or links; whether that is better."""
        looked_at, before = {each.strategy for each in self.known}, self.best.value
        elsewhere = (each for change, each in self.answered if change.question.cluster is not self.base.cluster)
        start = [each for each in elsewhere if each.strategy not in looked_at and each.kinds <= self.counts.keys()]
        if start:
            once = replace(self.base, config=self.base.config.with_values({"planning.effort": 1}))
            self.known.extend(self.ask("the whole cluster once more", once, start))
        return self.best.value < before

    def _of(self, kind: Device, *, used: bool) -> Answer | None:
        """The best known plan with a device type, or without it."""
        found = (each for each in self.known if (kind in each.kinds) is used)
        setting = f"{'with' if used else 'without'} the {self.names[kind]}"
        return next((replace(each, setting=setting) for each in sorted(found, key=lambda each: each.value)), None)

    @property
    def _alone(self) -> Answer | None:
        """The best known plan on one device, of several that are alike."""
        found = [each for each in self.known if len(each.plan.devices) == 1]
        model = self.base.cluster.devices[0].model
        return replace(min(found, key=lambda each: each.value), setting=f"one {model}") if found else None

    def _changes(self) -> Iterator[_Change]:
        """What people can change, one thing each."""
        own, cluster = self._question, self.base.cluster
        yield from self._half()
        rows = FACTOR * own.rows
        if rows <= MOST_ROWS and own.objective.name != "memory":
            yield _Change("batch", "rows", f"a global batch of {rows} rows", replace(own, rows=rows))
        yield from self._more()
        if len(cluster.hosts) > 1:
            faster = replace(own, cluster=faster_between(cluster, FACTOR))
            yield _Change("link", "between hosts", "links between hosts twice as fast", faster)
        if len(cluster.devices) > 1 and self.best.step.redundancy is None:
            copied = replace(own, config=own.config.with_values({"memory.redundancy": 1}))
            yield _Change("redundancy", "memory.redundancy", "memory.redundancy: 1", copied)

    def _half(self) -> Iterator[_Change]:
        """Half precision, where the model computes in float32 because nothing was said."""
        own = self._question
        is_full = any(each.spec.dtype == "float32" for each in self.base.graph.parameters)
        if self.recapture is None or not is_full or "precision.dtype" in own.config.explicit or own.config.cluster.profile is not None:
            return
        chosen = compute_type(own.config.with_values({"precision.dtype": "auto"}), own.cluster)
        if chosen is None:
            return
        half = next(name for name, dtype in HALVES.items() if dtype == chosen.dtype)
        config, setting = own.config.with_values({"precision.dtype": half}), f"precision.dtype: {half}"
        try:
            graph = self.recapture(config)
        except WhaleError:
            return
        yield _Change("precision", "precision.dtype", setting, replace(own, graph=graph, config=config))

    def _more(self) -> Iterator[_Change]:
        """One more device of each type; of a slowed one, its devices at full speed."""
        own, cluster = self._question, self.base.cluster
        fastest = sorted(self.counts, key=lambda kind: -kind.slowdown * kind.reached_flops("float32"))[:MOST_TYPES]
        for kind, name in ((kind, name) for kind, name in cluster.kind_names.items() if kind in fastest):
            if kind.slowdown > 1:
                cured = cluster.slowed({device.name: 1.0 for device in cluster.devices if device.kind == kind})
                yield _Change("speed", name, f"the {self.names[kind]} at full speed", replace(own, cluster=cured))
            else:
                more, where = one_more(cluster, kind)
                yield _Change("more", name, f"one more {name} {where}", replace(own, cluster=more))

    @property
    def facts(self) -> Iterator[Answer]:
        """The best known answers to what was asked."""
        both = (self._of(kind, used=used) for kind in self.types for used in (True, False))
        alone = (self._alone,) if (None, False) in self._asked else ()
        yield from (each for each in (*both, *alone) if each is not None)
        yield from (answer for _, answer in self._compared)

    @cached_property
    def _compared(self) -> Sequence[tuple[_Change, Answer]]:
        """The changes and their answers; of other devices or links the best plan as it is, where that is better there."""
        return [(change, self._at_least(change, answer)) for change, answer in self.answered]

    def _at_least(self, change: _Change, answer: Answer) -> Answer:
        if change.question.cluster is self.base.cluster:
            return answer
        value = change.question.value_of(self.best.plan)
        return answer if answer.value <= value else replace(self.best, setting=change.setting, value=value)

    def devices(self) -> Iterator[Advice]:
        """Whether each device type is worth using."""
        for kind in self.types:
            used, unused = self._of(kind, used=True), self._of(kind, used=False)
            yield self._used_line(kind, used, unused) if kind in self.best.kinds else self._unused_line(kind, used)
        if (None, False) in self._asked:
            yield self._several_line()

    def _used_line(self, kind: Device, used: Answer | None, unused: Answer | None) -> Advice:
        assert used is not None, "the best plan uses it"
        name, text, them = self.names[kind], self.base.objective.text, self._them(kind)
        if unused is None:
            says = f"use {self._subject(kind)}: no plan without {them} was found ({text(used.value)} with {them})"
            return Advice("devices", name, says, used.value, None)
        ratio = unused.value / used.value
        if ratio < WORTH:
            return self._as_good(kind, used, unused)
        says = f"use {self._subject(kind)}: {ratio:.2f}x ({self._numbers(kind, used, unused)})"
        return Advice("devices", name, says, used.value, unused.value)

    def _unused_line(self, kind: Device, used: Answer | None) -> Advice:
        name, text, them, best = self.names[kind], self.base.objective.text, self._them(kind), self.best
        if used is None:
            says = f"leave the {name} out: no plan with {them} was found ({text(best.value)} without {them})"
            return Advice("devices", name, says, best.value, None)
        if used.value < WORTH * best.value:
            return self._as_good(kind, used, best)
        worse = "slower" if self.base.objective.name == "step_time" else "worse"
        numbers = f"{used.value / best.value - 1:.0%} {worse} ({self._numbers(kind, used, best)}; {used.strategy}: {shares(used.step)})"
        return Advice("devices", name, f"leave the {name} out: {numbers}", best.value, used.value)

    def _as_good(self, kind: Device, used: Answer, unused: Answer) -> Advice:
        name = self.names[kind]
        says = f"the {name} may be left out: the others alone are as good ({self._numbers(kind, used, unused)})"
        return Advice("devices", name, says, unused.value, used.value)

    def _several_line(self) -> Advice:
        """For devices that are all alike: several against one of them."""
        (kind,), text, best, alone = self.counts, self.base.objective.text, self.best, self._alone
        if alone is None:
            says = f"use {self._subject(kind)}: one alone has no plan ({text(best.value)} together)"
            return Advice("devices", self.names[kind], says, best.value, None)
        ratio = alone.value / best.value
        if ratio < WORTH:
            numbers = f"{text(alone.value)}, {text(best.value)} on {len(best.plan.devices)}"
            return Advice("devices", self.names[kind], f"one {kind.model} is as good ({numbers})", alone.value, best.value)
        says = f"use {self._subject(kind)}: {ratio:.2f}x one ({text(best.value)}, {text(alone.value)} on one)"
        return Advice("devices", self.names[kind], says, best.value, alone.value)

    def _numbers(self, kind: Device, used: Answer, unused: Answer) -> str:
        text, them = self.base.objective.text, self._them(kind)
        return f"{text(used.value)} with {them}, {text(unused.value)} without"

    def _subject(self, kind: Device) -> str:
        used = sum(self.base.cluster.by_name[name].kind == kind for name in self.best.plan.devices)
        return f"the {self.names[kind]}" if used == self.counts[kind] else f"{used} of the {self.names[kind]}"

    def _them(self, kind: Device) -> str:
        return "them" if self.counts[kind] > 1 else "it"

    def gains(self) -> Iterator[Advice]:
        """What each change brings; those that bring nothing on one line."""
        nothing, now = list[str](), self.base.objective.text(self.best.value)
        for change, answer in self._compared:
            if change.about == "redundancy":
                yield from self._copies(answer)
                continue
            value, beside = answer.value, self.best.value
            if change.about == "batch":
                value, beside = (self.base.objective.of_sample(own.value, own.plan.planned_rows) for own in (answer, self.best))
            if beside < WORTH * value:
                nothing.append(change.setting)
                continue
            numbers = f"{self.base.objective.text(answer.value)}, {now} now"
            if change.about == "batch" and self.base.objective.name == "step_time":
                numbers = f"{format_rate(1 / value)} samples per second, {format_rate(1 / beside)} now"
            yield Advice(change.about, change.subject, f"{change.setting}: {beside / value:.2f}x ({numbers})", value, beside)
        if nothing:
            says = f"no gain above {WORTH - 1:.0%} was found from {'; '.join(nothing)} ({now} now)"
            yield Advice("none", "; ".join(nothing), says, self.best.value, None)

    def _copies(self, answer: Answer) -> Iterator[Advice]:
        if (copies := answer.step.redundancy) is not None:
            text = self.base.objective.text
            says = f"memory.redundancy: 1 {copies}: {answer}, {text(self.best.value)} without"
            yield Advice("redundancy", f"any one {copies.survives}", says, answer.value, self.best.value)

    def what_fits(self) -> Iterator[Advice]:
        """What would make a model fit that does not."""
        own, nothing = self._question, list[str]()
        offloaded = replace(own, config=own.config.with_values({"memory.offload": "auto"}))
        hosts = _Change("state", "memory.offload", "memory.offload: auto", offloaded)
        asked = () if "memory.offload" in own.config.explicit else (hosts,)
        for change in chain(asked, self._half(), self._more()):
            found = self.ask(change.setting, change.question)
            if not found:
                nothing.append(change.setting)
                continue
            says = f"{change.setting}: then it fits ({own.objective.text(found[0].value)}; {found[0].state})"
            yield Advice(change.about, change.subject, says, found[0].value, None)
        if nothing:
            yield Advice("none", "; ".join(nothing), f"nothing fits either with {'; '.join(nothing)}", None, None)
        yield self._memory()

    def _memory(self) -> Advice:
        """The least memory per device that trains the model."""
        self.tell("the least memory")
        base = self._question
        config, roomy = base.config.with_values({"planning.objective": "memory"}), with_plenty(base.cluster)
        small = search(base.graph, roomy, config, rows=base.rows)
        need = small.value / Costs.of(base.config).memory_fraction
        there = max(device.memory for device in base.cluster.devices)
        says = f"the model would train on devices of {format_bytes(need)}: {small.strategy} (the largest has {format_bytes(there)})"
        return Advice("memory", "the fullest device", says, need, float(there))


def of_depth(sizes: Sequence[Largest]) -> Advice:
    """How deep the model may become; `sizes` as `largest` yields them, from the state that needs most device memory to the least."""
    most, plain = max(each.num_blocks for each in sizes), sizes[0]
    best = next(each for each in sizes if WORTH * each.num_blocks >= most)  # no more is shared out or on hosts than brings something
    told = [f"memory.zero: {own.zero}, memory.offload: {own.offload}, {format_seconds(own.step.step_seconds)}" for own in (best, plain)]
    says = f"with {best.num_blocks} blocks, {best.num_parameters / 1e6:,.0f} M parameters, the model still trains ({told[0]}"
    beside = "" if best is plain else f"; with {plain.num_blocks}: {told[1]}"
    return Advice("depth", "blocks", f"{says}{beside})", float(best.num_blocks), float(plain.num_blocks))


def shares(step: StepEstimate) -> str:
    """What the devices that compute longest do during a step, in shares of it."""
    slow = step.straggler
    waits = [("messages", slow.exposed / step.step_seconds), ("other devices", step.idle(slow) / step.step_seconds)]
    told = [f"{format_share(share)} for {what}" for what, share in waits if round(100 * share)]
    computes = f"{slow.name} {slow.does('computes')} {format_share(slow.busy / step.step_seconds)} of the step"
    return f"{computes} and {slow.does('waits')} {' and '.join(told)}" if told else computes
