"""Lookups and writes at given positions.

In advanced indexing, ``x[i, :, j]``, indexed dimensions are looked up, the others are kept. An index that holds all positions of the
dimension it indexes is the identity there, so masks of the form ``mask[arange(b)[:, None], arange(s)]`` keep their axes.

What a mask selects lies along an axis of its own (`whale.axes.selections`), whether the mask is the index or its positions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from whale.axes.atoms import Clash, Dim
from whale.axes.operators.entry import Family, Moves, Operator, Template, bound, letters_of, names, operand, put, write
from whale.axes.outcome import MAKES, READS, Letter, Reading, RuleMisfit, RuleOutcome, argument, number
from whale.ir.graph import Argument, Op, Ref


def chosen_rows(op: Op, reading: Reading) -> str:
    letters, dim = letters_of(op, reading)
    _meet(argument(op, 2, "index"), operand(op, reading)[dim], reading)
    source = put(letters, dim, f"({letters[dim]}:lookup)")
    return write([("input", source), ("index", ["_found"] if operand(op, reading, 2) else [])], put(letters, dim, "_found"))


def gathering(dim: int, index: int) -> Template:
    """``gather``: positions of one dimension, looked up element by element; other dimensions must match to be kept."""

    def rule(op: Op, reading: Reading) -> str:
        source, places = operand(op, reading), operand(op, reading, index)
        if len(source) != len(places):
            raise RuleMisfit("its index has another rank")
        letters = names(len(source))
        along = number(argument(op, dim, "dim")) % len(letters)
        left, right = [], []
        for position, (letter, size, taken) in enumerate(zip(letters, reading.shape(source), reading.shape(places), strict=True)):
            looked_up, equal = position == along, size == taken
            left.append(f"({letter}:lookup)" if looked_up else letter if equal else letter + "!")
            right.append("_found" if looked_up else letter if equal else f"_part_{letter}!")
        return write([("input", left), ("index", right)], right)

    return rule


def scattering(op: Op, reading: Reading) -> str:
    """``scatter`` and similar: one dimension of `self` is written at given positions; the others are kept if they match."""
    letters, dim = letters_of(op, reading)
    _meet(argument(op, 2, "index"), operand(op, reading)[dim], reading)
    whole = reading.shape(operand(op, reading))
    terms = put(letters, dim, f"{letters[dim]}!")
    operands = [("input", terms)]
    for name, position in (("index", 2), ("src", 3)):
        dims = reading.tensor(argument(op, position, name))
        if dims is None:
            continue
        sizes = reading.shape(dims)
        if len(sizes) != len(letters):  # index_add's index has one dimension, a fill value none
            operands.append((name, ["_written!"] if sizes else []))
            continue
        if any(size != full for place, (size, full) in enumerate(zip(sizes, whole, strict=True)) if place != dim):
            raise RuleMisfit("it writes a part of the other dimensions")
        operands.append((name, put(letters, dim, "_written!")))
    return write(operands, terms)


def part_written(op: Op, reading: Reading) -> str:
    """``select_scatter``, ``slice_scatter``: a part of one dimension is replaced."""
    letters, dim = letters_of(op, reading, 2, 0)
    terms, part = put(letters, dim, f"{letters[dim]}!"), () if "select" in op.target else ("_part!",)
    return write([("input", terms), ("src", put(letters, dim, *part))], terms)


def embedding(op: Op, reading: Reading) -> str:
    """Rows of a table, looked up. Gradients scaled by frequency need all the indices, sparse ones are of whole tables."""
    if argument(op, 4, "sparse", False) is True:
        return "weight[vocabulary! hidden!] indices[...] -> [... hidden!]"
    mark = "!" if argument(op, 3, "scale_grad_by_freq", False) is True else ""
    return f"weight[(vocabulary:lookup) hidden] indices[...{mark}] -> [...{mark} hidden]"


def bags(op: Op, reading: Reading) -> str:
    """``embedding_bag``: values say where a bag ends, so bags are whole; columns are kept, except for maxima and sparse gradients."""
    hidden = "hidden!" if number(argument(op, 4, "mode", 0)) == 2 or argument(op, 5, "sparse", False) is True else "hidden"
    weights = [] if reading.tensor(argument(op, 6, "per_sample_weights")) is None else [("per_sample_weights", ["words!"])]
    operands = [("weight", ["vocabulary!", hidden]), ("indices", ["words!"]), ("offsets", ["_offsets!"]), *weights]
    others = [[f"_p{index}_{place}!" for place in range(len(spec.shape))] for index, spec in enumerate(op.outputs[1:])]
    return write(operands, ["_bags!", hidden], *others)


def index(op: Op, reading: Reading) -> RuleOutcome:
    dims = operand(op, reading)
    indices = _indices(op)
    of_rows = dims if reading.is_position(op.args[0]) else reading.places(op.args[0])
    places = of_rows if len(indices) == 1 else ()  # they stay positions, of fewer elements
    if any(name is not None and _is_mask(name, reading) for name in indices):
        return replace(_selected(op, indices, reading), places=places)
    for place, name in enumerate(indices):
        if name is not None:
            _meet(Ref(name), dims[place], reading)
    ranks = [None if name is None else len(reading.dims[name][0]) for name in indices]
    broadcast = max(rank for rank in ranks if rank is not None)
    found = [f"_found{place}" for place in range(broadcast, 0, -1)]  # dimensions of the indices, numbered from the right
    letters = names(len(dims))
    source, operands = list(letters), []
    for place, name in enumerate(indices):
        if name is None:
            continue
        terms = found[broadcast - len(reading.dims[name][0]) :]
        operands.append(("index", terms))
        source[place] = _identity(name, place, terms, op, reading) or f"({letters[place]}:lookup)"
    return replace(bound(write([("input", source), *operands], _indexed(letters, indices, found)), op, reading), places=places)


def _indices(op: Op) -> list[str | None]:
    listed = op.args[1]
    indices = [item.op if isinstance(item, Ref) else None for item in (listed if isinstance(listed, tuple) else (listed,))]
    if not any(indices):
        raise RuleMisfit("it has no index")
    return indices


def _identity(name: str, place: int, terms: list[str], op: Op, reading: Reading) -> str:
    """The index's own letter, if it holds all positions of the dimension that it indexes; else ""."""
    if name not in reading.positions:
        return ""
    shape = reading.shape(reading.dims[name][0])
    size = reading.shape(operand(op, reading))[place]
    return next((term for term, extent in zip(terms, shape, strict=True) if extent == size != 1), "")


