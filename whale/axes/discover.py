"""Logical axes of a captured model: the atoms of all its tensor dimensions, unified over the whole graph.

One pass reads the ops: each op's rule makes its dimensions from those of its operands. Then each op's letters are checked (`Checker`) and
the axes get names from what ops say of them, never from the names of models or modules. The first that applies:

1. ``batch``;
2. the word that a rule has for it (``heads``, ``vocabulary``, ``channels``), under the common path of its modules:
   ``transformer.h.0.attn.heads``;
3. the first parameter that has it, and the dimension there: ``transformer.h.0.mlp.c_fc.weight:1``;
4. the first tensor that has it: ``input_ids:1``.

If one dimension is a product of several axes, a name made from it ends in ``.0``, ``.1`` ... from the outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

from whale.axes.atoms import ROWS, Atoms, Dim
from whale.axes.mixing import find_mixing
from whale.axes.notation import bind, parse
from whale.axes.operators import operator_of
from whale.axes.operators.concatenations import find_tilings
from whale.axes.outcome import CONTRACTED_AND_KEPT, KEPT, NO_RULE, TWICE, Dims, Letter, Reading, RuleMisfit, RuleOutcome
from whale.axes.selections import Selections
from whale.axes.values import Axes, Axis, Concatenation, Dimension, InRows, OpAxes, Role, WholeReason
from whale.ir.graph import ModelGraph, Op, Ref
from whale.ir.plan import BATCH

SOME_PIECES = Role("whole", reason="has it in only some pieces of a concatenated dimension")
UNKNOWN_SIZE = Role("whole", reason="has it in a size that depends on values or rows")


def discover(graph: ModelGraph) -> Axes:
    """Finds the logical axes of a model, of any mode and number of rows: what each op does with them, and which ops mix samples."""
    reading, outcomes = read(graph)
    unknown = leaves_of_unknown_size(graph, outcomes, reading.atoms)
    checker = Checker(reading.atoms, unknown)
    held = _held(graph, outcomes, reading)
    names = name_axes(graph, outcomes, held, reading.batch, checker)
    show = _NamedDimensions(names, reading.atoms)
    roles = {op: checker.roles(outcome.letters) for op, outcome in outcomes.items()}
    folded = {leaf for found in roles.values() for leaf, role in found.items() if role.grows}
    ops = {
        op: OpAxes(tuple(map(show.dimensions, outcome.results)), {names[leaf]: role for leaf, role in roles[op].items()})
        for op, outcome in outcomes.items()
    }
    reasons = _reasons(graph, roles)
    sizes = {leaf: reading.atoms.size((leaf,)) for leaf in names}
    of_rows = tuple(name for leaf, name in names.items() if sizes[leaf] and sizes[leaf] % ROWS == 0)  # the batch, and what follows it
    positions = {name: show.dimensions(tuple(dim for dim in reading.dims[name][0] if dim)[:1]) for name in reading.positions}
    in_rows = InRows(ops, frozenset(of_rows), positions)
    if reading.selections:
        in_rows = _with_selections(in_rows, reading, outcomes, unknown, names)
    return Axes(
        axes=tuple(Axis(name, _size(sizes[leaf], graph.num_rows), reasons.get(leaf, ()), leaf in folded) for leaf, name in names.items()),
        ops=MappingProxyType(ops),
        parameters=MappingProxyType({name: show.dimensions(dims) for name, dims in held.items()}),
        mixing=find_mixing(graph, in_rows),
        positions=frozenset(reading.positions),
        of_rows=frozenset(of_rows),
        in_rows=in_rows,
    )


def _with_selections(
    found: InRows, reading: Reading, outcomes: Mapping[str, RuleOutcome], unknown: Set[int], names: Mapping[int, str]
) -> InRows:
    """What masks select counts as rows where the mask has rows, and ops may keep it; it is never cut, since its size depends on values."""
    selections, show = reading.selections, _NamedDimensions(names, reading.atoms)
    selected = selections.leaves() & names.keys()
    plain = selections.plain(unknown) & selected
    rows = {leaf for leaf, name in names.items() if name in found.rows}
    rows |= selections.following(rows) | ((unknown | selected) - plain)
    checker = Checker(reading.atoms, (unknown | selected) - plain, rows)
    ops = {
        op: replace(axes, roles={names[leaf]: role for leaf, role in checker.roles(outcomes[op].letters).items()})
        for op, axes in found.ops.items()
    }
    places = {name: show.dimensions(dims) for name, dims in selections.places.items()}
    plain_ones = frozenset(names[leaf] for leaf in plain)
    of_rows = frozenset(names[leaf] for leaf in rows)
    return InRows(ops, of_rows, {**found.positions, **places}, plain_ones, of_rows - found.rows)


class _NamedDimensions:
    """Turns dimensions of atoms into dimensions of named axes."""

    def __init__(self, names: Mapping[int, str], atoms: Atoms) -> None:
        self._names = names
        self._atoms = atoms
        self._known: dict[Dim, Dimension] = {}

    def dimensions(self, dims: Dims) -> tuple[Dimension, ...]:
        return tuple(self.dimension(dim) for dim in dims)

    def dimension(self, dim: Dim) -> Dimension:
        found = self._known.get(dim)
        if found is None:
            found = self._known[dim] = tuple(self._factor(leaf) for leaf in self._atoms.leaves(dim))
        return found

    def _factor(self, leaf: int) -> str | Concatenation:
        pieces = self._atoms.pieces(leaf)
        return Concatenation(tuple(self.dimension(piece) for piece in pieces)) if pieces else self._names[leaf]


def _held(graph: ModelGraph, outcomes: Mapping[str, RuleOutcome], reading: Reading) -> dict[str, Dims]:
    """Per parameter or buffer its dimensions; fresh ones if this graph does not read it (an output of the model does)."""
    found: dict[str, Dims] = {}
    for op in graph.ops:
        known = graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
        if known:
            found.setdefault(known.name, outcomes[op.name].results[0])
    unread = (parameter for parameter in graph.parameters if parameter.name not in found)
    return found | {parameter.name: reading.fresh(parameter.spec) for parameter in unread}


def _reasons(graph: ModelGraph, roles: Mapping[str, Mapping[int, Role]]) -> dict[int, tuple[WholeReason, ...]]:
    """Per leaf, the distinct reasons why it is whole, each with the first op that gives it."""
    found: dict[int, dict[tuple[str, str], WholeReason]] = {}
    for op in graph.ops:
        for leaf, role in roles.get(op.name, {}).items():
            if role.kind == "whole":
                found.setdefault(leaf, {}).setdefault((op.target, role.reason), WholeReason(op.name, op.target, role.reason, op.where))
    return {leaf: tuple(reasons.values()) for leaf, reasons in found.items()}


def _size(size: int, num_rows: int) -> int:
    """A size with the example's number of rows in place of `ROWS`."""
    factor = 1
    while size and size % ROWS == 0:
        size //= ROWS
        factor *= num_rows
    return size * factor


