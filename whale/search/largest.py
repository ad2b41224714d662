"""The deepest version of a model with repeated blocks that trains on given devices, for each state of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from whale.config import Config
from whale.errors import PlanError
from whale.estimate import StepEstimate
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan

MAX_BLOCKS = 4096
"""Deeper models are not looked at."""

_EFFORT = 20
"""Of the searches that only ask whether something fits."""

_GRAIN = 25
"""Depths are told apart by one part in so many, which is finer than the estimate of memory is true."""

Found = dict[int, tuple[Plan, StepEstimate]]

_STATES = (("0", "none"), ("2", "none"), ("3", "none"), ("3", "optimizer"), ("3", "optimizer+parameters"))
"""``memory.zero`` and ``memory.offload``, from what takes the most memory of devices to what takes the least."""


@dataclass(frozen=True)
class Largest:
    """The deepest model that fits with a state.

    Attributes:
        zero, offload: the state, as ``memory.zero`` and ``memory.offload`` name it.
        num_blocks: how deep it is.
        graph: of it.
        plan: for it.
        step: its estimate.
    """

    zero: str
    offload: str
    num_blocks: int
    graph: ModelGraph
    plan: Plan
    step: StepEstimate

    @property
    def num_parameters(self) -> int:
        """Elements that are trained."""
        return sum(each.spec.num_elements for each in self.graph.parameters if each.kind == "parameter")


def open_states(config: Config) -> tuple[tuple[str, str], ...]:
    """The states that settings leave open: where ``memory.offload`` is not set, the host's memory is among what is tried."""
    zero = None if config.memory.zero == "auto" else config.memory.zero
    is_open = "memory.offload" not in config.explicit or config.memory.offload == "auto"
    return tuple(dict.fromkeys((zero or each, home if is_open else config.memory.offload) for each, home in _STATES))


def largest(
    deepened: Callable[[int], ModelGraph],
    num_captured: int,
    decided: Callable[[ModelGraph, Config], tuple[Plan, StepEstimate]],
    config: Config,
    tell: Callable[[str], None],
) -> Iterator[Largest]:
    """The deepest model for each state that fits one at all, from what takes the most memory of devices to what takes the least.

    Args:
        deepened: gives the model with so many blocks.
        num_captured: the blocks that it has; no fewer are tried.
        decided: plans a model under settings.
        config: settings.
        tell: is called with each depth that is tried.

    Raises:
        PlanError: not even the captured blocks fit, with any state; that of the last.
    """
    fault: PlanError | None = None
    least, has_found = num_captured, False
    for zero, offload in open_states(config):
        settings = config.with_values({"memory.zero": zero, "memory.offload": offload})

        quick = settings.with_values({"planning.effort": min(config.planning.effort, _EFFORT)})
        found = dict[int, tuple[Plan, StepEstimate]]()

        def fits(num_blocks: int, zero: str = zero, offload: str = offload, quick: Config = quick, found: Found = found) -> bool:
            nonlocal fault
            tell(f"{num_blocks} blocks, memory.zero {zero}, memory.offload {offload}")
            try:
                found[num_blocks] = decided(deepened(num_blocks), quick)
            except PlanError as error:
                fault = error
                return False
            return True

        if not fits(least):
            continue
        least, has_found = _deepest(fits, least), True
        graph = deepened(least)
        with suppress(PlanError):  # a longer search looks at others first; at the edge of memory it may miss what the short one has found
            found[least] = decided(graph, settings)
        yield Largest(zero, offload, least, graph, *found[least])
    if not has_found:
        assert fault is not None
        raise fault


def _deepest(fits: Callable[[int], bool], least: int) -> int:
    """The largest number that fits, to one part in `_GRAIN`, from one that does.

    What does not fit takes ten times as long to find out as what does: steps begin small and double, and what is then left between
    is narrowed from below.
    """
    best, too_many, step = least, MAX_BLOCKS + 1, max(1, least // _GRAIN)
    while best < MAX_BLOCKS:
        more = min(best + step, MAX_BLOCKS)
        if not fits(more):
            too_many = more
            break
        best, step = more, 2 * step
    while too_many - best > (grain := max(1, best // _GRAIN)):
        middle = best + max(grain, (too_many - best) // 3)
        if fits(middle):
            best = middle
        else:
            too_many = middle
    return best