def index_written(op: Op, reading: Reading) -> str | RuleOutcome:
    """``index_put``: indexed dimensions are whole, the others are kept if the values have them."""
    letters = names(len(operand(op, reading)))
    indices = _indices(op)
    values = reading.shape(reading.tensor(argument(op, 2, "values")) or ())
    if any(name is not None and _is_mask(name, reading) for name in indices):
        return _masked(op, indices, letters, reading)
    source, operands = list(letters), []
    for place, name in enumerate(indices):
        if name is not None:
            _meet(Ref(name), operand(op, reading)[place], reading)
            source[place] += "!"
            operands.append(("index", [f"_at{place}_{dim}!" for dim in range(len(reading.dims[name][0]))]))
    ranks = [len(terms) for _, terms in operands]
    written = _indexed(source, indices, [f"_value{place}!" for place in range(max(ranks, default=0))])
    terms = [term if size != 1 else "1" for term, size in zip(written[len(written) - len(values) :], values, strict=True)]
    return write([("input", source), *operands, ("values", terms)], source)


def _indexed(kept: Sequence[str], indices: Sequence[str | None], found: Sequence[str]) -> list[str]:
    """The terms of ``x[indices]``: those of the indices lie where these are if they are adjacent, else first."""
    places = [place for place, name in enumerate(indices) if name is not None]
    start = places[0] if places and places == list(range(places[0], places[-1] + 1)) else 0
    others = [(place, term) for place, term in enumerate(kept) if place not in places]
    return [*(term for place, term in others if place < start), *found, *(term for place, term in others if place >= start)]


def _masked(op: Op, indices: list[str | None], letters: list[str], reading: Reading) -> str | RuleOutcome:
    """``x[mask] = values``: pointwise for one value, or one per kept dimension; else the values are those of the selected elements."""
    mask, _ = _only_mask(indices, at_start=True)
    values = reading.tensor(argument(op, 2, "values")) or ()
    over, kept = letters[: len(reading.dims[mask][0])], letters[len(reading.dims[mask][0]) :]
    if len(values) <= len(kept):
        return write([("input", letters), ("index", over), ("values", kept[len(kept) - len(values) :])], letters)
    if len(values) != len(kept) + 1:
        raise RuleMisfit("its values have another rank than what it writes")
    terms = [*(letter + "!" for letter in over), *kept]
    made = bound(write([("input", terms), ("index", terms[: len(over)]), ("values", ["_selected!", *kept])], terms), op, reading)
    if values[0]:
        reading.atoms.unify(values[0], _selection(op, mask, reading.atoms.size(values[0]), reading))
    return made


