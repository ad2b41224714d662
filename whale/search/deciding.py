"""The plan of a run or a simulation, with its estimate: searched for, written by the user, or made before and verified.

In a range of row counts each is searched, and their times per sample are compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from whale.config import Config, read_plan
from whale.config.keys import choice_text, range_of
from whale.errors import BatchError, ConfigError, OutOfMemory, PlanError, WhaleError
from whale.estimate import Costs, StepEstimate, estimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, Replica, Stage, states_of
from whale.ir.serialization import decode, read_json
from whale.planning.explain.choices import explain_step
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.plan import plan_and_estimate
from whale.planning.pricing import with_figures
from whale.planning.verify.verify import verify
from whale.search.failure import with_blame
from whale.search.freedom import pin_of
from whale.search.open import is_divided
from whale.search.ranking import effort_of_plan
from whale.search.searching import SearchResult, search
from whale.units import counted, format_seconds

Planned = tuple[Plan, StepEstimate]

WORTH = 0.02
"""Share of a step that not recomputing anything must save, for plans to be looked for that shard more state than fits demands."""
COMPARED = 0.1
"""Share of the effort that goes to plans which shard more state than fits demands: they rarely gain, and large ones take long."""


def decide(
    plan: Plan | str | Path | None,
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    rows: int | None = None,
    runner_up: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> tuple[Plan, StepEstimate]:
    """The plan, and the estimate of its step.

    Args:
        plan: an existing plan (a value or a JSON file); or a YAML file, which fixes what it states; None plans, by a search
            where nothing says how the model is divided.
        graph: the captured model.
        cluster: to run on.
        config: settings.
        rows: of the global batch; None for the example's. An existing plan has its own.
        runner_up: which runner-up of the search to take, from 1; None for the best.
        tell: is called by a search with its progress.

    Raises:
        ConfigError: a written plan contradicts the model, the cluster or itself; or the objective needs a search and there is none.
        PlanError: the file cannot be read, the plan does not serve this model and cluster, or there is none.
    """
    is_written = isinstance(plan, (str, Path)) and Path(plan).suffix in (".yaml", ".yml")
    if plan is None or is_written:
        settings = config if plan is None else config.with_values(read_plan(str(plan)))
        pin = pin_of(settings)
        if pin is not None:
            _check_asked(pin, settings, runner_up)

        def planned(graph: ModelGraph, config: Config) -> tuple[Plan, StepEstimate]:
            def under(config: Config) -> tuple[Plan, StepEstimate]:
                if pin_of(config) is not None:
                    return plan_and_estimate(graph, cluster, config, rows=rows)
                is_compared = config.planning.effort < settings.planning.effort  # with a plan that fits
                return _searched(graph, cluster, config, rows, runner_up, tell, with_rule=not is_compared)

            compares = runner_up is None and config.planning.objective == "step_time" and config.planning.batch_rows is None
            least = without_recomputation(graph, cluster, config)
            return with_states(config, len(cluster.devices), under, may_compare=compares, least=least)

        try:
            return planned(graph, settings)
        except (PlanError, ConfigError, BatchError) as fault:
            raise with_blame(fault, graph, settings, planned) from None
    _check_asked("a plan that was made before", config, runner_up)
    return given_plan(plan, graph, cluster, config, rows)


def _searched(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    rows: int | None,
    runner_up: int | None,
    tell: Callable[[str], None] | None,
    *,
    with_rule: bool,
) -> tuple[Plan, StepEstimate]:
    if len(cluster.devices) == 1 and _asked(config, runner_up) is None:
        with contextlib.suppress(MemoryShortage):  # there is something to look for only where it does not fit as it is
            return plan_and_estimate(graph, cluster, config, rows=rows)
    if config.planning.batch_rows is not None:
        best = _best_batch(graph, cluster, config, rows, tell)
        return (best.plan, best.step) if runner_up is None else best.runner_up(runner_up)
    rule = ruled_plan(graph, cluster, config, rows) if with_rule else None
    try:
        found = search(graph, cluster, config, rows=rows, tell=tell)
    except KeyboardInterrupt:
        if rule is None or runner_up is not None:
            raise
        return _as_ruled(*rule, "the search was interrupted before it had a plan")
    if runner_up is not None:
        return found.runner_up(runner_up)
    if rule is not None and found.objective.of(*rule) < found.value:
        return _as_ruled(*rule, f"the best that was found is {found}")
    return found.plan, found.step


def _best_batch(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None, tell: Callable[[str], None] | None) -> SearchResult:
    """The search result for the best number of rows of the configured range."""
    ends = range_of(str(config.planning.batch_rows))
    assert ends is not None, "checked where it was read"
    if rows is not None:
        raise ConfigError(f"rows: {rows} and the range planning.batch_rows: {ends[0]}..{ends[1]} are both given")
    return best_batch(*ends, lambda number: search(graph, cluster, config, rows=number, tell=tell))


def ruled_plan(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None) -> tuple[Plan, StepEstimate] | None:
    """The plan without a search, where the search might not consider it; made before the search, which may be interrupted."""
    if config.pipeline.num_stages is None or is_divided(graph, config):  # it is in the space
        return None
    with contextlib.suppress(WhaleError):
        return plan_and_estimate(graph, cluster, config, rows=rows)
    return None


def _as_ruled(plan: Plan, step: StepEstimate, why: str) -> tuple[Plan, StepEstimate]:
    return replace(plan, choices=(Choice("search", "strategy", "the plan without a search", bound=why), *plan.choices)), step


def _asked(config: Config, runner_up: int | None) -> str | None:
    """What is asked for that only a search can give."""
    if config.planning.objective != "step_time":
        return f"planning.objective {config.planning.objective}"
    if config.planning.batch_rows is not None:
        return f"planning.batch_rows {config.planning.batch_rows}"
    return None if runner_up is None else "a runner-up"


def _check_asked(pin: str, config: Config, runner_up: int | None) -> None:
    asked = _asked(config, runner_up)
    if asked is not None:
        raise ConfigError(f"{asked} needs a search, but {pin} leaves nothing to search", hint=f"remove it, or {asked}")


def with_states(
    config: Config,
    num_devices: int,
    planned: Callable[[Config], Planned],
    *,
    may_compare: bool,
    least: Callable[[Plan], float],
) -> Planned:
    """The plan with as little sharded and offloaded as fits; with more where that is faster because less is recomputed.

        zero 0  -->  nothing fits, or much is recomputed  -->  zero 2  -->  nothing fits  -->  zero 3
             -->  nothing fits  -->  offload as needed, of the optimizer or of activations, whichever is faster:
                                     zero 0 or, where faster, zero 2, where each host steps a part
                                     -->  nothing fits  -->  zero 3
             -->  nothing fits  -->  offload as needed, of the optimizer and of weights, in the same order

    Args:
        config: settings; ``memory.zero`` and ``memory.offload`` may be ``auto``.
        num_devices: of the cluster.
        planned: makes the plan of settings that leave neither open; with less effort where it is only compared with one that fits.
        may_compare: whether a plan that fits may give way to a faster one that shards more.
        least: seconds of a step of a plan if nothing were recomputed.

    Raises:
        OutOfMemory: nothing fits; of the state that needs least.
        WhaleError: there is no plan for another reason.
    """
    zero, is_open = config.memory.zero, config.memory.offload == "auto"
    as_needed = is_open or config.memory.offload_as_needed
    levels = ("0", "2", "3") if zero == "auto" and num_devices > 1 else ("0" if zero == "auto" else zero,)
    lacking: OutOfMemory | None = None

    def gains(plan: Plan, step: StepEstimate) -> bool:
        """Whether a step that recomputes nothing would be enough shorter, and plans like this take no more than the effort."""
        is_small = effort_of_plan(plan) <= config.planning.effort
        return is_small and _computes_again(plan, config) and least(plan) < (1 - WORTH) * step.step_seconds

    def at_home(home: str) -> Planned | None:
        """The plan with the level of ``memory.zero`` that is least, or fastest; None where none fits."""
        nonlocal lacking
        found: Planned | None = None
        for level in levels:
            if found is not None and level == "3":
                break
            own = config.with_values({"memory.zero": level, "memory.offload": home, "memory.offload_as_needed": as_needed})
            if found is not None:
                own = own.with_values({"planning.effort": max(1, round(COMPARED * config.planning.effort))})
            try:
                other = planned(own)
            except OutOfMemory as fault:
                lacking = fault
                continue
            if found is None:
                found = other if lacking is None else _because(other, choice_text(level), home, "nothing fits otherwise")
            elif other[1].step_seconds < found[1].step_seconds:
                found = _because(other, choice_text(level), home, f"{format_seconds(found[1].step_seconds)} where nothing is shared out")
            if not may_compare or not ((is_open and home == "optimizer") or (level != levels[-1] and gains(*found))):
                break
        return found

    for homes in (("none",), ("optimizer", "activations"), ("optimizer+parameters",)) if is_open else ((config.memory.offload,),):
        best: Planned | None = None
        for home in homes:
            found = at_home(home) if best is None or may_compare else None
            if best is None or (found is not None and found[1].step_seconds < best[1].step_seconds):
                best = found
        if best is not None:
            return best
    assert lacking is not None
    raise lacking


def _because(planned: Planned, zero: str, offload: str, reason: str) -> Planned:
    plan, step = planned
    trained = [state for state in plan.parameter_states for _ in state.parameters if state.optimizer is not None]
    homes, reads = [state.kept.home for state in trained], [state.compute.home for state in trained]
    stages = [stage.offloads for replica in plan.replicas for stage in replica.stages]
    there = f" ({homes.count('host')} of {counted(len(homes), 'parameter')} on hosts"
    part = {
        "optimizer": f"{there})",
        "activations": f" (of {sum(stages)} of {counted(len(stages), 'stage')})",
        "optimizer+parameters": f"{there}, {reads.count('host')} as ops read them)",
    }.get(offload, "")
    choice = Choice("memory", "state", f"memory.zero: {zero}, memory.offload: {offload}{part}", bound=reason)
    return replace(plan, choices=(choice, *plan.choices)), step


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


def _computes_again(plan: Plan, config: Config) -> bool:
    """Whether memory made it recompute anything."""
    if "recompute.policy" in config.explicit and config.recompute.policy != "auto":
        return False
    stages = (stage for replica in plan.replicas for stage in replica.stages)
    return any(pipeline.recomputed_stages for pipeline in plan.pipelines) or any(
        segment.recompute for stage in stages for segment in stage.program
    )


def without_recomputation(graph: ModelGraph, cluster: Cluster, config: Config) -> Callable[[Plan], float]:
    """Seconds of a plan's step if nothing were recomputed, whether that fits or not."""

    def stage(own: Stage) -> Stage:
        return replace(own, program=tuple(replace(segment, recompute=False) for segment in own.program))

    def replica(own: Replica) -> Replica:
        return replace(own, stages=tuple(map(stage, own.stages)), pipeline=replace(own.pipeline, recomputed_stages=()))

    def seconds(plan: Plan) -> float:
        costs = Costs.for_model(config, graph, cluster)
        return estimate(replace(plan, replicas=tuple(map(replica, plan.replicas))), graph, cluster, costs).step_seconds

    return seconds


