"""The plan of a run or a simulation, with its estimate: searched for, written by the user, or made before and verified.

In a range of row counts each is searched, and their times per sample are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from whale.config import Config, read_plan
from whale.config.keys import range_of
from whale.errors import BatchError, ConfigError, PlanError, WhaleError
from whale.estimate import Costs, StepEstimate
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, states_of
from whale.ir.serialization import decode, read_json
from whale.planning.explain.choices import explain_step
from whale.planning.pricing import with_figures
from whale.planning.verify.verify import verify
from whale.search.freedom import pin_of
from whale.search.searching import SearchResult, search
from whale.units import counted, format_seconds


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
            # on one device there is something to look for only where it does not fit as it is
            is_brief = len(cluster.devices) == 1 and _asked(config, runner_up) is None
            if config.planning.batch_rows is not None:
                found = _best_batch(graph, cluster, config, rows, tell)
            else:
                found = search(graph, cluster, config, rows=rows, is_brief=is_brief, tell=tell)
            return (found.plan, found.step) if runner_up is None else found.runner_up(runner_up)

        try:
            return planned(graph, settings)
        except (PlanError, ConfigError, BatchError) as fault:
            from whale.search.failure import with_blame  # needed here alone

            raise with_blame(fault, graph, settings, planned) from None
    _check_asked("a plan that was made before", config, runner_up)
    return given_plan(plan, graph, cluster, config, rows)


def _best_batch(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None, tell: Callable[[str], None] | None) -> SearchResult:
    """The search result for the best number of rows of the configured range."""
    ends = range_of(str(config.planning.batch_rows))
    assert ends is not None, "checked where it was read"
    if rows is not None:
        raise ConfigError(f"rows: {rows} and the range planning.batch_rows: {ends[0]}..{ends[1]} are both given")
    return best_batch(*ends, lambda number: search(graph, cluster, config, rows=number, tell=tell))


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
