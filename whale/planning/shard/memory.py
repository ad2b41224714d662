"""Memory of the labels of a split stage, with recomputed runs of its ops.

outside of runs    what ops keep, for every micro-batch in flight
in the largest     what its ops keep, once, for the micro-batch that is recomputed
in other runs      nothing: only what a run reads from outside is kept
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from whale.estimate.costs.line import Floats
from whale.estimate.memory.held import held_tensors
from whale.estimate.memory.memory import size_line
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.collective_costs import StagePlace
from whale.estimate.prices.part import Recompute
from whale.estimate.prices.prices import Prices
from whale.estimate.prices.repeated import RepeatedRuns
from whale.planning.shard.classes import WHOLE, Classes, Node, Tensors
from whale.planning.shard.problem import BridgeCopies, LabelMemory, TensorCost


@dataclass(frozen=True, slots=True)
class Repeated:
    """What a stage recomputes, independent of names."""

    runs: tuple[tuple[int, int], ...] = ()  # of its ops, by index (start, stop)
    num_alive: int = 0  # with R actions for the whole stage, the recomputed micro-batches alive at once; else 0
    waiting: int = 0  # micro-batches between I and W, if these hold more than others in flight; else 0


def repeated_of(ops: Sequence[str], recompute: Recompute, waiting: int) -> Repeated:
    position = {name: place for place, name in enumerate(ops)}
    return Repeated(
        tuple((position[segment[0]], position[segment[-1]] + 1) for segment in recompute.segments), recompute.num_alive, waiting
    )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a device of a stage holds."""

    num_bytes: float  # if nothing is cut, without the working set
    in_flight: int  # micro-batches whose activations are held
    capacity: tuple[int, ...]  # bytes that the device at each position may hold
    taken: float = 0.0  # bytes for the device's other stages
    share: float = 1.0  # of the rest for this stage; other split stages of the device have theirs
    repeated: Repeated = Repeated()  # what is recomputed
    plan: Budget = ALL  # that of the whole plan

    @property
    def free(self) -> Floats:
        """Bytes left at each position if nothing is cut; negative where it overflows."""
        return (np.array(self.capacity, dtype=np.float64) - self.taken) * self.share - self.num_bytes


def capacity_of(site: StagePlace, prices: Prices, budget: Budget) -> tuple[int, ...]:
    """Per position of the groups, the least bytes that a device there may hold."""
    return tuple(min(prices.capacity(group[position], budget) for group in site.groups) for position in range(site.width))


