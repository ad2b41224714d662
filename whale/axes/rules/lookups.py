"""Rules of lookups and writes at given positions of one dimension."""

from __future__ import annotations

from whale.axes.outcome import Misfit, Reading, argument, number
from whale.axes.rules.templates import Template, names, operand, write
from whale.ir.graph import Op


def chosen_rows(op: Op, reading: Reading) -> str:
    """``index_select``: positions of one dimension, looked up."""
    letters = names(len(operand(op, reading)))
    dim = number(op.args[1]) % len(letters)
    source = [f"({letter}:lookup)" if index == dim else letter for index, letter in enumerate(letters)]
    result = ["_found" if index == dim else letter for index, letter in enumerate(letters)]
    return write([("input", source), ("index", ["_found"] if operand(op, reading, 2) else [])], result)


def gathering(dim: int, index: int) -> Template:
    """``gather``: positions of one dimension, looked up element by element; other dimensions must match to be kept."""

    def rule(op: Op, reading: Reading) -> str:
        source, places = operand(op, reading), operand(op, reading, index)
        if len(source) != len(places):
            raise Misfit("its index has another rank")
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
    """``scatter`` and kin: one dimension of `self` is written at given positions; the others are kept where they match."""
    source = operand(op, reading)
    letters = names(len(source))
    dim = number(op.args[1]) % len(letters)
    whole = reading.shape(source)
    terms = [letter + "!" if position == dim else letter for position, letter in enumerate(letters)]
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
            raise Misfit("it writes a part of the other dimensions")
        operands.append((name, ["_written!" if place == dim else letter for place, letter in enumerate(letters)]))
    return write(operands, terms)


def part_written(op: Op, reading: Reading) -> str:
    """``select_scatter``, ``slice_scatter``: a part of one dimension is replaced."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 2, "dim", 0)) % len(letters)
    terms = [letter + "!" if position == dim else letter for position, letter in enumerate(letters)]
    selected = "select" in op.target
    source = [("_part!" if place == dim else letter) for place, letter in enumerate(letters) if not (selected and place == dim)]
    return write([("input", terms), ("src", source)], terms)


def embedding(op: Op, reading: Reading) -> str:
    """``embedding``: rows of a table, looked up. Gradients scaled by frequency need all the indices."""
    mark = "!" if argument(op, 3, "scale_grad_by_freq", False) is True else ""
    return f"weight[(vocabulary:lookup) hidden] indices[...{mark}] -> [...{mark} hidden]"


def bags(op: Op, reading: Reading) -> str:
    """``embedding_bag``: where a bag ends, values in tensors tell, so bags are whole; columns are kept, but for their maximum."""
    hidden = "hidden!" if number(argument(op, 4, "mode", 0)) == 2 else "hidden"
    weights = [] if reading.tensor(argument(op, 6, "per_sample_weights")) is None else [("per_sample_weights", ["words!"])]
    operands = [("weight", ["vocabulary!", hidden]), ("indices", ["words!"]), ("offsets", ["_offsets!"]), *weights]
    others = [[f"_p{index}_{place}!" for place in range(len(spec.shape))] for index, spec in enumerate(op.outputs[1:])]
    return write(operands, ["_bags!", hidden], *others)