_WRITES_ONE = "whale plan ... --output FILE writes one"


def given_plan(plan: Plan | str | Path, graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None) -> tuple[Plan, StepEstimate]:
    """An existing plan with the figures of its step on this cluster, and the estimate; arguments as `decide`.

    Raises:
        PlanError: the file cannot be read, or the plan does not serve this model, these rows and this cluster.
    """
    given = plan if isinstance(plan, Plan) else _read(Path(plan))
    with _told_of(None if isinstance(plan, Plan) else plan):
        if rows not in (None, given.planned_rows):
            raise PlanError(
                f"the plan was made for {given.planned_rows} rows, not {rows}",
                hint="write it as YAML (whale plan --output FILE.yaml), and plan again with other rows",
            )
        if given.model != graph.fingerprint:
            raise PlanError(
                f"the plan was made for another model (plan: {given.model}, this model: {graph.fingerprint})",
                hint="plan again: the model, its scopes or the example batch have changed",
            )
        costs = Costs.for_model(config, graph, cluster)
        if not given.parameter_states:
            given = replace(given, parameter_states=states_of(graph.parameters, costs.optimizer_states))
        step = verify(given, graph, cluster, costs=costs)
    return _with_figures_of(given, step), step


def _with_figures_of(plan: Plan, step: StepEstimate) -> Plan:
    """The plan with its step time now, which other figures of the cluster or a profile change."""
    if step.step_seconds == plan.step_seconds:
        return plan
    anew = Choice(
        "plan",
        "figures",
        f"{format_seconds(step.step_seconds)} per step",
        bound=f"the figures of the devices now; the plan was made, and its other reasons hold, at {format_seconds(plan.step_seconds)}",
    )
    figures = tuple(explain_step(step))
    passes = {choice.pass_name for choice in figures}
    kept = (choice for choice in plan.choices if choice.pass_name not in passes)
    return replace(with_figures(plan, step), choices=(anew, *kept, *figures))