def read(graph: ModelGraph) -> tuple[Reading, dict[str, RuleOutcome]]:
    """Dimensions and letters of every op that makes tensors."""
    atoms = Atoms()
    reading = Reading(graph, atoms, atoms.fresh(ROWS), {}, set(), find_tilings(graph), Selections(graph, atoms))
    parameters: dict[str, Dims] = {}
    outcomes: dict[str, RuleOutcome] = {}
    for op in graph.ops:
        if not op.outputs:
            reading.selections.read_number(op, reading.dims)
            continue
        outcome = read_call(op, reading) if op.kind == "call" else _read_source(op, reading, parameters)
        outcomes[op.name] = outcome
        reading.dims[op.name] = outcome.results
        if outcome.is_position:
            reading.positions.add(op.name)
        if outcome.places:
            reading.selections.places[op.name] = outcome.places
    return reading, outcomes


def _read_source(op: Op, reading: Reading, parameters: dict[str, Dims]) -> RuleOutcome:
    """An input, parameter, buffer or constant. Tied names are one parameter; dimension 0 of inputs is the batch."""
    spec = op.outputs[0]
    known = reading.graph.parameter_by_name.get(op.target) if op.kind in ("parameter", "buffer") else None
    dims = parameters.get(known.name) if known else None
    if dims is None:
        dims = reading.fresh(spec)
        if op.kind == "input" and spec.shape_at(ROWS)[:1] == (ROWS,):
            dims = (reading.batch, *dims[1:])
        if known:
            parameters[known.name] = dims
    return RuleOutcome((dims,), tuple(Letter(f"dimension {index}", KEPT, dim) for index, dim in enumerate(dims)))


def read_call(op: Op, reading: Reading) -> RuleOutcome:
    """What the rule of an op's operator says of its letters."""
    if op.target == "operator.getitem":
        return _item(op, reading)
    rule = operator_of(op).axes
    if rule is None:
        return _unknown(op, NO_RULE, reading)
    try:
        made = rule if isinstance(rule, str) else rule(op, reading)
        return bind(parse(made), op, reading) if isinstance(made, str) else made
    except RuleMisfit as misfit:
        return _unknown(op, Role("whole", reason=f"has a rule that does not fit here ({misfit})"), reading)


