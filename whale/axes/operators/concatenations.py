"""The rules of concatenation and its inverses: ``cat``, ``split``, slices.

Equal parts are a product, ``3 x part``, and unified. Parts of different sizes are a concatenation, and stay separate. A slice alone is
neither, and makes the dimension whole; slices of one tensor that together tile its dimension are a split.
"""

from __future__ import annotations

from collections import defaultdict

from whale.axes.atoms import ROWS, Clash, Dim
from whale.axes.outcome import CLASHES, KEPT, Letter, Reading, RuleMisfit, RuleOutcome, Tiling, argument, number
from whale.axes.values import Role
from whale.ir.graph import ModelGraph, Op, Ref

STACKS = Role("whole", reason="joins pieces along it")
DIVIDES = Role("whole", reason="takes it apart")
CUTS_OFF = Role("whole", reason="takes a part of it")
PART = Role("whole", reason="makes a part of another axis")


def cat(op: Op, reading: Reading) -> RuleOutcome:
    tensors = [dims for dims in reading.tensors_of(op.args[0]) if 0 not in reading.shape(dims)]
    if not tensors:
        raise RuleMisfit("it joins nothing")
    rank = len(tensors[0])
    along = number(argument(op, 1, "dim", 0)) % rank
    letters: list[Letter] = []
    result: list[Dim] = []
    for index in range(rank):
        parts = [dims[index] for dims in tensors]
        result.append(_join(parts, letters, reading) if index == along else _unified(parts, letters, reading))
    return RuleOutcome((tuple(result),), tuple(letters))


def _unified(parts: list[Dim], letters: list[Letter], reading: Reading) -> Dim:
    role = KEPT
    for part in parts[1:]:
        try:
            reading.atoms.unify(parts[0], part)
        except Clash:
            role = CLASHES
            letters.append(Letter("its piece", CLASHES, part))
    letters.append(Letter("its dimension", role, parts[0]))
    return parts[0]


def _join(parts: list[Dim], letters: list[Letter], reading: Reading) -> Dim:
    try:
        joined = reading.atoms.concatenate(parts)
    except Clash:
        joined = reading.atoms.fresh(sum(reading.atoms.size(part) for part in parts))
        letters += [Letter("its piece", CLASHES, part) for part in (*parts, joined)]
        return joined
    letters += _letters(joined, parts[0], STACKS, reading)
    return joined


def _letters(joined: Dim, part: Dim, outer: Role, reading: Reading) -> list[Letter]:
    """The letters of a dimension and its parts: of ``n x part`` the n is whole; check 4 judges a true concatenation."""
    if reading.atoms.size(joined) == reading.atoms.size(part):
        return [Letter("its dimension", KEPT, joined)]
    if len(joined) == len(part) + 1 and joined[1:] == part:
        return [Letter("its pieces", outer, joined[:1]), Letter("its dimension", KEPT, part)]
    return [Letter("its dimension", KEPT, joined)]


def split(op: Op, reading: Reading) -> RuleOutcome:
    """``split``, ``chunk``: all parts of one dimension; their sizes are read from the results."""
    dims = reading.tensor(op.args[0])
    if dims is None:
        raise RuleMisfit("its operand is no tensor")
    along = number(argument(op, 2, "dim", 0)) % len(dims)
    sizes = tuple(spec.shape_at(ROWS)[along] for spec in op.outputs)
    parts, letters = _partition(dims[along], sizes, reading)
    letters += [Letter("its dimension", KEPT, dim) for index, dim in enumerate(dims) if index != along]
    return RuleOutcome(tuple(dims[:along] + (part,) + dims[along + 1 :] for part in parts), tuple(letters))


def _partition(dim: Dim, sizes: tuple[int, ...], reading: Reading) -> tuple[tuple[Dim, ...], list[Letter]]:
    atoms = reading.atoms
    if sum(sizes) != atoms.size(dim):
        raise RuleMisfit("its parts are not the whole")
    if len(sizes) == 1:
        return (dim,), [Letter("its dimension", KEPT, dim)]
    try:
        parts = atoms.partition(dim, sizes)
    except Clash:
        parts = tuple(atoms.fresh(size) for size in sizes)
        return parts, [Letter("its dimension", CLASHES, dim), *(Letter("its part", PART, part) for part in parts)]
    if len(set(sizes)) == 1:
        outer = atoms.outer(dim, len(sizes))
        return parts, [Letter("its parts", DIVIDES, outer), Letter("its dimension", KEPT, parts[0])]
    return parts, [Letter("its dimension", KEPT, dim)]