def _selected(op: Op, indices: list[str | None], reading: Reading) -> RuleOutcome:
    """``x[:, mask]``: in place of the dimensions of the mask the result has that of the elements that it selects."""
    mask, place = _only_mask(indices)
    letters = names(len(operand(op, reading)))
    stop = place + len(reading.dims[mask][0])
    source = [*letters[:place], *(letter + "!" for letter in letters[place:stop]), *letters[stop:]]
    result = [*letters[:place], "_selected!", *letters[stop:]]
    made = bound(write([("input", source), ("index", source[place:stop])], result), op, reading)
    reading.atoms.unify(made.results[0][place], _selection(op, mask, op.outputs[0].shape[place], reading))
    return made


def nonzero(op: Op, reading: Reading) -> RuleOutcome:
    """``nonzero``, ``where`` of a mask alone: per dimension of the mask, the positions of what it selects, as columns or as results."""
    over, made = operand(op, reading), [spec.shape for spec in op.outputs]
    mask = op.args[0]
    assert isinstance(mask, Ref)
    axis = _selection(op, mask.op, made[0][0], reading)
    columns = tuple(reading.atoms.fresh(size) for size in made[0][1:])
    letters = [Letter("_over", READS, dim) for dim in over if dim] + [Letter("_selected", MAKES, dim) for dim in (axis, *columns) if dim]
    return RuleOutcome(((axis, *columns),) * len(made), tuple(letters), places=over)


def _selection(op: Op, mask: str, size: int, reading: Reading) -> Dim:
    axis = reading.selections.axis(op, mask, reading.dims[mask][0], size)
    if size < 2 or reading.atoms.size(axis) != size:
        raise RuleMisfit("how many elements it selects was estimated in two ways")
    return axis


def _only_mask(indices: list[str | None], *, at_start: bool = False) -> tuple[str, int]:
    """The mask that is the only index, and its place among the dimensions."""
    found = [(name, place) for place, name in enumerate(indices) if name is not None]
    if len(found) > 1 or (at_start and found[0][1]):
        raise RuleMisfit("which elements it takes depends on data")
    return found[0]


def _meet(index: Argument, dim: Dim, reading: Reading) -> None:
    """A dimension that is indexed by positions along one of its size is that one."""
    places = reading.places(index)
    if len(places) == 1 and reading.atoms.size(places[0]) == reading.atoms.size(dim):
        with suppress(Clash):
            reading.atoms.unify(places[0], dim)


def _is_mask(name: str, reading: Reading) -> bool:
    return reading.graph.by_name[name].outputs[0].dtype in ("bool", "uint8")


LOOKUPS: Family = {
    "embedding": Moves(embedding, "tables.embedding", looks_up=True, weights="embedding"),
    "embedding_bag": Operator(bags),
    "index_select": Operator(chosen_rows, "tables.index_select", looks_up=True, indexed="along one", rows="moved"),
    "gather": Operator(gathering(dim=1, index=2), "tables.gather", looks_up=True, rows="moved"),
    "index": Operator(index, "tables.index", looks_up=True, indexed="per dimension", rows="moved"),
    "take_along_dim": Operator(gathering(dim=2, index=1), "tables.gather", looks_up=True, rows="moved"),
    "one_hot": Operator("self[...] -> [... classes^]", "tables.one_hot"),
    "bucketize": Operator("self[...] boundaries[n!] -> [...]"),
    "searchsorted": Operator("sorted_sequence[... n!] self[... m] -> [... m]"),
    "scatter scatter_reduce": Operator(scattering),
    "index_fill index_copy": Operator(scattering, indexed="along one"),
    "scatter_add": Operator(scattering, rows="scattered"),
    "index_add": Operator(scattering, indexed="along one", rows="scattered"),
    "index_put": Operator(index_written, indexed="per dimension", rows="put"),
    "nonzero nonzero_numpy argwhere where.default": Operator(nonzero, rows="selected"),
    "select_scatter slice_scatter": Operator(part_written),
}