def _item(op: Op, reading: Reading) -> RuleOutcome:
    """One result of an op that has several."""
    source, index = op.args
    if not isinstance(source, Ref) or not isinstance(index, int):
        return _unknown(op, NO_RULE, reading)
    results = reading.dims[source.op]
    dims = results[index]
    letters = tuple(Letter(f"dimension {place}", KEPT, dim) for place, dim in enumerate(dims))
    places = reading.places(source)
    return RuleOutcome((dims,), letters, places=places if len(places) < 2 else places[index : index + 1])


def _unknown(op: Op, role: Role, reading: Reading) -> RuleOutcome:
    """An op without a rule: all its axes are whole, so that no wrong cut can follow.

    Rows stay rows: a result with as many rows as the batch, from operands that have the batch, is taken to hold one per sample, in order.
    `Axes.mixing` says that the op may mix samples.
    """
    operands = [dim for dims in reading.tensors(op) for dim in dims]
    batch = set(reading.atoms.leaves(reading.batch))
    has_batch = any(batch & set(reading.atoms.leaves(dim)) for dim in operands)
    results = tuple(_with_batch(reading.fresh(spec), reading) if has_batch else reading.fresh(spec) for spec in op.outputs)
    made = [dim for dims in results for dim in dims]
    return RuleOutcome(results, tuple(Letter("?", role, dim) for dim in (*operands, *made) if dim))


def _with_batch(dims: Dims, reading: Reading) -> Dims:
    place = next((index for index, dim in enumerate(dims) if reading.atoms.size(dim) == ROWS), None)
    return dims if place is None else (*dims[:place], reading.batch, *dims[place + 1 :])


class Checker:
    """Five checks that make wrong cuts impossible, over the letters of one op once all atoms are known.

    1. One axis met twice (``x @ x.T``, ``u[:, None] - u``): a cut would keep only the diagonal blocks.
    2. Contracted and kept: two letters of one op that never meet in one tensor are one axis (a square layer with a residual).
    3. Axes that vanish or appear without a mark. The notation makes such letters whole.
    4. An axis in only some pieces of a concatenated dimension: the whole pieces' gradient would be summed twice.
    5. An axis of unknown size: it depends on values (``x[mask]``), or on the rows but not in proportion (``cat((x, rows_of_mine))``).

    An axis that is kept and needed whole (attention of a sequence to itself) is kept where the rule says which operands are gathered;
    rows are not, for nobody gathers them.
    An axis that fails a check is whole at this op, with the reason. `unknown`: leaves without a known size; `rows`: that are rows, beside
    those of a size that follows the number of rows.
    """

    def __init__(self, atoms: Atoms, unknown: Set[int] = frozenset(), rows: Set[int] = frozenset()) -> None:
        self._atoms, self._unknown, self._rows = atoms, unknown, rows
        self._met: dict[Dim, tuple[tuple[int, bool], ...]] = {}

    def roles(self, letters: Iterable[Letter]) -> dict[int, Role]:
        """What an op does with each axis, by leaf, after the checks."""
        roles: dict[int, Role] = {}
        for letter in letters:
            for leaf, everywhere in self.met(letter.dim):
                role = letter.role if everywhere or letter.role.kind == "whole" else SOME_PIECES
                role = UNKNOWN_SIZE if leaf in self._unknown and role.kind != "whole" else role
                known = roles.get(leaf)
                if (
                    known is not None
                    and {known.kind, role.kind} == {"kept", "whole"}
                    and known.gathers
                    and role.gathers
                    and not self._is_rows(leaf)
                ):
                    gathers = tuple(dict.fromkeys((*known.gathers, *role.gathers)))
                    roles[leaf] = Role("kept", gathers=gathers, grows=known.grows or role.grows)
                elif known is None or (role.kind == "whole" and known.kind != "whole"):
                    roles[leaf] = role
                elif known.kind != "whole":
                    roles[leaf] = CONTRACTED_AND_KEPT if {known.kind, role.kind} == {"contracted", "kept"} else TWICE
        return roles

    def _is_rows(self, leaf: int) -> bool:
        return leaf in self._rows or self._atoms.size((leaf,)) % ROWS == 0

    def met(self, dim: Dim) -> tuple[tuple[int, bool], ...]:
        """The axes in a dimension, each with whether all pieces of a concatenation have it; one may occur twice."""
        found = self._met.get(dim)
        if found is None:
            found = self._met[dim] = tuple(entry for leaf in self._atoms.leaves(dim) for entry in self._leaf(leaf))
        return found

    def _leaf(self, leaf: int) -> Iterable[tuple[int, bool]]:
        pieces = self._atoms.pieces(leaf)
        if not pieces:
            return [(leaf, True)]
        held = [self.met(piece) for piece in pieces]
        everywhere = set.intersection(*({axis for axis, complete in piece if complete} for piece in held))
        once = dict.fromkeys(axis for piece in held for axis, _ in piece)
        again = [axis for axis in once if any([a for a, _ in piece].count(axis) > 1 for piece in held)]
        return [(axis, axis in everywhere) for axis in (*once, *again)]


