"""Ops that regroup, move, repeat or cut dimensions.

A view has the same elements in the same order, so only the grouping of atoms into dimensions changes:

    [b  s  24]  ->  [b  s  3  2  4]     the 24 is refined to 3 x 2 x 4
    [b  s  3  2  4]  ->  [b*s  24]      grouped again, nothing is lost

Only sizes of its result are read, never the op's arguments, so `-1` and computed sizes are equal. Dimensions are matched in the smallest
groups whose products agree; a group whose factors do not fit is whole, the others are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from whale.axes.atoms import ROWS, Clash, Dim
from whale.axes.operators.concatenations import cat, slice_, split
from whale.axes.operators.entry import Family, Moves, Template, bound, letters_of, names, operand, put, write
from whale.axes.outcome import CLASHES, KEPT, Dims, Letter, Reading, RuleMisfit, RuleOutcome, argument, number, numbers
from whale.ir.graph import Op


def permutation(op: Op, reading: Reading) -> str:
    letters = names(len(operand(op, reading)))
    return write([("input", letters)], [letters[dim] for dim in numbers(op.args[1])])


def swap(first: int | None = None, second: int | None = None) -> Template:
    def rule(op: Op, reading: Reading) -> str:
        letters = names(len(operand(op, reading)))
        if len(letters) < 2:
            return write([("input", letters)], letters)
        i = number(op.args[1]) if first is None else first
        j = number(op.args[2]) if second is None else second
        swapped = list(letters)
        swapped[i], swapped[j] = letters[j], letters[i]
        return write([("input", letters)], swapped)

    return rule


def reverse(op: Op, reading: Reading) -> str:
    letters = names(len(operand(op, reading)))
    return write([("input", letters)], letters[::-1])


def move(op: Op, reading: Reading) -> str:
    """``movedim``: some letters go to given positions, the others keep their order."""
    letters = names(len(operand(op, reading)))
    source = [dim % len(letters) for dim in numbers(op.args[1])]
    target = [dim % len(letters) for dim in numbers(op.args[2])]
    placed = {place: letters[dim] for dim, place in zip(source, target, strict=True)}
    rest = (letter for dim, letter in enumerate(letters) if dim not in source)
    return write([("input", letters)], [placed[place] if place in placed else next(rest) for place in range(len(letters))])


def expansion(op: Op, reading: Reading) -> str:
    """``expand``: dimensions of size 1, and new ones on the left, take a letter that the op makes: ``[a 1] -> [n^ a m^]``."""
    given = reading.shape(operand(op, reading))
    wanted = op.outputs[0].shape
    letters = names(len(wanted))
    lead = len(wanted) - len(given)
    source = [letters[lead + index] if size != 1 else "1" for index, size in enumerate(given)]
    result = [letter if index >= lead and given[index - lead] != 1 else letter + "^" for index, letter in enumerate(letters)]
    if len(op.args) > 1 and reading.tensor(op.args[1]) is not None:  # expand_as
        return write([("input", source), ("other", letters)], letters)
    return write([("input", source)], result)


def repetition(op: Op, reading: Reading) -> str:
    """``repeat``: the copies are the outer factor: ``[a] -> [n^*a]``."""
    given = operand(op, reading)
    rank = len(op.outputs[0].shape)
    copies, letters = names(rank), names(rank, skip=rank)
    lead = rank - len(given)
    result = [
        f"{copy}^*{letter}" if index >= lead else f"{copy}^" for index, (copy, letter) in enumerate(zip(copies, letters, strict=True))
    ]
    return write([("input", letters[lead:])], result)


def interleaved_repetition(op: Op, reading: Reading) -> str:
    """``repeat_interleave`` by a number: the copies are the inner factor: ``[a] -> [a*n^]``."""
    if reading.tensor(op.args[1]) is not None:
        raise RuleMisfit("its repeats depend on data")
    letters = names(len(operand(op, reading)))
    dim = argument(op, 2, "dim")
    if dim is None:
        raise RuleMisfit("it repeats a flattened tensor")
    result = list(letters)
    result[number(dim)] += "*_copies^"
    return write([("input", letters)], result)


def stack(op: Op, reading: Reading) -> str:
    tensors = reading.tensors(op)
    letters = names(len(tensors[0]))
    dim = number(argument(op, 1, "dim", 0)) % (len(letters) + 1)
    listed = op.args[0]
    count = len(listed) if isinstance(listed, tuple) else 1
    return write([(f"tensor{index}", letters) for index in range(count)], [*letters[:dim], "_stacked!", *letters[dim:]])


def unbind(op: Op, reading: Reading) -> RuleOutcome:
    """``unbind``, ``select``: results for single positions of a dimension."""
    letters, dim = letters_of(op, reading, 1, 0)
    made = bound(write([("input", put(letters, dim, f"{letters[dim]}!"))], *[put(letters, dim)] * len(op.outputs)), op, reading)
    columns = reading.places(op.args[0]) if len(letters) == 2 and dim == 1 else ()
    taken = columns if len(columns) < 2 or op.operator == "unbind" else (columns[number(op.args[2])],)
    return replace(made, places=taken)


def padding(op: Op, reading: Reading) -> str:
    letters = names(len(operand(op, reading)))
    pads = numbers(argument(op, 1, "pad"))
    padded = {len(letters) - 1 - index // 2 for index, amount in enumerate(pads) if amount}
    source = [letter + "!" if index in padded else letter for index, letter in enumerate(letters)]
    return write([("input", source)], [f"_padded_{letter}!" if index in padded else letter for index, letter in enumerate(letters)])


def pixel_shuffle(op: Op, reading: Reading) -> str:
    """Two factors of the channels move into space."""
    r = number(op.args[1])
    return f"self[... channels*r={r}*s={r} h w] -> [... channels h*r w*s]"


def unfolding(op: Op, reading: Reading) -> str:
    """``unfold``: windows over one dimension."""
    letters, dim = letters_of(op, reading)
    return write([("input", put(letters, dim, f"{letters[dim]}!"))], [*put(letters, dim, "_windows!"), "_window!"])


def grid(op: Op, reading: Reading) -> str:
    """``meshgrid``: each tensor along a dimension of its own, repeated along those of the others."""
    tensors = reading.tensors_of(op.args[0])
    letters = names(len(tensors))
    first = 2 if argument(op, 1, "indexing") == "xy" else 0
    operands = [(f"tensor{index}", letters[index : index + len(dims)]) for index, dims in enumerate(tensors)]
    return write(operands, *[letters[:first][::-1] + letters[first:]] * len(letters))


def view(op: Op, reading: Reading) -> RuleOutcome:
    """Regroups the first operand's atoms by the result's sizes."""
    source = op.args[0]
    dims = reading.tensor(source)
    if dims is None:
        raise RuleMisfit("its operand is no tensor")
    sizes = op.outputs[0].shape_at(ROWS)
    made: list[Dim] = [()] * len(sizes)
    letters: list[Letter] = []
    for place, (olds, news) in enumerate(_groups(reading.shape(dims), sizes)):
        flat = tuple(atom for index in olds for atom in dims[index])
        letters.append(_regroup(f"group {place}", flat, news, sizes, made, reading))
    result: Dims = tuple(made)
    is_position = reading.is_position(source) and sum(dim != () for dim in result) == 1
    places = reading.places(source)
    return RuleOutcome((result,), tuple(letters), is_position, places if len(places) == 1 else ())


def _regroup(name: str, flat: Dim, news: list[int], sizes: tuple[int, ...], made: list[Dim], reading: Reading) -> Letter:
    """Gives the new dimensions of one group their atoms."""
    atoms = reading.atoms
    if len(news) == 1:
        made[news[0]] = flat
        return Letter(name, KEPT, flat)
    for index in news:
        made[index] = atoms.fresh(sizes[index])
    joined = tuple(atom for index in news for atom in made[index])
    try:
        atoms.unify(flat, joined)
    except Clash:
        return Letter(name, CLASHES, flat + joined)
    return Letter(name, KEPT, flat)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of old and new dimensions with equal products, without dimensions of size 1."""
    olds = [index for index, size in enumerate(old) if size != 1]
    news = [index for index, size in enumerate(new) if size != 1]
    i = j = 0
    while i < len(olds) or j < len(news):
        left: list[int] = []
        right: list[int] = []
        product_left = product_right = 1
        while not left or product_left != product_right:
            take_left = product_left <= product_right
            if (take_left and i == len(olds)) or (not take_left and j == len(news)):
                raise RuleMisfit("it has another number of elements than its operand")
            if take_left:
                product_left *= old[olds[i]]
                left.append(olds[i])
                i += 1
            else:
                product_right *= new[news[j]]
                right.append(news[j])
                j += 1
        yield left, right


