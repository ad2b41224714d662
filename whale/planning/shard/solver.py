"""The fastest labels that fit in memory, by a mixed-integer program (HiGHS).

    x[n, l] = 1      node n has label l                         each node has one
    z[t, u, f, g]    tensor t lies as f and user u needs g      marginals are the x of both: the local polytope of the edge
    y[t, f, g]       the bridge f -> g of t exists              >= z of every user: paid once
    T[k]             time of the work along kind k, in units    >= sum of x x time, on each device
                     of the longest work of a node along it
    e                bytes beyond a device's memory             kept at 0; where nothing fits, minimised

    minimise    sum T + sum x x (sums of the label) + sum y x (bridge)

Devices wait for one another at every bridge, so work along each kind takes as long as on its slowest device. The relaxation
is tight: on chains of ops it is integral, and branching is needed only where memory or shared tensors couple them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from whale.estimate.costs.line import Floats
from whale.planning.shard.classes import WHOLE, Use, User
from whale.planning.shard.problem import BridgeCopies, ChosenLabels, LabelMemory, LabelProblem, TensorCost

MAX_NODES = 1000
"""Limit of branch-and-bound nodes, after which the best solution and its gap are returned. Nearly all searches end at the root. A count
rather than a time, so that every machine finds the same plan.
"""

OUT_OF_NODES = 1  # SciPy's status of such a search

OVERFLOW_PER_UNIT = 1e-5
"""Where nothing fits: share of memory worth the time of the most expensive single decision, so that of labels that overflow equally the
fastest are taken. Halved or doubled: none of 49 searches differs; 0: one is slower by 0.5 %, one faster by 15 %, 10 % more estimates.
"""

Expression = dict[int, float]
"""A linear expression: factors by variable."""


def solve_labels(problem: LabelProblem, max_nodes: int = MAX_NODES) -> ChosenLabels | None:
    """The fastest labels that fit; where none do, those that overflow least; None where there are none."""
    rows = Rows(problem)
    found = rows.minimise(rows.cost, max_nodes) if problem.memory is None or problem.memory.may_suffice else None
    if found is None and problem.memory is not None:
        unit = max(rows.cost.values(), default=1.0)
        found = rows.minimise({rows.overflow: 1.0} | {v: OVERFLOW_PER_UNIT * cost / unit for v, cost in rows.cost.items()}, max_nodes)
    if found is None:
        return _along_one_kind(problem) if rows.ran_out_of_nodes else None
    chosen = problem.evaluate([int(np.argmax([found[variable] for variable in own])) for own in rows.labels])
    return chosen and replace(chosen, gap=rows.gap)


def _along_one_kind(problem: LabelProblem) -> ChosenLabels | None:
    """The best choice with all ops along one kind, for a search that found nothing."""
    found = []
    for kind in range(problem.num_kinds):
        ways = [next((index for index, label in enumerate(node) if label.kinds == {kind}), 0) for node in problem.nodes]
        chosen = problem.evaluate(ways)
        if chosen is not None:
            found.append(replace(chosen, gap=1.0))
    return min(found, key=lambda each: (each.excess, each.seconds), default=None)


@dataclass
class Rows:
    """The problem as variables and rows of a matrix. The variable `overflow` is the bytes beyond memory, as a share of the largest.

    HiGHS treats a row as satisfied within 1e-6 and repairs violations, which its release 1.12 reports on stdout. So seconds
    and bytes are scaled so that no factor is large.
    """

    problem: LabelProblem
    cost: Expression = field(default_factory=dict)  # to be minimised
    ran_out_of_nodes: bool = False  # whether a search did
    gap: float = 0.0  # bound of the result's distance from the optimum
    factors: list[float] = field(default_factory=list)  # of all rows, concatenated
    _upper: list[float] = field(default_factory=list)
    _integral: list[int] = field(default_factory=list)
    _variables: list[int] = field(default_factory=list)  # of all rows, one after another
    _ends: list[int] = field(default_factory=lambda: [0])
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.labels = [[self._new(1.0, integral=len(node) > 1) for _ in node] for node in self.problem.nodes]
        self.overflow = self._new(0.0)
        self._add_nodes()
        self._add_times()
        held = [self._add_tensor(tensor) for tensor in self.problem.tensors]
        if self.problem.memory is not None:
            self._add_memory(self.problem.memory, held)

    def _new(self, upper: float, integral: bool = False) -> int:
        self._upper.append(upper)
        self._integral.append(int(integral))
        return len(self._upper) - 1

    def _add(self, entries: Expression, low: float, high: float) -> None:
        self._variables += entries
        self.factors += entries.values()
        self._ends.append(len(self._variables))
        self._low.append(low)
        self._high.append(high)

    def _add_nodes(self) -> None:
        dividing: Expression = {}
        for own, node in zip(self.labels, self.problem.nodes, strict=True):
            self._add(dict.fromkeys(own, 1.0), 1.0, 1.0)
            for variable, label in zip(own, node, strict=True):
                self._charge(variable, label.fixed)
                if label.divides:
                    dividing[variable] = 1.0
        self._add(dividing, 1.0, np.inf)
        for number, kind in self.problem.insisted:
            pairs = zip(self.labels[number], self.problem.nodes[number], strict=True)
            self._add({variable: 1.0 for variable, label in pairs if label.along == kind}, 1.0, 1.0)

    def _add_times(self) -> None:
        along: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
        for own, node in zip(self.labels, self.problem.nodes, strict=True):
            for variable, label in zip(own, node, strict=True):
                if any(label.seconds):
                    along.setdefault(label.along, []).append((variable, label.seconds))
        for entries in along.values():
            unit = max(seconds for _, own in entries for seconds in own)
            total = self._new(np.inf)
            self.cost[total] = unit
            for seconds in dict.fromkeys(zip(*(own for _, own in entries), strict=True)):
                row = {variable: own / unit for (variable, _), own in zip(entries, seconds, strict=True) if own}
                self._add(row | {total: -1.0}, -np.inf, 0.0)

    def _add_memory(self, memory: LabelMemory, copied: Sequence[Mapping[tuple[int, Use], Sequence[tuple[int, Expression]]]]) -> None:
        """One row per distinct position."""
        scale = 1 / max(1.0, float(np.abs(memory.free).max()), *(float(np.abs(own).max()) for own in (*memory.held, *memory.working)))
        self._upper[self.overflow] = np.inf
        keeping = [self._keeping(copies, meets) for copies, meets in zip(memory.copies, copied, strict=True)]
        limits = np.column_stack([memory.free, *(own.T for own in memory.held), *(own.T for own in memory.working)])
        limits = np.column_stack([limits, *(num_bytes for kept in keeping for num_bytes in kept.values())])
        for position in sorted(np.unique(limits, axis=0, return_index=True)[1]):
            row = {variable: float(num_bytes[position]) * scale for kept in keeping for variable, num_bytes in kept.items()}
            for variables, own in zip(self.labels, memory.held, strict=True):
                row |= {
                    variable: float(num_bytes) * scale for variable, num_bytes in zip(variables, own[:, position], strict=True) if num_bytes
                }
            more, floor = self._add_working([own[:, position] for own in memory.working], scale)
            self._add(row | {more: 1.0, self.overflow: -1.0}, -np.inf, scale * (float(memory.free[position]) - floor))

    def _add_working(self, working: Sequence[Floats], scale: float) -> tuple[int, float]:
        """The largest working set of an op: its lower bound over all ops, and a variable beyond that."""
        floor = max(float(own.min()) for own in working)
        more = self._new(np.inf)
        for variables, own in zip(self.labels, working, strict=True):
            row = {variable: (float(each) - floor) * scale for variable, each in zip(variables, own, strict=True) if each > floor}
            if row:
                self._add(row | {more: -1.0}, -np.inf, 0.0)
        return more, floor

    def _keeping(self, copies: BridgeCopies, meets: Mapping[tuple[int, Use], Sequence[tuple[int, Expression]]]) -> dict[int, Floats]:
        """Per variable that is 1 where a copy is kept, its bytes."""
        found = {}
        for place, num_bytes in copies.num_bytes.items():
            keeping = [expression for user, expression in meets.get(place, ()) if copies.keeps[user]]
            if keeping and num_bytes.any():
                found[self._either(keeping)] = num_bytes
        return found

    def _charge(self, variable: int, seconds: float) -> None:
        if seconds:
            self.cost[variable] = self.cost.get(variable, 0.0) + seconds

    def _add_tensor(self, tensor: TensorCost) -> dict[tuple[int, Use], list[tuple[int, Expression]]]:
        """The bridges of some tensors; per form and use, the expressions that are 1 where a user needs that use of that form."""
        meets: dict[tuple[int, Use], list[tuple[int, Expression]]] = {}
        for number, user in enumerate(tensor.users):
            for (form, use), expression in self._meetings(tensor, user).items():
                if (form, use) in tensor.bridges or (tensor.once and form == WHOLE):
                    meets.setdefault((form, use), []).append((number, expression))
        stands, returns = dict[Use, int](), dict[Use, int]()
        for (form, use), found in meets.items():
            bridge = tensor.bridges.get((form, use))
            returning = [expression for number, expression in found if tensor.users[number].has_gradient]
            if tensor.once and form == WHOLE:
                stands[use] = self._either([expression for _, expression in found], exact=True)
                if returning:
                    returns[use] = self._either(returning)
            if bridge is not None:
                for number, expression in found:
                    if bridge.moves and tensor.users[number].is_rigid:
                        self._add(expression, -np.inf, 0.0)
                self._pay([expression for _, expression in found], bridge.forward)
                if not (tensor.once and form == WHOLE):
                    self._pay(returning, bridge.backward)
        if stands:
            self._add_parameter(tensor, stands, returns)
        return meets

    def _add_parameter(self, tensor: TensorCost, stands: Mapping[Use, int], returns: Mapping[Use, int]) -> None:
        """A whole parameter's gradient: summed once per step, or at each bridge if some ops use it whole."""
        once = self._new(1.0)
        self._charge(once, tensor.once)
        whole = stands.get((WHOLE, False))
        for use, variable in stands.items():
            if use != (WHOLE, False):
                self._add({variable: 1.0, once: -1.0} | ({whole: -1.0} if whole is not None else {}), -np.inf, 0.0)
                bridge = tensor.bridges.get((WHOLE, use))
                if whole is not None and bridge is not None and use in returns:
                    both = self._new(1.0)
                    self._charge(both, bridge.backward)
                    self._add({returns[use]: 1.0, whole: 1.0, both: -1.0}, -np.inf, 1.0)

    def _either(self, expressions: Sequence[Expression], exact: bool = False) -> int:
        """A variable that is 1 where one of some expressions is."""
        variable = self._new(1.0)
        together: Expression = {variable: 1.0}
        for expression in expressions:
            self._add(expression | {variable: -1.0}, -np.inf, 0.0)
            for own, factor in expression.items():
                together[own] = together.get(own, 0.0) - factor
        if exact:
            self._add(together, -np.inf, 0.0)
        return variable

    def _pay(self, expressions: Sequence[Expression], seconds: float) -> None:
        if seconds and len(expressions) == 1:
            for variable, factor in expressions[0].items():
                self._charge(variable, factor * seconds)
        elif seconds and expressions:
            self._charge(self._either(expressions), seconds)

    def _meetings(self, tensor: TensorCost, user: User) -> dict[tuple[int, Use], Expression]:
        """Per form and use, the expression that is 1 where they meet."""
        forms, uses = dict[int, Expression](), dict[Use, Expression]()
        for variable, form in zip(self.labels[tensor.node], tensor.forms, strict=True):
            forms.setdefault(form, {})[variable] = 1.0
        if user.node == tensor.node:
            same: dict[tuple[int, Use], Expression] = {}
            for variable, form, use in zip(self.labels[tensor.node], tensor.forms, user.uses, strict=True):
                same.setdefault((form, use), {})[variable] = 1.0
            return same
        if user.node >= 0:
            for variable, use in zip(self.labels[user.node], user.uses, strict=True):
                uses.setdefault(use, {})[variable] = 1.0
        if len(uses) <= 1:
            return {(form, user.uses[0]): expression for form, expression in forms.items()}
        if len(forms) == 1:
            return {(form, use): expression for form in forms for use, expression in uses.items()}
        return self._edge(forms, uses)

    def _edge(self, forms: Mapping[int, Expression], uses: Mapping[Use, Expression]) -> dict[tuple[int, Use], Expression]:
        """The local polytope of one edge."""
        meet = {(form, use): self._new(1.0) for form in forms for use in uses}
        for form, expression in forms.items():
            self._add(expression | dict.fromkeys((meet[form, use] for use in uses), -1.0), 0.0, 0.0)
        for use, expression in uses.items():
            self._add(expression | dict.fromkeys((meet[form, use] for form in forms), -1.0), 0.0, 0.0)
        return {key: {variable: 1.0} for key, variable in meet.items()}

    def minimise(self, cost: Expression, max_nodes: int) -> NDArray[np.float64] | None:
        """The cheapest assignment; None where there is none. Memory may overflow only if `cost` has a price for it."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to load, and only a split needs it
        from scipy.sparse import csr_array

        width = len(self._upper)
        objective = np.zeros(width)
        objective[list(cost)] = list(cost.values())
        objective *= 1000 / max(float(np.abs(objective).max()), 1e-30)
        upper = np.array(self._upper)
        if self.overflow not in cost:
            upper[self.overflow] = 0.0
        matrix = csr_array((np.array(self.factors), np.array(self._variables), np.array(self._ends)), shape=(len(self._low), width))
        found = milp(
            objective,
            integrality=np.array(self._integral),
            bounds=Bounds(np.zeros(width), upper),
            constraints=LinearConstraint(matrix, np.array(self._low), np.array(self._high)),
            options={"mip_rel_gap": 0.0, "node_limit": max_nodes, "presolve": False},
        )
        if found.status == OUT_OF_NODES:
            self.ran_out_of_nodes = True
            self.gap = max(self.gap, float(found.mip_gap)) if found.x is not None else 1.0
        result: NDArray[np.float64] | None = found.x
        return result
