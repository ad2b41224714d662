"""The rule of advanced indexing, ``x[i, :, j]``: indexed dimensions are looked up, the others are kept.

An index that holds all positions of the dimension it indexes is the identity there, so masks of the form
``mask[arange(b)[:, None], arange(s)]`` keep their axes.
"""

from __future__ import annotations

from whale.axes.outcome import Misfit, Reading, argument
from whale.axes.rules.templates import names, operand, write
from whale.ir.graph import Op, Ref


def index(op: Op, reading: Reading) -> str:
    """``index``: the notation of this indexing."""
    dims = operand(op, reading)
    indices = _indices(op, reading)
    ranks = [None if name is None else len(reading.dims[name][0]) for name in indices]
    broadcast = max(rank for rank in ranks if rank is not None)
    found = [f"_found{place}" for place in range(broadcast, 0, -1)]  # dimensions of the indices, numbered from the right
    letters = names(len(dims))
    source, kept, indexed, operands = [], [], [], []
    for place, letter in enumerate(letters):
        name = indices[place] if place < len(indices) else None
        if name is None:
            source.append(letter)
            kept.append((place, letter))
            continue
        indexed.append(place)
        terms = found[broadcast - len(reading.dims[name][0]) :]
        operands.append(("index", terms))
        source.append(_identity(name, place, terms, op, reading) or f"({letter}:lookup)")
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = [letter for place, letter in kept if adjacent and place < indexed[0]]
    after = [letter for place, letter in kept if not adjacent or place > indexed[0]]
    return write([("input", source), *operands], [*before, *found, *after])


def _indices(op: Op, reading: Reading) -> list[str | None]:
    listed = op.args[1]
    indices = [item.op if isinstance(item, Ref) else None for item in (listed if isinstance(listed, tuple) else (listed,))]
    for name in indices:
        if name is not None and _is_mask(name, reading):
            raise Misfit("the size of its result depends on data")
    if not any(indices):
        raise Misfit("it has no index")
    return indices


def _identity(name: str, place: int, terms: list[str], op: Op, reading: Reading) -> str:
    """The index's own letter, where it holds all positions of the dimension that it indexes; else ""."""
    if name not in reading.positions:
        return ""
    shape = reading.shape(reading.dims[name][0])
    size = reading.shape(operand(op, reading))[place]
    return next((term for term, extent in zip(terms, shape, strict=True) if extent == size != 1), "")


def index_written(op: Op, reading: Reading) -> str:
    """``index_put``: indexed dimensions are whole, the others are kept where the values have them."""
    letters = names(len(operand(op, reading)))
    listed = op.args[1] if isinstance(op.args[1], tuple) else ()
    indices = [item.op if isinstance(item, Ref) else None for item in listed]
    rank = len(reading.tensor(argument(op, 2, "values")) or ())
    if any(name is not None and _is_mask(name, reading) for name in indices):
        return _masked(indices, rank, letters, reading)
    free = [letter for place, letter in enumerate(letters) if place >= len(indices) or indices[place] is None]
    source = [letter if letter in free else letter + "!" for letter in letters]
    operands = [("input", source)]
    for number, name in enumerate(name for name in indices if name is not None):
        operands.append(("index", [f"_at{number}_{place}!" for place in range(len(reading.dims[name][0]))]))
    trailing = free if None not in indices else []
    lead = max(rank - len(trailing), 0)
    terms = [f"_value{place}!" for place in range(lead)] + trailing[len(trailing) - (rank - lead) :]
    return write([*operands, ("values", terms)], source)


def _masked(indices: list[str | None], rank: int, letters: list[str], reading: Reading) -> str:
    """``x[mask] = one value`` is pointwise; with several values their number depends on data."""
    if len(indices) != 1 or indices[0] is None or rank:
        raise Misfit("what it writes where depends on data")
    mask = letters[: len(reading.dims[indices[0]][0])]
    return write([("input", letters), ("index", mask), ("values", [])], letters)


def _is_mask(name: str, reading: Reading) -> bool:
    return reading.graph.by_name[name].outputs[0].dtype in ("bool", "uint8")