@contextmanager
def _told_of(path: str | Path | None) -> Iterator[None]:
    """Adds the file to faults inside: of two compared plans it says which."""
    try:
        yield
    except PlanError as fault:
        fault.where = path if fault.where is None else fault.where
        raise


def _read(path: Path) -> Plan:
    try:
        found: Plan = decode(Plan, read_json(path))
        return found
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}", hint=_WRITES_ONE) from error
    except (ValueError, TypeError) as error:  # not JSON is a ValueError too
        raise PlanError(f"{path} is not a plan: {error}", hint=f"{_WRITES_ONE}; one that is written by hand is a FILE.yaml") from error


def numbers_of_rows(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low ... and high."""
    doubled = (low << exponent for exponent in range((high // low).bit_length()))
    return tuple(dict.fromkeys((*doubled, high)))


def best_batch(low: int, high: int, searched: Callable[[int], SearchResult]) -> SearchResult:
    """The search result whose time per sample is best; its plan says what the other row counts give.

    Ctrl-C returns the best so far, if there is one.

    Raises:
        WhaleError: no row count has a plan; the error of the smallest.
    """
    found, faults, is_whole = dict[int, SearchResult](), dict[int, WhaleError](), True
    for rows in numbers_of_rows(low, high):
        try:
            found[rows] = searched(rows)
        except WhaleError as fault:
            faults[rows] = fault
            continue
        except KeyboardInterrupt:
            if not found:
                raise
            is_whole = False
        if not is_whole or found[rows].was_interrupted:
            is_whole = False
            break
    if not found:
        raise next(iter(faults.values()))
    rows = min(found, key=lambda rows: found[rows].of_sample)
    others = [*(f"{other}: {_speed(each)}" for other, each in found.items() if other != rows), *(f"{other}: no plan" for other in faults)]
    interrupted = "" if is_whole else "; the search was interrupted: the best so far"
    choice = Choice(
        "search",
        "rows",
        f"{counted(rows, 'row')} of {low}..{high}, {_speed(found[rows])}",
        bound=f"a power of two times {low}, or {high}{interrupted}",
        runner_up="; ".join(others),
    )
    best = found[rows]
    return replace(best, plan=replace(best.plan, choices=(choice, *best.plan.choices)))


def _speed(found: SearchResult) -> str:
    return f"{found.plan.planned_rows / found.step.step_seconds:.4g} samples/s"