class HeldBytes:
    """Bytes of the classes of a stage; `crossed` are the tensors with possible bridges."""

    def __init__(
        self, classes: Classes, prices: Prices, num_rows: float, budget: MemoryBudget, crossed: Sequence[tuple[Tensors, TensorCost]]
    ) -> None:
        self._classes, self._prices, self._num_rows, self._budget, self._crossed = classes, prices, num_rows, budget, crossed
        ops, repeated = classes.scene.ops, budget.repeated
        self._segments = () if repeated.num_alive else tuple(ops[start:stop] for start, stop in repeated.runs)
        self._runs = RepeatedRuns(prices, (ops,) if repeated.num_alive else self._segments)

    def memory(self, shares: Floats) -> LabelMemory:
        """What labels hold, and what is free; `shares`: per kind of axes and position."""
        every = np.vstack([shares, np.ones((1, shares.shape[1]))])  # WHOLE is the last row
        held = tuple(-own @ (1 - every) for own in self._in_parts)
        working = tuple(self._budget.share * self._working(number, every) for number in range(len(held)))
        return LabelMemory(self._budget.free, held, working, tuple(self._copies(number, every) for number in range(len(self._crossed))))

    def _num_bytes(self, name: str) -> float:
        return self._prices.outputs[name].at(self._num_rows)

    @cached_property
    def _times(self) -> Mapping[str, float]:
        """How often the results of each op are held; with deferred weight gradients, the difference."""
        prices, scene, budget, found = self._prices, self._classes.scene, self._budget, defaultdict[str, float](float)
        alive, waiting = budget.repeated.num_alive, budget.repeated.waiting
        held = held_tensors(
            prices.graph,
            scene.ops,
            prices.kept,
            self._segments,
            received=scene.received,
            is_away=prices.costs.offloads_activations and not alive,
        )
        for name in () if alive else held.kept_there:
            found[name] += budget.in_flight - waiting
        if waiting:  # W needs more than what is computed again
            for name in held.for_weights:
                found[name] += waiting
        else:
            groups = [held.there] if alive else held.restored
            for name in max(groups, key=lambda names: size_line(prices.outputs, names).at(self._num_rows), default=()):
                found[name] += budget.share * max(1, alive)
        return found

    @cached_property
    def _in_parts(self) -> tuple[Floats, ...]:
        """Per node, by label and kind, the bytes that lie in parts; the last kind is WHOLE."""
        return tuple(self._parts_of(node, forms) for node, forms in zip(self._classes.nodes, self._classes.forms, strict=True))

    def _parts_of(self, node: Node, forms: Sequence[tuple[int, ...]]) -> Floats:
        found = np.zeros((len(node.labels), len(self._classes.space.kinds) + 1))
        labels, members = range(len(node.labels)), self._classes.members
        if node.first.kind in ("parameter", "buffer"):
            known = self._prices.graph.parameter_by_name
            num_bytes = sum(self._prices.lasting_bytes(known[op.target].name, self._budget.plan) for op in node.ops)
            found[labels, [label.work for label in node.labels]] = num_bytes
        else:
            for place, (name, own) in enumerate(zip(members[node.first.name], forms, strict=True)):
                count = sum(self._times.get(members[op.name][place], 0.0) for op in node.ops)
                np.add.at(found, (labels, own), count * self._num_bytes(name))
        return found

    def _working(self, number: int, shares: Floats) -> Floats:
        """The working set of one member of a node under each label: its result and the gradient of that."""
        node = self._classes.nodes[number]
        found = np.zeros((len(node.labels), shares.shape[1]))
        if node.first.kind == "call":
            for name, forms in zip(self._classes.members[node.first.name], self._classes.forms[number], strict=True):
                found = np.maximum(found, 2 * self._num_bytes(name) * shares[list(forms)])
        return found

    def _copies(self, number: int, shares: Floats) -> BridgeCopies:
        tensor, (keeps, gathered, others) = self._crossed[number][1], self._kept_copies[number]
        num_bytes = {
            (form, use): (gathered if use[0] == WHOLE != form else others) * shares[use[0]]
            for (form, use), bridge in tensor.bridges.items()
            if bridge.moves
        }
        return BridgeCopies(tensor, keeps, num_bytes)

    @cached_property
    def _kept_copies(self) -> tuple[tuple[tuple[bool, ...], float, float], ...]:
        """Per tensor: which users keep their form, the bytes of a gathered form, and of others.

        A gathered form is not kept where segments are recomputed: its shard is, and gathered again (`RepeatedBridges`).
        """
        found = []
        for tensors, _ in self._crossed:
            entered = any(self._runs.is_entered(self._readers(op.name)) for op in tensors.ops)
            gathered, others = (
                self._times_copied(tensors, is_gathered) * self._num_bytes(tensors.first.name) for is_gathered in (True, False)
            )
            found.append((tuple(user.keeps or entered for user in tensors.users), gathered, others))
        return tuple(found)

    def _times_copied(self, tensors: Tensors, is_gathered: bool) -> float:
        """How often a bridge's form of some identical tensors is held, in total."""
        in_flight = self._budget.in_flight
        if not self._segments:
            return tensors.count * (self._budget.repeated.num_alive or in_flight)
        left = is_gathered and tensors.first.kind == "call"
        kept = ((self._runs, op.name, self._readers(op.name)) for op in tensors.ops)
        return in_flight * sum(runs.is_entered(readers) or (not left and runs.are_keeping(name, readers)) for runs, name, readers in kept)

    def _readers(self, tensor: str) -> Sequence[str]:
        return self._classes.readers.get(tensor, ())
