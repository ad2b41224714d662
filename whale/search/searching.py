"""The search: arrangements in the order of what they promise, planned and estimated, until no other can be better.

space       line-ups of replicas over kinds of devices, orders, numbers of micro-batches
   | bounds      what no plan can beat: of a line-up, then of each of its arrangements; what surely does not fit falls out
   | rough       what a step would take if the model could be cut anywhere
   | sketch      what a step roughly takes: the stages cut, messages and sums in closed form
   | naming      devices for the ranks, in every way that may differ
   | planning    cuts, rows, recomputation, split axes; the event simulation judges
Found
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice
from whale.planning.collecting import without_collecting
from whale.planning.replicas.joining import mixes_samples
from whale.planning.seating import Seater
from whale.search.arrangement import Arrangement
from whale.search.bounds.bounds import Bounds
from whale.search.bounds.scoped import ScopedBounds
from whale.search.divided import DividedRun, is_divided
from whale.search.failure import failure, failure_divided
from whale.search.found import Found
from whale.search.front import Front
from whale.search.objective import objective_of
from whale.search.progress import Progress
from whale.search.run import Run
from whale.search.sketch.links import Ties
from whale.search.sketch.pieces import pieces_of
from whale.search.sketch.sketch import Sketches
from whale.search.space.freedom import freedom_of
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
        effort: how many plans to make at most, large ones counting for several, and six more while nothing fits; None for
            ``planning.effort``.
        start: arrangements that are good on a cluster like this one: they are planned first, whatever effort that takes, wherever scopes
            leave arrangements to the search.
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
    freedom = freedom_of(config, mixes_samples=mixes_samples(prices))
    seater = Seater(prices, freedom.config, num_rows)
    bounds = Bounds(prices, seater.structure, seater.points, num_rows)
    space = Space(cluster, freedom, num_rows, seater.points.num_units)
    objective = objective_of(config.planning.objective, cluster, bounds)
    left = config.planning.effort if effort is None else effort
    sketches = Sketches(prices, pieces_of(bounds.columns, seater.points), Ties(prices), num_rows, freedom.recomputes)
    front = Front(space, bounds, sketches, objective)
    if is_divided(graph, config):
        ways = ways_of(graph, cluster, config, freedom, num_rows)
        scoped = ScopedBounds(bounds, config)
        run_divided = DividedRun(
            objective=objective, effort=left, num_arrangements=ways.count, tell=tell, prices=prices, config=config, ways=ways, bounds=scoped
        )
        return _found_divided(run_divided, front)
    promising = front.promising()
    num_arrangements = front.num_arrangements
    run = Run(
        freedom=freedom, cluster=cluster, seater=seater, objective=objective, effort=left, num_arrangements=num_arrangements, tell=tell
    )
    run.takes_apart = (freedom.micro_batches or 1) > 1 or not config.communication.gather_rows
    known = front.known(start)
    run.look_at(known)
    planned = {look.arrangement for look in known}
    run.look_at([look for look in promising if look.arrangement not in planned])
    with run.kept():
        if not run.was_interrupted:
            run.look_at(front.below(math.inf if run.best is None else run.best.value, run.reach))
    run.settle()
    if run.best is None:
        raise failure(run.faults, space, front.lineups, bounds, sketches)
    value = run.best.value
    closed = run.done(lambda: front.closed(value))
    unproven = [look.bound for look in run.unproven if look.bound < value] + [each.bound for each in closed for _ in range(each.number)]
    with run.kept():  # of an interrupted search bounds are left as rough as they are
        unproven = unproven if run.was_interrupted else run.open_bounds(closed)
    return _found(run, unproven)


def _found_divided(run: DividedRun, front: Front) -> Found:
    run.look()
    run.settle()
    if run.best is None:
        nearest = run.nearest()
        if nearest is None:
            raise run.faults[0]
        raise failure_divided(*nearest, front.space, front.lineups, front.bounds, front.sketches)
    return _found(run, run.done(run.unproven))


def _found(run: Progress, unproven: Sequence[float]) -> Found:
    """The outcome, once there is a plan.

    Args:
        unproven: what arrangements that might be better surely come to; 0 where nothing is known.
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
        bound=min((best.value, *unproven)),
        others=tuple(ranked),
        num_arrangements=run.num_arrangements,
        num_planned=run.num_planned,
        num_unproven=len(unproven),
        was_interrupted=run.was_interrupted,
    )
    return replace(found, plan=replace(found.plan, choices=(_explain(found), *found.plan.choices)))


def _explain(found: Found) -> Choice:
    reasons = found.reasons[: -len(found.runners_up) or None]
    interrupted = f"{reasons[0]}; " if found.was_interrupted else ""
    return Choice(
        "search",
        "arrangement",
        str(found.arrangement),
        cost=f"{found.num_planned} plans of {found.num_arrangements} arrangements estimated",
        bound=f"{interrupted}{reasons[-1]}",
        runner_up="; ".join(map(str, found.runners_up)),
    )
