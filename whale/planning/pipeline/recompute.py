"""Which activations are recomputed in the backward pass: by the user's policy, or as memory demands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Protocol, TypeVar

import numpy as np

from whale.config.keys import ByName, Recomputation
from whale.errors import ConfigError, first_few, raise_faults
from whale.estimate import Line
from whale.estimate.costs.line import Floats
from whale.estimate.memory.memory import saved_lines
from whale.estimate.prices.budget import Budget
from whale.estimate.prices.part import NOTHING, Alive, Recompute, Segment
from whale.estimate.prices.prices import PartCost, Prices
from whale.ir.graph import ModelGraph
from whale.ir.patterns import module_match
from whale.ir.schedule import Kind
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.pipeline.segments import find_blocks, find_cores, find_modules, find_regions
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Assignment
from whale.schedules import BUILDERS, build

Value = TypeVar("Value", Line, Floats)

Recomputes = tuple[Recompute, ...]
"""Per stage of a replica."""


@dataclass(frozen=True)
class Policy:
    """What recomputes inside stages. Whole stages recomputed by R actions are in `PipelineShape.recomputed`."""

    # none, selective (attention cores), shares (of each stage's blocks), modules (by name) or auto (blocks as memory demands)
    kind: str = "none"
    shares: Mapping[int, float] | None = None  # by stage; 0 for others
    selective: frozenset[int] = frozenset()  # stages whose attention cores recompute, where others differ
    modules: ByName = ()  # by pattern of their names, whether they recompute

    def share(self, stage: int) -> float:
        """The share of a stage's blocks that recompute; under ``auto``, before stages are cut, the most."""
        return (self.shares or {}).get(stage, 1.0 if self.kind == "auto" else 0.0)


KEEP_ALL = Policy()

MOST = "most"  # the most that can be recomputed: whole stages where the schedule does that, else every block
EVERY_BLOCK = "every block"  # the same, but no whole stages: 1F1B in place of a schedule that recomputes them


