"""Labels by integer program (HiGHS): the optimum of any problem, memory that is short among them.

    x[n, l] = 1      node n has label l                         each node has one
    z[t, u, f, g]    tensor t lies as f and user u needs g      marginals are the x of both: the local polytope of the edge
    y[t, f, g]       the bridge f -> g of t stands              >= z of every user: paid once
    T[k]             time of the work along kind k, in units    >= sum of x x time, on each device
                     of the longest work of a node along it
    e                bytes beyond a device's memory             kept at 0; where nothing fits, at the least there is

    minimise    sum T + sum x x (sums of the label) + sum y x (bridge)

Devices wait for one another at every bridge, so work along each kind takes as long as on its slowest device. The relaxation
is tight: on chains of ops it is integral by itself, and branching only settles where memory or shared tensors couple them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from whale.planning.shard.classes import WHOLE, Use
from whale.planning.shard.program import LEAST_BYTES, Program, Selection, TensorFigures, UserFigures

Expression = dict[int, float]
"""A linear expression: per variable its factor."""

MAX_NODES = 1000
"""A search for the optimum looks at this many nodes of its tree, then ends with the best that it has found, and says how far that may
be from it. Nearly all end at the root. A count, not a time: the same plan comes out on any machine."""

OUT_OF_NODES = 1
"""SciPy's status of a search that ended so."""


def solve_integer(program: Program, other_than: Collection[int] | None = None, max_nodes: int = MAX_NODES) -> Selection | None:
    """The best labels.

    Args:
        program: the problem.
        other_than: a set of kinds that is not to be found again, for the runner-up.
        max_nodes: of the tree of the search.

    Returns:
        None where there are none.
    """
    rows = Rows(program)
    if other_than is not None:
        rows.forbid(other_than)
    found = rows.minimise(rows.cost, 0.0, max_nodes)
    if found is None:  # nothing fits: what overflows least, and of that the fastest
        least = rows.minimise({rows.overflow: 1.0}, np.inf, max_nodes)
        if least is not None:
            found = rows.minimise(rows.cost, float(least[rows.overflow]) * (1 + 1e-9) + LEAST_BYTES * rows.scale, max_nodes)
    if found is None:
        return _along_one_kind(program) if rows.ran_out_of_nodes and other_than is None else None
    selection = program.evaluate([int(np.argmax([found[variable] for variable in own])) for own in rows.labels])
    return selection and replace(selection, gap=rows.gap)


def _along_one_kind(program: Program) -> Selection | None:
    """The best of the simplest choices: everything that may works along one kind. For a search that found nothing."""
    found = []
    for kind in range(program.num_kinds):
        ways = [next((index for index, label in enumerate(node) if label.kinds == {kind}), 0) if node else 0 for node in program.nodes]
        selection = program.evaluate(ways)
        if selection is not None:
            found.append(replace(selection, gap=1.0))
    return min(found, key=lambda each: (each.excess, each.seconds), default=None)