def leaves_of_unknown_size(graph: ModelGraph, outcomes: Mapping[str, RuleOutcome], atoms: Atoms) -> Set[int]:
    """Leaves that are dimensions of which only the example's size is known, and are in no others."""
    if all(factor >= 0 for op in graph.ops for spec in op.outputs for factor in spec.row_factors):
        return frozenset()
    found: set[int] = set()
    known: set[int] = set()
    for op in graph.ops:
        results = outcomes[op.name].results if op.outputs else ()
        for dims, spec in zip(results, op.outputs, strict=True):
            for dim, factor in zip(dims, spec.row_factors, strict=True):
                leaves = atoms.leaves(dim)
                if factor >= 0:
                    known |= {axis for leaf in leaves for axis in (leaf, *_inside(leaf, atoms))}
                elif len(leaves) == 1 and not atoms.pieces(leaves[0]) and atoms.size(leaves) % ROWS:
                    found.add(leaves[0])
    return found - known


def _inside(leaf: int, atoms: Atoms) -> Iterable[int]:
    return (inner for piece in atoms.pieces(leaf) for inner in atoms.leaves(piece))


_WORD = re.compile(r"[a-z]{3,}(_[a-z]+)*$")


def name_axes(
    graph: ModelGraph, outcomes: Mapping[str, RuleOutcome], parameters: Mapping[str, Dims], batch: Dim, checker: Checker
) -> dict[int, str]:
    """A unique name per leaf, the batch first, the others in the order in which the graph meets them."""
    words = _words(graph, outcomes, checker)
    places = _first_places(((name, dims) for name, dims in parameters.items()), checker)
    met = _first_places(
        (
            (op.name if op.kind == "call" else op.target, dims)
            for op in graph.ops
            if op.name in outcomes
            for dims in outcomes[op.name].results
        ),
        checker,
    )
    met |= {leaf: place for leaf, place in places.items() if leaf not in met}
    names: dict[int, str] = {}
    taken: set[str] = set()
    rows = {leaf for leaf, _ in checker.met(batch)}
    for leaf in sorted(met, key=lambda leaf: leaf not in rows):
        name = BATCH if leaf in rows else words.get(leaf) or places.get(leaf) or met[leaf]
        names[leaf] = _unused(name, taken)
        taken.add(names[leaf])
    return names


def _first_places(tensors: Iterable[tuple[str, Dims]], checker: Checker) -> dict[int, str]:
    """Per leaf, the first tensor and dimension that has it."""
    found: dict[int, str] = {}
    for name, dims in tensors:
        for index, dim in enumerate(dims):
            leaves = checker.met(dim)
            for number, (leaf, _) in enumerate(leaves):
                if leaf not in found:
                    found[leaf] = f"{name}:{index}" + (f".{number}" if len(leaves) > 1 else "")
    return found


def _words(graph: ModelGraph, outcomes: Mapping[str, RuleOutcome], checker: Checker) -> dict[int, str]:
    """Per leaf, the first word that a rule has for it, under the common path of the modules where it has that word."""
    words: dict[int, str] = {}
    modules: dict[int, list[str]] = {}
    for op in graph.ops:
        for letter in outcomes[op.name].letters if op.name in outcomes else ():
            if not _WORD.match(letter.name):
                continue
            leaves = checker.met(letter.dim)
            for number, (leaf, _) in enumerate(leaves):
                word = letter.name + (f".{number}" if len(leaves) > 1 else "")
                if words.setdefault(leaf, word) == word:
                    modules.setdefault(leaf, []).append(op.module)
    return {leaf: ".".join(part for part in (common_path(modules[leaf]), word) if part) for leaf, word in words.items()}


def common_path(modules: Sequence[str]) -> str:
    """The dotted path that all share: ``h.0.attn`` and ``h.1.attn`` share ``h``."""
    first, *rest = (module.split(".") for module in dict.fromkeys(modules))
    length = len(first)
    for path in rest:
        length = next((index for index in range(min(length, len(path))) if path[index] != first[index]), min(length, len(path)))
    return ".".join(first[:length])


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