Moved = partial(Moves, rows="moved")

SHAPES: Family = {
    "view reshape _unsafe_view _reshape_alias": Moved(view, "shapes.view"),
    "view.dtype": Moves(view, "shapes.view"),
    "view_as reshape_as": Moved(view, "shapes.view_as"),
    "flatten ravel unsqueeze": Moved(view),
    "unflatten": Moved(view, "shapes.unflatten"),
    "squeeze": Moved(view, "shapes.squeeze"),
    "transpose swapaxes swapdims": Moved(swap()),
    "t": Moved(swap(0, 1)),
    "mT matrix_H": Moved(swap(-2, -1)),
    "numpy_T": Moved(reverse),
    "permute": Moved(permutation),
    "movedim moveaxis": Moved(move),
    "expand broadcast_to": Moved(expansion, "shapes.sized"),
    "expand_as": Moved(expansion),
    "repeat tile": Moved(repetition, "shapes.repeat"),
    "repeat_interleave.self_int": Moved(interleaved_repetition, "shapes.repeat_interleave"),
    "cat concat concatenate": Moves(cat, rows="joined"),
    "stack": Moves(stack, rows="joined"),
    "meshgrid": Moves(grid),
    "split split_with_sizes unsafe_split unsafe_chunk chunk tensor_split": Moved(split, "shapes.split", gradient="put together"),
    "unbind select": Moved(unbind, gradient="put together"),
    "slice narrow": Moved(slice_, "shapes.slice_", gradient="put together"),
    "pad constant_pad_nd": Moves(padding),
    "pixel_shuffle": Moved(pixel_shuffle, "shapes.pixel_shuffle"),
    "unfold": Moved(unfolding),
}
