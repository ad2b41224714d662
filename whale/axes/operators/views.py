"""The rule of views: the same elements in the same order, so only the grouping of atoms into dimensions changes.

    [b  s  24]  ->  [b  s  3  2  4]     the 24 is refined to 3 x 2 x 4
    [b  s  3  2  4]  ->  [b*s  24]      grouped again, nothing is lost

Only sizes of the result are read, never the op's arguments, so `-1` and computed sizes are alike. Dimensions are
matched in the smallest groups whose products agree; a group whose factors do not fit is whole, the others are not.
"""

from __future__ import annotations

from collections.abc import Iterator

from whale.axes.atoms import Clash, Dim
from whale.axes.outcome import CLASHES, KEPT, Dims, Letter, Misfit, Outcome, Reading, sizes_of
from whale.ir.graph import Op


def view(op: Op, reading: Reading) -> Outcome:
    """Regroups the first operand's atoms by the result's sizes."""
    source = op.args[0]
    dims = reading.tensor(source)
    if dims is None:
        raise Misfit("its operand is no tensor")
    sizes = sizes_of(op.outputs[0])
    made: list[Dim] = [()] * len(sizes)
    letters: list[Letter] = []
    for number, (olds, news) in enumerate(_groups(reading.shape(dims), sizes)):
        flat = tuple(atom for index in olds for atom in dims[index])
        letters.append(_regroup(f"group {number}", flat, news, sizes, made, reading))
    result: Dims = tuple(made)
    return Outcome((result,), tuple(letters), is_position=reading.is_position(source) and sum(dim != () for dim in result) == 1)


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
    """The smallest runs of old and new dimensions with equal products; dimensions of size 1 are left out."""
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
                raise Misfit("it has another number of elements than its operand")
            if take_left:
                product_left *= old[olds[i]]
                left.append(olds[i])
                i += 1
            else:
                product_right *= new[news[j]]
                right.append(news[j])
                j += 1
        yield left, right