@dataclass
class Rows:
    """The program as variables and rows of a matrix.

    HiGHS takes a row for kept that is kept to 1e-6, and repairs what is not, of which its release 1.12 prints a line. So seconds and
    bytes stand in units in which no factor is large.

    Attributes:
        program: the problem.
        cost: what is to be least.
        ran_out_of_nodes: whether a search did.
        gap: how far what was found may be from the optimum.
        factors: of all rows, one after another.
        floors: per position, bytes that some op works on whatever is chosen.
    """

    program: Program
    cost: Expression = field(default_factory=dict)
    ran_out_of_nodes: bool = False
    gap: float = 0.0
    factors: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _integral: list[int] = field(default_factory=list)
    _variables: list[int] = field(default_factory=list)  # of all rows, one after another
    _ends: list[int] = field(default_factory=lambda: [0])
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scale = 1 / max(1, self.program.num_bytes, *self.program.capacity)
        self.labels = [[self._new(1.0, integral=len(node) > 1) for _ in node] for node in self.program.nodes]
        self._held: list[Expression] = [{} for _ in self.program.capacity]
        self.overflow = self._new(np.inf)
        self._add_nodes()
        self._add_lanes()
        self._add_working()
        for tensor in self.program.tensors:
            self._add_tensor(tensor)
        for position, capacity in enumerate(self.program.capacity):
            entries = {variable: factor * self.scale for variable, factor in self._held[position].items()}
            room = capacity - self.program.num_bytes - self.floors[position]
            self._add(entries | {self.overflow: -1.0}, -np.inf, self.scale * room)

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
        for own, node in zip(self.labels, self.program.nodes, strict=True):
            self._add(dict.fromkeys(own, 1.0), 1.0, 1.0)
            for variable, figures in zip(own, node, strict=True):
                self._charge(variable, figures.fixed)
                if figures.divides:
                    dividing[variable] = 1.0
                for entries, num_bytes in zip(self._held, figures.held(self.program.in_flight), strict=True):
                    if num_bytes:
                        entries[variable] = num_bytes
        self._add(dividing, 1.0, np.inf)
        for number, kind in self.program.insisted:
            pairs = zip(self.labels[number], self.program.nodes[number], strict=True)
            self._add({variable: 1.0 for variable, figures in pairs if figures.lane == kind}, 1.0, 1.0)

    def _add_lanes(self) -> None:
        lanes: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
        for own, node in zip(self.labels, self.program.nodes, strict=True):
            for variable, figures in zip(own, node, strict=True):
                if any(figures.seconds):
                    lanes.setdefault(figures.lane, []).append((variable, figures.seconds))
        for entries in lanes.values():
            total = self._new(np.inf)
            unit = max(seconds for _, own in entries for seconds in own)
            self.cost[total] = unit
            for seconds in dict.fromkeys(zip(*(own for _, own in entries), strict=True)):
                row = {variable: own / unit for (variable, _), own in zip(entries, seconds, strict=True) if own}
                self._add(row | {total: -1.0}, -np.inf, 0.0)

    def _add_working(self) -> None:
        """What the op works on that works on most: at least the least of any op, and a variable beyond that."""
        columns: dict[tuple[tuple[float, ...], ...], int] = {}
        for position, entries in enumerate(self._held):
            column = tuple(tuple(each.working[position] if each.working else 0.0 for each in node) for node in self.program.nodes)
            floor = max((min(own) for own in column), default=0.0)
            self.floors.append(self.program.working_share * floor)
            if column not in columns:
                columns[column] = more = self._new(np.inf)
                for variables, own in zip(self.labels, column, strict=True):
                    if max(own) > floor:
                        row = {variable: (each - floor) * self.scale for variable, each in zip(variables, own, strict=True) if each > floor}
                        self._add(row | {more: -1.0}, -np.inf, 0.0)
            entries[columns[column]] = self.program.working_share / self.scale

    def _charge(self, variable: int, seconds: float) -> None:
        if seconds:
            self.cost[variable] = self.cost.get(variable, 0.0) + seconds

    def _add_tensor(self, tensor: TensorFigures) -> None:
        meets: dict[tuple[int, Use], list[tuple[UserFigures, Expression]]] = {}
        for user in tensor.users:
            for (form, use), expression in self._meetings(tensor, user).items():
                if (form, use) in tensor.pairs or (tensor.once and form == WHOLE):
                    meets.setdefault((form, use), []).append((user, expression))
        stands: dict[Use, int] = {}
        returns: dict[Use, int] = {}
        for (form, use), found in meets.items():
            pair = tensor.pairs.get((form, use))
            if tensor.once and form == WHOLE:
                stands[use] = self._either([expression for _, expression in found], exact=True)
                returning = [expression for user, expression in found if user.has_gradient]
                if returning:
                    returns[use] = self._either(returning)
            if pair is None:
                continue
            if pair.moves:
                for user, expression in found:
                    if user.is_rigid:
                        self._add(expression, -np.inf, 0.0)
            self._pay([expression for _, expression in found], pair.forward)
            self._keep([expression for user, expression in found if user.keeps], pair.copy)
            if not (tensor.once and form == WHOLE):
                self._pay([expression for user, expression in found if user.has_gradient], pair.backward)
        if tensor.once and stands:
            self._add_parameter(tensor, stands, returns)

    def _add_parameter(self, tensor: TensorFigures, stands: Mapping[Use, int], returns: Mapping[Use, int]) -> None:
        """A whole parameter's gradient: summed once per step, or at each bridge if some use it whole."""
        once = self._new(1.0)
        self._charge(once, tensor.once)
        whole = stands.get((WHOLE, False))
        for use, variable in stands.items():
            if use != (WHOLE, False):
                self._add({variable: 1.0, once: -1.0} | ({whole: -1.0} if whole is not None else {}), -np.inf, 0.0)
                pair = tensor.pairs.get((WHOLE, use))
                if whole is not None and pair is not None and use in returns:
                    both = self._new(1.0)
                    self._charge(both, pair.backward)
                    self._add({returns[use]: 1.0, whole: 1.0, both: -1.0}, -np.inf, 1.0)

    def _either(self, expressions: Sequence[Expression], exact: bool = False) -> int:
        """A variable that is 1 where one of some expressions is."""
        variable = self._new(1.0)
        for expression in expressions:
            self._add(expression | {variable: -1.0}, -np.inf, 0.0)
        if exact:
            together: Expression = {variable: 1.0}
            for expression in expressions:
                for own, factor in expression.items():
                    together[own] = together.get(own, 0.0) - factor
            self._add(together, -np.inf, 0.0)
        return variable

    def _pay(self, expressions: Sequence[Expression], seconds: float) -> None:
        if seconds and len(expressions) == 1:
            for variable, factor in expressions[0].items():
                self._charge(variable, factor * seconds)
        elif seconds and expressions:
            self._charge(self._either(expressions), seconds)

    def _keep(self, expressions: Sequence[Expression], copy: Sequence[float]) -> None:
        if expressions and any(copy):
            variable = self._either(expressions)
            for entries, num_bytes in zip(self._held, copy, strict=True):
                entries[variable] = self.program.in_flight * num_bytes

    def _meetings(self, tensor: TensorFigures, user: UserFigures) -> dict[tuple[int, Use], Expression]:
        """Per form and use, the expression that is 1 where they meet."""
        own = self.labels[tensor.node]
        forms: dict[int, Expression] = {}
        for variable, form in zip(own, tensor.forms, strict=True):
            forms.setdefault(form, {})[variable] = 1.0
        if user.node < 0:
            return {(form, user.uses[0]): expression for form, expression in forms.items()}
        if user.node == tensor.node:
            same: dict[tuple[int, Use], Expression] = {}
            for variable, form, use in zip(own, tensor.forms, user.uses, strict=True):
                same.setdefault((form, use), {})[variable] = 1.0
            return same
        uses: dict[Use, Expression] = {}
        for variable, use in zip(self.labels[user.node], user.uses, strict=True):
            uses.setdefault(use, {})[variable] = 1.0
        if len(forms) == 1:
            return {(form, use): expression for form in forms for use, expression in uses.items()}
        if len(uses) == 1:
            return {(form, use): expression for use in uses for form, expression in forms.items()}
        return self._edge(forms, uses)

    def _edge(self, forms: Mapping[int, Expression], uses: Mapping[Use, Expression]) -> dict[tuple[int, Use], Expression]:
        """The local polytope of one edge."""
        meet = {(form, use): self._new(1.0) for form in forms for use in uses}
        for form, expression in forms.items():
            row = dict.fromkeys((meet[form, use] for use in uses), -1.0)
            self._add(expression | row, 0.0, 0.0)
        for use, expression in uses.items():
            row = dict.fromkeys((meet[form, use] for form in forms), -1.0)
            self._add(expression | row, 0.0, 0.0)
        return {key: {variable: 1.0} for key, variable in meet.items()}

    def forbid(self, kinds: Collection[int]) -> None:
        """Excludes one set of kinds."""
        users: dict[int, list[int]] = {kind: [] for kind in range(self.program.num_kinds)}
        for own, node in zip(self.labels, self.program.nodes, strict=True):
            for variable, figures in zip(own, node, strict=True):
                for kind in figures.kinds:
                    users[kind].append(variable)
        row: Expression = {}
        for kind, variables in users.items():
            if variables:
                used = self._either([{variable: 1.0} for variable in variables], exact=True)
                row[used] = -1.0 if kind in kinds else 1.0
        self._add(row, 1.0 - len(set(kinds)), np.inf)

    def minimise(self, cost: Expression, most_excess: float, max_nodes: int) -> NDArray[np.float64] | None:
        """The cheapest assignment whose overflow is at most so much; None where there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to load, and only a split needs it
        from scipy.sparse import csr_array

        width = len(self._upper)
        objective = np.zeros(width)
        for variable, factor in cost.items():
            objective[variable] = factor
        objective *= 1000 / max(float(np.abs(objective).max()), 1e-30)
        upper = np.array(self._upper)
        upper[self.overflow] = most_excess
        matrix = csr_array((np.array(self.factors), np.array(self._variables), np.array(self._ends)), shape=(len(self._low), width))
        found = milp(
            objective,
            integrality=np.array(self._integral),
            bounds=Bounds(np.zeros(width), upper),
            constraints=LinearConstraint(matrix, np.array(self._low), np.array(self._high)),
            options={"mip_rel_gap": 0.0, "node_limit": max_nodes},
        )
        if found.status == OUT_OF_NODES:
            self.ran_out_of_nodes = True
            self.gap = max(self.gap, float(found.mip_gap)) if found.x is not None else 1.0
        result: NDArray[np.float64] | None = found.x
        return result