def slice_(op: Op, reading: Reading) -> RuleOutcome:
    """``slice``, ``narrow``: all of a dimension, a tile of it, or a part of it."""
    dims = reading.tensor(op.args[0])
    if dims is None:
        raise RuleMisfit("its operand is no tensor")
    along = number(argument(op, 1, "dim", 0)) % len(dims)
    size = op.outputs[0].shape_at(ROWS)[along]
    letters = [Letter("its dimension", KEPT, dim) for index, dim in enumerate(dims) if index != along]
    tiling = reading.tilings.get(op.name)
    if size == reading.atoms.size(dims[along]) and _takes_all(op, along):
        kept = (*letters, Letter("its dimension", KEPT, dims[along]))
        return RuleOutcome((dims,), kept, reading.is_position(op.args[0]), reading.places(op.args[0]))
    part: Dim
    if tiling:
        parts, more = _partition(dims[along], tiling.sizes, reading)
        part = parts[tiling.index]
        letters += [letter for letter in more if letter.role is not PART or letter.dim == part]  # the others' parts are theirs
    else:
        part = reading.atoms.fresh(size)
        letters += [Letter("its dimension", CUTS_OFF, dims[along]), Letter("its part", PART, part)]
    return RuleOutcome((dims[:along] + (part,) + dims[along + 1 :],), tuple(letters))


def find_tilings(graph: ModelGraph) -> dict[str, Tiling]:
    """Slices that tile a dimension together with other slices of the same tensor.

    Slices that take all of a dimension are looked through, since ``x[:, :4]`` is two slices.
    """
    origin: dict[str, str] = {}
    taken: dict[tuple[str, int], dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.ops:
        found = _interval(op, graph) if op.target.startswith(SLICES) else None
        if found is None:
            continue
        source, along, start, stop, size = found
        source = origin.get(source, source)
        if (start, stop) == (0, size):
            origin[op.name] = source
        else:
            taken[source, along][start, stop].append(op.name)
    tilings = {}
    for (source, along), intervals in taken.items():
        size = graph.by_name[source].outputs[0].shape[along]
        ordered = sorted(intervals)
        ends = [0, *(stop for _, stop in ordered)]
        if len(ordered) < 2 or ends[-1] != size or any(start != end for (start, _), end in zip(ordered, ends, strict=False)):
            continue
        sizes = tuple(stop - start for start, stop in ordered)
        tilings.update({name: Tiling(sizes, index) for index, interval in enumerate(ordered) for name in intervals[interval]})
    return tilings


def _takes_all(op: Op, along: int) -> bool:
    """Whether a slice of equal size is of equal elements: a size that depends on values is an estimate."""
    stop = argument(op, 3, "end")
    is_open = argument(op, 2, "start") in (None, 0) and (stop is None or stop == MAX_STOP)
    return op.outputs[0].row_factors[along] >= 0 or (is_open and op.operator == "slice")


MAX_STOP = 2**63 - 1  # torch has it for no stop

SLICES = ("aten.slice.", "aten.narrow.")


def _interval(op: Op, graph: ModelGraph) -> tuple[str, int, int, int, int] | None:
    """Source, dimension, start, stop and the dimension's size of a slice whose bounds are known numbers; else None."""
    source = op.args[0]
    if not isinstance(source, Ref) or len(graph.by_name[source.op].outputs) != 1:
        return None
    spec = graph.by_name[source.op].outputs[0]
    dim, start = argument(op, 1, "dim", 0), argument(op, 2, "start", 0)
    if not isinstance(dim, int) or not isinstance(start, int | None) or argument(op, 4, "step", 1) != 1:
        return None
    along = dim % len(spec.shape)
    size, length = spec.shape[along], op.outputs[0].shape[along]
    if length == size and _takes_all(op, along):
        return source.op, along, 0, size, size
    if spec.row_factors[along]:
        return None
    begin = start or 0
    begin = max(begin + size, 0) if begin < 0 else begin
    return source.op, along, begin, begin + length, size
