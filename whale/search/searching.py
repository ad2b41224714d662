"""The search: arrangements in the order of what closed forms promise; the first are planned and simulated, and the best is taken.

space       line-ups of replicas over kinds of devices, orders, numbers of micro-batches; what surely does not fit falls out
   | rough       what a step would take if the model could be cut anywhere
   | sketch      what a step roughly takes: the stages cut, messages and sums in closed form
   | naming      devices for the ranks, in every way that may differ
   | planning    cuts, rows, recomputation, split axes; the event simulation judges
Found
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whale.config import Config
from whale.errors import WhaleError
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice
from whale.planning.collecting import without_collecting
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.replicas.joining import mixes_samples
from whale.planning.seating import Seater
from whale.planning.shard.insisting import NothingToCut
from whale.search.arrangement import Arrangement
from whale.search.divided import DividedRun, is_divided
from whale.search.failure import failure, failure_divided
from whale.search.found import Found
from whale.search.front import Front
from whale.search.objective import LeastMemory, Objective, SmallestFirst, objective_of
from whale.search.progress import Progress
from whale.search.run import FreeRun
from whale.search.sketch.columns import columns_of
from whale.search.sketch.links import Ties
from whale.search.sketch.pieces import pieces_of
from whale.search.sketch.scoped import ScopedSketches
from whale.search.sketch.sketch import Sketches
from whale.search.space.freedom import FOR_MEMORY, Freedom, freedom_of
from whale.search.space.space import Space
from whale.search.space.ways import ways_of


@without_collecting()
def search(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    rows: int | None = None,
    effort: float | None = None,
    start: Sequence[Arrangement] = (),
    using: Device | None = None,
    tell: Callable[[str], None] | None = None,
) -> Found:
    """Finds the best plan, where scopes and the configuration leave a choice: by ``planning.objective``.

    What was set stays: scopes, replicas that are written down, micro-batches, order, stages, recomputation. Ctrl-C ends the search with the
    best plan so far, if there is one.

    Args:
        graph: the captured model.
        cluster: the devices there are; some may be left out.
        config: settings.
        rows: of the global batch; None for the example's.
        effort: how many plans to make at most, large ones counting for several, and six more while nothing fits, then as many again of
            those that take least memory; None for ``planning.effort``.
        start: arrangements that are good on a cluster like this one: they are planned first, whatever effort that takes, wherever scopes
            leave arrangements to the search.
        using: a kind of device that all plans must have; None for any.
        tell: is called after each arrangement with what was seen so far, in words.

    Raises:
        PlanError: nothing fits; it says how much memory is missing, and with how much more, or how many devices, something would fit.
        ConfigError: what is set leaves no arrangement.
        AnnotationError: scopes that cannot be honoured.
        ClusterError: what a sample costs is asked for, and a device has no price.
        WhaleError: the model can be divided in none of the ways.
    """
    num_rows = graph.num_rows if rows is None else rows
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    freedom = replace(freedom_of(config, mixes_samples=mixes_samples(prices)), using=using)
    seater = Seater(prices, freedom.config, num_rows)
    pieces = pieces_of(columns_of(prices, seater.structure), seater.points)
    sketches = Sketches(prices, pieces, Ties(prices), num_rows, freedom.recomputes)
    objective = objective_of(config.planning.objective, cluster, sketches)
    left = config.planning.effort if effort is None else effort
    question = _Question(config, seater, sketches, objective, left, tell)
    return question.divided(freedom) if is_divided(graph, config) else question.free(freedom, start)


@dataclass(frozen=True, eq=False)
class _Question:
    """What is looked for, and what all that look for it share."""

    config: Config
    seater: Seater
    sketches: Sketches
    objective: Objective
    effort: float
    tell: Callable[[str], None] | None

    def free(self, freedom: Freedom, start: Sequence[Arrangement]) -> Found:
        """The best arrangement.

        Where splits took all effort, and nothing could be cut, it is the best of those without; where none seems to fit, of those that
        take least memory.
        """
        run, front = self._arranged(freedom, self.objective, start)
        if run.best is None and any(isinstance(fault, NothingToCut) for fault in run.faults):
            freedom = replace(freedom, splits=False)
            seen, (run, _) = run, self._arranged(freedom, self.objective, start)
            run.faults += [fault for fault in seen.faults if not isinstance(fault, NothingToCut)]
        if run.best is not None:
            return _found(run)
        if smaller := self._smaller(freedom, run.faults):
            again, _ = self._arranged(smaller, SmallestFirst(self.objective, LeastMemory(self.sketches)), ())
            if again.best is not None:
                return _found(again, is_smallest_first=True)
            run.faults += again.faults
        raise failure(run.faults, front.space, front.lineups, self.sketches)

    def divided(self, freedom: Freedom) -> Found:
        """The best way around what the user has divided; likewise."""
        run = self._divided(freedom)
        if run.best is not None:
            return _found(run)
        if smaller := self._smaller(freedom, run.faults):
            again = self._divided(smaller)
            if again.best is not None:
                return _found(again, is_smallest_first=True)
            run.short |= again.short
        nearest = run.nearest()
        if nearest is None:
            raise run.faults[0]
        front = self._front(freedom, self.objective)
        raise failure_divided(*nearest, front.space, front.lineups, self.sketches)

    def _smaller(self, freedom: Freedom, faults: Sequence[WhaleError]) -> Freedom | None:
        """What may fit although nothing was found that does: what is computed again need not be left to what each device lacks."""
        is_short = any(isinstance(fault, MemoryShortage) for fault in faults)
        is_open = "recompute.policy" not in self.config.explicit and freedom.policies != FOR_MEMORY
        return replace(freedom, policies=FOR_MEMORY) if is_short and is_open else None

    def _front(self, freedom: Freedom, objective: Objective) -> Front:
        seater = self.seater
        return Front(Space(seater.cluster, freedom, seater.num_rows, seater.points.num_units), self.sketches, objective)

    def _arranged(self, freedom: Freedom, first_by: Objective, start: Sequence[Arrangement]) -> tuple[FreeRun, Front]:
        """Looks at arrangements.

        Args:
            first_by: what is likely the best by it is looked at first.
            start: arrangements that come before all others.
        """
        front, config, cluster = self._front(freedom, first_by), self.config, self.seater.cluster
        promising = front.promising()
        run = FreeRun(
            freedom=freedom,
            cluster=cluster,
            seater=self.seater,
            objective=self.objective,
            effort=self.effort,
            num_arrangements=front.num_arrangements,
            tell=self.tell,
        )
        run.takes_apart = (freedom.micro_batches or 1) > 1 or not config.communication.gather_rows
        known = front.known(start)
        run.look_at(known)
        planned = {look.arrangement for look in known}
        run.look_at([look for look in promising if look.arrangement not in planned])
        with run.kept():
            if not run.was_interrupted:
                run.look_at(front.others(run.value, run.reach))
        run.settle()
        return run, front

    def _divided(self, freedom: Freedom) -> DividedRun:
        """Looks at ways."""
        seater, config = self.seater, self.config
        ways = ways_of(seater.graph, seater.cluster, config, freedom, seater.num_rows)
        run = DividedRun(
            objective=self.objective,
            effort=self.effort,
            num_arrangements=ways.count,
            tell=self.tell,
            prices=seater.prices,
            config=config,
            ways=ways,
            sketches=ScopedSketches(self.sketches, config),
        )
        run.look()
        run.settle()
        return run


def _found(run: Progress, *, is_smallest_first: bool = False) -> Found:
    """The outcome, once there is a plan.

    Args:
        is_smallest_first: whether nothing seemed to fit, until what takes least memory was looked at first.
    """
    best = run.best
    assert best is not None
    ranked = sorted((each for each in run.drafts.values() if each.arrangement != best.arrangement), key=lambda each: each.rank)
    plan, step = run.done(best.draft.finished)
    found = Found(
        plan=plan,
        step=step,
        arrangement=best.arrangement,
        objective=run.objective,
        others=tuple(ranked),
        num_arrangements=run.num_arrangements,
        num_planned=run.num_planned,
        was_interrupted=run.was_interrupted,
        is_smallest_first=is_smallest_first,
    )
    return replace(found, plan=replace(found.plan, choices=(_explain(found), *found.plan.choices)))


def _explain(found: Found) -> Choice:
    return Choice(
        "search",
        "arrangement",
        str(found.arrangement),
        cost=found.effort,
        bound="; ".join(found.notes),
        runner_up="; ".join(map(str, found.runners_up)),
    )