def open_depths(schedules: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Policies tried besides ``auto`` itself where replicas have these schedules: keep all, recompute most, and what a schedule itself
    recomputes. Under one that recomputes by itself none keeps all, unless memory decides so; whole stages may hold more than blocks.
    """
    by_itself = any(BUILDERS[name].recomputes for name in schedules)
    return ((), (MOST, EVERY_BLOCK), ("full",)) if by_itself else (("none",), (MOST,), ())


def at_depth(policy: Recomputation, pipeline: PipelineShape, graph: ModelGraph) -> tuple[PipelineShape, Policy]:
    """A pipeline under one of `open_depths`, or another policy, and the policy in it. Raises ConfigError as `read_policy`."""
    if policy != EVERY_BLOCK:
        return pipeline, read_policy(policy, pipeline, graph)
    plain = pipeline.recomputing(()) if pipeline.recomputes_by_itself else pipeline
    return plain, read_policy(MOST, plain, graph)


def read_policy(policy: Recomputation, pipeline: PipelineShape, graph: ModelGraph) -> Policy:
    """The policy of ``recompute.policy`` in a pipeline.

    Raises:
        ConfigError: it names stages or modules that do not exist, or asks for parts of stages where the schedule recomputes whole ones.
    """
    if policy == MOST and pipeline.recomputes_by_itself:
        return Policy("shares", {stage: 1.0 for stage, alive in enumerate(pipeline.recomputed) if not alive})
    if policy == MOST:
        policy = "blocks"
    if isinstance(policy, str) and policy in ("none", "full"):
        return KEEP_ALL
    if pipeline.recomputes_by_itself and policy == "auto":
        return Policy("auto")
    if pipeline.recomputes_by_itself:
        asked = policy if isinstance(policy, str) else dict(policy)
        raise ConfigError(
            f"recompute.policy: {asked} cannot be used with schedule {pipeline.schedule}, which recomputes whole stages",
            hint="set recompute.policy: auto, for as little as memory needs; full; or by stage, full for at least one",
        )
    if policy == "blocks":
        return Policy("shares", dict.fromkeys(range(pipeline.num_stages), 1.0))
    if isinstance(policy, str):
        return Policy(policy)
    if modules := tuple((name, str(word)) for name, word in policy if isinstance(name, str)):
        _check_modules([pattern for pattern, _ in modules], graph)
        return Policy("modules", modules=modules)
    last, by_stage = pipeline.num_stages - 1, {stage: share for stage, share in policy if isinstance(stage, int)}
    raise_faults([ConfigError(f"recompute.policy names stage {stage}; the last stage is {last}") for stage in by_stage if stage > last])
    shares = {stage: share if isinstance(share, float) else float(share == "blocks") for stage, share in by_stage.items()}
    return Policy("shares", shares, frozenset(stage for stage, share in by_stage.items() if share == "selective"))


def _check_modules(patterns: Sequence[str], graph: ModelGraph) -> None:
    """Each pattern but the last must have a module."""
    paths = dict.fromkeys(op.module for op in graph.ops if op.kind == "call")
    used = {module_match(patterns, path)[0] for path in paths}
    if idle := [pattern for pattern in patterns[:-1] if pattern not in used]:
        named = first_few([path for path in paths if path])
        raise ConfigError(
            f"recompute.policy: no op is in a module for {', '.join(map(repr, idle))} (the first pattern counts that matches the module "
            "of an op, or one around it)",
            hint=f"the modules are {named}" if named else "all ops are in the model itself, which has no modules inside",
        )


def kept_under(prices: Prices, policy: Policy) -> Mapping[str, tuple[str, ...]]:
    """Per op of the whole graph, what it keeps for backward under the policy, so far as it is known before stages are."""
    if policy.kind not in ("selective", "modules") or prices.costs.offloads_activations:
        return prices.kept_there
    graph, kept = prices.graph, dict(prices.kept)
    calls = [op.name for op in graph.ops if op.kind == "call"]
    is_named = policy.kind == "modules"
    for core in find_modules(graph, calls, policy.modules) if is_named else find_cores(graph, calls, prices.activations):
        inside = set(core)
        read = [graph.storage[source] for name in core for source in graph.by_name[name].inputs if source not in inside]
        kept |= dict.fromkeys(core, ())
        kept[core[0]] = tuple(name for name in dict.fromkeys(read) if graph.by_name[name].kind == "call")
    return kept


class PricesParts(Protocol):
    """Prices of each device's part of a split stage, with its cuts chosen."""

    def __call__(
        self, assignment: Assignment, stage: int, placed: Placed, num_rows: float, recomputes: Recomputes, cut_for: Recomputes
    ) -> Sequence[PartCost]:
        """The parts.

        Args:
            num_rows: of a micro-batch.
            recomputes: of each stage; those on other devices do not matter.
            cut_for: the same, with which the cuts must fit.
        """


@dataclass(frozen=True)
class Chooser:
    """Chooses what each stage of a replica recomputes; `price_parts` prices split stages."""

    prices: Prices
    pipeline: PipelineShape
    policy: Policy
    price_parts: PricesParts
    budget: Budget

    def choose(self, placed: Placed, assignment: Assignment, num_rows: int, margin: float) -> Recomputes:
        """What each stage recomputes.

        Args:
            placed: the devices of each rank.
            assignment: the ops of each stage.
            num_rows: of a micro-batch.
            margin: share of the devices' memory to use; 0 recomputes all that can be.
        """
        stages, whole = range(self.pipeline.num_stages), self.pipeline.recomputed
        if any(whole) and self.policy.kind not in ("shares", "auto"):
            return tuple(Recompute(num_alive=alive) for alive in whole)
        if self.policy.kind == "selective":
            return tuple(Recompute(self._cores(assignment, stage)) for stage in stages)
        if self.policy.kind == "modules":
            return tuple(Recompute(find_modules(self.prices.graph, assignment.parts[stage].ops, self.policy.modules)) for stage in stages)
        if self.policy.kind == "shares":
            return tuple(
                Recompute(num_alive=whole[stage]) if whole[stage] else self._share(placed, assignment, stage, num_rows) for stage in stages
            )
        if self.policy.kind == "auto":
            needed: dict[int, Recompute] = {}
            for rank in range(self.pipeline.num_ranks):
                needed |= self._as_needed(placed, assignment, rank, num_rows, margin)
            return tuple(needed[stage] for stage in stages)
        return tuple(Recompute(find_regions(self.prices.graph, assignment.parts[stage].ops)) for stage in stages)

    def _share(self, placed: Placed, assignment: Assignment, stage: int, num_rows: int) -> Recompute:
        if stage in self.policy.selective:
            return Recompute(self._cores(assignment, stage))
        blocks = self._by_worth(placed, assignment, {stage: self._blocks(assignment, stage, num_rows)}, num_rows)
        return self._first(assignment, blocks, ceil(self.policy.share(stage) * len(blocks) - 1e-9), (stage,))[stage]

    def _as_needed(self, placed: Placed, assignment: Assignment, rank: int, num_rows: int, margin: float) -> dict[int, Recompute]:
        """For the stages of a rank, the fewest attention cores or blocks with which they fit, whichever costs less time.

        Where the schedule has R actions for them, these are a third way: of all ops, but partly while the rank would wait.
        """
        stages = self.pipeline.stages_of(rank)
        width = max(map(self.pipeline.width, stages))

        def fits(recomputes: Mapping[int, Recompute], cut_for: Mapping[int, Recompute]) -> bool:
            """Whether the devices, or their split groups, can together take the rows of a micro-batch."""
            room = [
                min(floor((margin * self.prices.capacity(name, self.budget) - each.fixed) / max(each.per_row, 1e-9)) for each in need)
                for name, need in zip(placed[rank], self._needs(placed, assignment, rank, recomputes, cut_for, num_rows), strict=True)
            ]
            rows = [min(room[start : start + width]) for start in range(0, len(room), width)]
            return min(rows) >= 1 and sum(min(count, num_rows) for count in rows) >= num_rows

        fitting: list[tuple[float, dict[int, Recompute]]] = []
        everything: dict[int, Recompute] = {}
        for find in (self._cores, lambda assignment, stage: self._blocks(assignment, stage, num_rows)):
            candidates = self._by_worth(placed, assignment, {stage: find(assignment, stage) for stage in stages}, num_rows)
            few, many = 0, len(candidates)
            everything = self._first(assignment, candidates, many, stages)
            if margin == 0 or not fits(everything, everything):
                continue
            while few < many:  # all with the cuts that fit with everything recomputed: to cut a stage takes long
                middle = (few + many) // 2
                if fits(self._first(assignment, candidates, middle, stages), everything):
                    many = middle
                else:
                    few = middle + 1
            step = 1
            while width > 1 and many >= step:  # cut for what is recomputed, a stage may hold less
                fewer = self._first(assignment, candidates, many - step, stages)
                if not fits(fewer, fewer):
                    break
                many, step = many - step, 2 * step
            found = self._first(assignment, candidates, many, stages)
            fitting.append(
                (sum(self._seconds(placed[rank], assignment, stage, recomputed, num_rows) for stage, recomputed in found.items()), found)
            )
        whole = {stage: Recompute(num_alive=self.pipeline.recomputed[stage]) for stage in stages}
        if all(each.num_alive for each in whole.values()):
            if margin and fits(whole, whole):
                seconds = sum(self._seconds(placed[rank], assignment, stage, own, num_rows) for stage, own in whole.items())
                fitting.append((seconds * (1 - self._hidden_share(rank)), whole))
            elif not fitting:
                everything = min((everything, whole), key=lambda own: self._most_held(placed, assignment, rank, own, num_rows))
        return min(fitting, key=lambda each: each[0])[1] if fitting else everything

    def _hidden_share(self, rank: int) -> float:
        """Of the R actions of a rank, those that do not wait for the gradient."""
        pipeline = self.pipeline
        order = build(pipeline.schedule, num_ranks=pipeline.num_ranks, num_micro_batch=pipeline.num_micro_batch)
        return sum(action.kind is Kind.RECV_BACKWARD for action in order.ranks[rank]) / pipeline.num_micro_batch

    def _most_held(self, placed: Placed, assignment: Assignment, rank: int, recomputes: Mapping[int, Recompute], num_rows: int) -> float:
        """The most bytes on a device of a rank, with equal parts of the rows."""
        rows = num_rows / len(placed[rank])
        needs = self._needs(placed, assignment, rank, recomputes, recomputes, num_rows)
        return max(line.at(rows) for need in needs for line in need)

    def _blocks(self, assignment: Assignment, stage: int, num_rows: int) -> tuple[Segment, ...]:
        rows, prices = self._rows(stage, num_rows), self.prices
        ops = assignment.parts[stage].ops
        return find_blocks(prices.graph, prices.outputs, ops, prices.kept, self.pipeline.in_flight[stage], rows)

    def _cores(self, assignment: Assignment, stage: int) -> tuple[Segment, ...]:
        return find_cores(self.prices.graph, assignment.parts[stage].ops, self.prices.activations)

    def _by_worth(
        self, placed: Placed, assignment: Assignment, segments: Mapping[int, Sequence[Segment]], num_rows: int
    ) -> list[tuple[int, Segment]]:
        """Segments of all stages in one list, most freed bytes per second of recomputation first."""
        ranked = []
        for stage, found in segments.items():
            names = placed[self.pipeline.stage_rank[stage]]
            rows, in_flight = self._rows(stage, num_rows), self.pipeline.in_flight[stage]
            lines = saved_lines(self.prices.graph, self.prices.outputs, assignment.parts[stage].ops, self.prices.kept, found)
            for index, (segment, line) in enumerate(zip(found, lines, strict=True)):
                saved = in_flight * line.at(rows)
                seconds = self._seconds(names, assignment, stage, Recompute((segment,)), num_rows)
                if saved > 0:
                    ranked.append((-float(f"{saved / max(seconds, 1e-12):.3g}"), stage, index, segment))
        return [(stage, segment) for _, stage, _, segment in sorted(ranked)]

    def _first(
        self, assignment: Assignment, candidates: Sequence[tuple[int, Segment]], count: int, stages: Iterable[int]
    ) -> dict[int, Recompute]:
        """The first `count` candidates, by stage, in the order of the ops."""
        found: dict[int, Recompute] = {}
        for stage in stages:
            position = {name: index for index, name in enumerate(assignment.parts[stage].ops)}
            own = [segment for other, segment in candidates[:count] if other == stage]
            found[stage] = Recompute(tuple(sorted(own, key=lambda segment: position[segment[0]])))
        return found

    def _needs(
        self,
        placed: Placed,
        assignment: Assignment,
        rank: int,
        recomputes: Mapping[int, Recompute],
        cut_for: Mapping[int, Recompute],
        num_rows: int,
    ) -> Iterator[tuple[Line, ...]]:
        """Per device of a rank its bytes, by the rows of its split group."""
        pipeline, count = self.pipeline, len(placed[rank])
        width = max(map(pipeline.width, recomputes))
        if width == 1:
            costs = [
                (self.prices.part(assignment.parts[stage], self._rows(stage, num_rows), own, self.budget, waits=alive.waiting > 0), alive)
                for stage, own in recomputes.items()
                for alive in (pipeline.alive(stage),)
            ]
            twice = self.prices.held_twice([assignment.parts[stage] for stage in recomputes], self.budget)
            yield from [rank_memory(costs, twice)] * count
            return
        every, tightest = (tuple(own.get(stage, NOTHING) for stage in range(pipeline.num_stages)) for own in (recomputes, cut_for))
        parts = {stage: self.price_parts(assignment, stage, placed, num_rows, every, tightest) for stage in recomputes}
        for index in range(count):
            # where a stage is split over fewer devices than another on them, each takes its part of the rows of the wider group
            own = ((part[index].with_rows(pipeline.width(stage) / width), pipeline.alive(stage)) for stage, part in parts.items())
            yield rank_memory(own)

    def _seconds(self, names: Sequence[str], assignment: Assignment, stage: int, recompute: Recompute, num_rows: int) -> float:
        rows = self._rows(stage, num_rows)
        device = self.prices.cluster.by_name[names[0]]
        return self.prices.recomputing(assignment.parts[stage], recompute, device, rows).device.at(rows)

    def _rows(self, stage: int, num_rows: int) -> float:
        """Rows of a micro-batch per device of a stage, or per split group."""
        return max(1.0, num_rows / self.pipeline.num_groups(stage))


def expected_bytes(
    in_flight: Floats, recomputed: Floats, waiting: Floats, share: Floats, received: Floats, inside: Floats, entering: float
) -> Floats:
    """Activation bytes of pieces as stages, before their blocks are known.

    n blocks that all recompute keep in_flight x n x entering + inside / n; the best n makes both terms equal. Recomputed
    activations also wait for W, where that is separate.

    Args:
        in_flight, recomputed, waiting: micro-batches of each stage (`PipelineShape`).
        share: of each stage's blocks that recompute.
        received: bytes that enter a piece, for one micro-batch.
        inside: bytes that its ops keep for backward.
        entering: bytes that enter a block.
    """
    repeated = share * np.maximum(inside, 0.0)
    blocks = np.minimum(in_flight * repeated, 2 * np.sqrt(in_flight * entering * repeated))
    kept = in_flight * (received + inside - repeated) + blocks + waiting * repeated
    found: Floats = np.where(recomputed > 0, in_flight * received + recomputed * inside, kept)
    return found


def going_back(held: Value, gradients: Value, activation: Value) -> tuple[Value, Value]:
    """Bytes as the first of all micro-batches goes back and makes the gradients: before it, and when its activations are gone."""
    return held + gradients * -1, held + activation * -1


def rank_memory(costs: Iterable[tuple[PartCost, Alive]], held_twice: int = 0) -> tuple[Line, ...]:
    """Bytes on a device of one rank, by its rows, at the points of a step that may be its fullest.

    `held_twice`: of parameters that several of its stages count.

    All its stages hold their micro-batches in flight, one of which runs, and all gradients; or, of a single stage, the first of all its
    micro-batches goes back, and its gradients are coming.
    """
    given = list(costs)
    held = Line.sum(cost.held(alive) for cost, alive in given)
    (cost, alive), *others = given
    if others:
        return (held + Line(-float(held_twice)) + Line.largest(line for cost, alive in given for line in cost.at_work(alive)),)
    if cost.first is None or not alive.is_all:
        return tuple(held + line for line in cost.at_work(alive))
    coming, gone = going_back(held, Line(float(cost.gradient_bytes)), cost.activation)
    found = [coming + cost.working, coming + cost.first]
    if alive.in_flight > 1:
        found.append(gone + cost.working)
    return (*found, held + cost.waits) if alive.waiting else tuple(found)
