"""Reductions: dimensions that are combined to one value, or searched; and what works along a dimension that it keeps."""

from __future__ import annotations

from whale.axes.operators.entry import Family, Moves, Operator, Template, along, chosen, names, operand, write
from whale.axes.outcome import Reading, argument, number
from whale.ir.graph import Op


def reduction(how: str = "", position: int = 1) -> Template:
    """An op that combines given dimensions to one value: ``input[a (b)] -> [a]``; `how` is "" where parts do not combine."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        value = argument(op, position, "dim")
        dims = chosen(None if isinstance(value, bool) else value, rank)
        letters = names(rank)
        keep = len(op.outputs[0].shape) == rank
        terms = [_combined(letter, how) if index in dims else letter for index, letter in enumerate(letters)]
        result = ["1" if index in dims else letter for index, letter in enumerate(letters) if keep or index not in dims]
        return write([("input", terms)], *[result] * len(op.outputs))

    return rule


def _combined(letter: str, how: str) -> str:
    return f"({letter}:{how})" if how else f"{letter}!"


def found_along(op: Op, reading: Reading) -> str:
    """``topk``, ``kthvalue``, ``max`` along a dimension: it is read whole, and what is found has another size."""
    letters = names(len(operand(op, reading)))
    place = 2 if op.target.startswith(("aten.topk", "aten.kthvalue")) else 1
    dim = number(argument(op, place, "dim", -1)) % max(len(letters), 1)
    source = [letter + "!" if index == dim else letter for index, letter in enumerate(letters)]
    rank = len(op.outputs[0].shape)
    result = [*letters[:dim], *(["_found!"] if rank == len(letters) else []), *letters[dim + 1 :]]
    return write([("input", source)], *[result] * len(op.outputs))


def similarity(op: Op, reading: Reading) -> str:
    """``cosine_similarity``: two tensors meet along a dimension, which must be whole."""
    shapes = [operand(op, reading), operand(op, reading, 1)]
    rank = max(len(dims) for dims in shapes)
    letters = names(rank)
    dim = number(argument(op, 2, "dim", 1)) % rank
    terms = [letter + "!" if place == dim else letter for place, letter in enumerate(letters)]
    operands = [(name, terms[rank - len(dims) :]) for name, dims in zip(("x1", "x2"), shapes, strict=True)]
    return write(operands, letters[:dim] + letters[dim + 1 :])


def distance(op: Op, reading: Reading) -> str:
    """``pairwise_distance``: two tensors meet along their last dimension, which must be whole and may be kept."""
    shapes = [operand(op, reading), operand(op, reading, 1)]
    letters = names(max(len(dims) for dims in shapes))
    terms = [*letters[:-1], letters[-1] + "!"]
    operands = [(name, terms[len(terms) - len(dims) :]) for name, dims in zip(("x1", "x2"), shapes, strict=True)]
    return write(operands, [*letters[:-1], *(["_distance!"] if len(op.outputs[0].shape) == len(letters) else [])])


def difference(op: Op, reading: Reading) -> str:
    """``diff``: neighbours along a dimension, which may first be lengthened at both ends."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 2, "dim", -1)) % len(letters)
    shapes = {name: [f"{stem}!" if place == dim else letter for place, letter in enumerate(letters)] for name, stem in _DIFFERENCE.items()}
    result = shapes.pop("result")
    return write(shapes.items(), result)


_DIFFERENCE = {"input": "_old", "prepend": "_before", "append": "_after", "result": "_new"}


def diagonal(op: Op, reading: Reading) -> str:
    """``diag``: a diagonal of a matrix, or a matrix of a diagonal."""
    return "self[n!] -> [_rows! _columns!]" if len(operand(op, reading)) == 1 else "self[i! j!] -> [_places!]"


REDUCTIONS: Family = {
    "sum": Moves(reduction("sum"), gradient="one number"),
    "nansum count_nonzero": Operator(reduction("sum")),
    "mean": Moves(reduction("mean")),
    "amax": Operator(reduction("max"), "contractions.extreme", keeps="result"),
    "amin": Operator(reduction("min"), "contractions.extreme", keeps="result"),
    "max.default": Operator(reduction("max"), "contractions.extreme"),
    "min.default": Operator(reduction("min"), "contractions.extreme"),
    "any _is_any_true": Operator(reduction("any")),
    "all _is_all_true": Operator(reduction("all")),
    "prod": Operator(reduction("prod")),
    "var std logsumexp argmax argmin": Operator(reduction()),
    "var_mean std_mean": Operator(reduction()),
    "norm linalg_vector_norm": Operator(reduction(position=2)),
    "nanmean": Operator(reduction()),
    "max.dim min.dim median.dim nanmedian.dim mode topk kthvalue": Operator(found_along),
    "bincount": Operator("self[n!] weights[n!] -> [_counted!]"),
    "histc": Operator("self[...!] -> [_counted!]"),
    "cosine_similarity": Operator(similarity),
    "pairwise_distance": Operator(distance),
}

ALONG_A_DIMENSION: Family = {
    "cumsum cumprod logcumsumexp": Operator(along()),
    "cummax cummin": Operator(along()),
    "sort": Operator(along(default=-1)),
    "sort.stable": Operator(along(position=2, default=-1)),
    "argsort": Operator(along(default=-1)),
    "diff": Operator(difference),
    "flip": Moves(along(name="dims")),
    "roll": Moves(along(position=2, name="dims")),
    "tril triu": Operator("self[... i! j!] -> [... i! j!]"),
    "diag": Operator(diagonal),
    "diagonal": Operator("self[i! j!] -> [i!]"),
    "multinomial": Operator("self[... n!] -> [... _drawn!]"),
}
