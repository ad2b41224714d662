"""Rules whose notation depends on an op's arguments: which dimension, how many, which reduction.

A template looks at the op and writes its rule. Dimensions get letters ``a b c ...`` in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from string import ascii_lowercase, ascii_uppercase

from whale.axes.outcome import Dims, Misfit, Reading, argument, number, numbers
from whale.ir.graph import Argument, Op, Ref

Template = Callable[[Op, Reading], str]

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for the reduction of a loss."""


def operand(op: Op, reading: Reading, position: int = 0) -> Dims:
    """A tensor argument that must be there."""
    dims = reading.tensor(op.args[position]) if position < len(op.args) else None
    if dims is None:
        raise Misfit(f"its argument {position} is no tensor")
    return dims


def names(count: int, skip: int = 0) -> list[str]:
    """That many letters."""
    letters = ascii_lowercase + ascii_uppercase
    if skip + count > len(letters):
        raise Misfit(f"it has more than {len(letters)} dimensions")
    return list(letters[skip : skip + count])


def write(operands: Iterable[tuple[str, Sequence[str]]], *results: Sequence[str]) -> str:
    """The notation of these operands and results."""
    left = " ".join(f"{name}[{' '.join(terms)}]" for name, terms in operands)
    return f"{left} -> {' '.join('[' + ' '.join(terms) + ']' for terms in results)}"


def chosen(value: Argument, rank: int) -> tuple[int, ...]:
    """Dimension numbers from an argument, counted from the left; all dimensions for None or an empty list."""
    if value is None or value == ():
        return tuple(range(rank))
    return tuple(sorted(dim % rank for dim in numbers(value))) if rank else ()


def along(mark: str, position: int = 1, default: int | None = None, name: str = "dim", num_results: int = 1) -> Template:
    """An op that works along given dimensions and keeps the shape: ``input[a b!] -> [a b!]``."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        dims = chosen(argument(op, position, name, default), rank)
        terms = [letter + mark if index in dims else letter for index, letter in enumerate(names(rank))]
        return write([("input", terms)], *[terms] * num_results)

    return rule


def reduction(how: str, position: int = 1, num_results: int = 1) -> Template:
    """An op that combines given dimensions to one value: ``input[a (b)] -> [a]``; `how` is "" where parts do not combine."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        value = argument(op, position, "dim")
        dims = chosen(None if isinstance(value, bool) else value, rank)
        letters = names(rank)
        keep = len(op.outputs[0].shape) == rank
        terms = [_combined(letter, how) if index in dims else letter for index, letter in enumerate(letters)]
        result = ["1" if index in dims else letter for index, letter in enumerate(letters) if keep or index not in dims]
        return write([("input", terms)], *[result] * num_results)

    return rule


def _combined(letter: str, how: str) -> str:
    return f"({letter}:{how})" if how else f"{letter}!"


def permutation(op: Op, reading: Reading) -> str:
    """``permute``: the letters in the order that the argument says."""
    letters = names(len(operand(op, reading)))
    return write([("input", letters)], [letters[dim] for dim in numbers(op.args[1])])


def swap(first: int | None = None, second: int | None = None) -> Template:
    """``transpose``: two letters change places."""

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
    """``numpy_T``: all letters in reverse."""
    letters = names(len(operand(op, reading)))
    return write([("input", letters)], letters[::-1])


def move(op: Op, reading: Reading) -> str:
    """``movedim``: some letters go to given places, the others keep their order."""
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
        raise Misfit("its repeats depend on data")
    letters = names(len(operand(op, reading)))
    dim = argument(op, 2, "dim")
    if dim is None:
        raise Misfit("it repeats a flattened tensor")
    result = list(letters)
    result[number(dim)] += "*_copies^"
    return write([("input", letters)], result)


def stack(op: Op, reading: Reading) -> str:
    """``stack``: a new dimension over the tensors."""
    tensors = reading.tensors(op)
    letters = names(len(tensors[0]))
    dim = number(argument(op, 1, "dim", 0)) % (len(letters) + 1)
    listed = op.args[0]
    count = len(listed) if isinstance(listed, tuple) else 1
    return write([(f"tensor{index}", letters) for index in range(count)], [*letters[:dim], "_stacked!", *letters[dim:]])


def unbind(op: Op, reading: Reading) -> str:
    """``unbind``: one result for each position of a dimension."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 1, "dim", 0)) % len(letters)
    rest = letters[:dim] + letters[dim + 1 :]
    return write([("input", [*letters[:dim], letters[dim] + "!", *letters[dim + 1 :]])], *[rest] * len(op.outputs))


def select(op: Op, reading: Reading) -> str:
    """``select``: one position of a dimension."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 1, "dim", 0)) % len(letters)
    rest = letters[:dim] + letters[dim + 1 :]
    return write([("input", [*letters[:dim], letters[dim] + "!", *letters[dim + 1 :]])], rest)


def padding(op: Op, reading: Reading) -> str:
    """``pad``: padded dimensions change, the others stay."""
    letters = names(len(operand(op, reading)))
    pads = numbers(argument(op, 1, "pad"))
    padded = {len(letters) - 1 - index // 2 for index, amount in enumerate(pads) if amount}
    source = [letter + "!" if index in padded else letter for index, letter in enumerate(letters)]
    return write([("input", source)], [f"_padded_{letter}!" if index in padded else letter for index, letter in enumerate(letters)])


def resized(op: Op, reading: Reading) -> str:
    """An op over trailing dimensions that may change their size (pools, interpolation): the leading two are kept."""
    letters = names(len(operand(op, reading)))
    kept = letters[: len(letters) - _num_spatial(op)]
    source = [*kept, *(f"{letter}!" for letter in letters[len(kept) :])]
    result = [*kept, *(f"_new_{letter}!" for letter in letters[len(kept) :])]
    return write([("input", source)], *[result] * len(op.outputs))


def _num_spatial(op: Op) -> int:
    digits = [int(char) for char in op.target.split(".")[1] if char in "123"]
    return digits[0] if digits else 2


def normalized(*results: str, position: int = 1) -> Template:
    """Normalisation over trailing dimensions: as many as ``normalized_shape`` has; `D` stands for them."""

    def rule(op: Op, reading: Reading) -> str:
        shape = argument(op, position, "normalized_shape")
        letters = names(len(shape) if isinstance(shape, tuple) else 1)
        whole = " ".join(f"{letter}!" for letter in letters)
        ones = " ".join("1" for _ in letters)
        operands = f"input[... {whole}] weight[{whole}] bias[{whole}]"
        return f"{operands} -> {' '.join(results)}".replace("D", whole).replace("O", ones)

    return rule


def batch_norm(training: int, num_results: int = 1) -> Template:
    """Batch normalisation: in training it reads the whole batch and space; afterwards it is pointwise per channel."""

    def rule(op: Op, reading: Reading) -> str:
        mark = "!" if argument(op, training, "training", False) is True else ""
        rest = "" if len(operand(op, reading)) == 2 else f" ...{mark}"
        statistics = " [channels]" * (num_results - 1) if mark else " [_none!]" * (num_results - 1)
        operands = f"input[n{mark} channels{rest}] weight[channels] bias[channels] running_mean[channels] running_var[channels]"
        return f"{operands} -> [n{mark} channels{rest}]{statistics}"

    return rule


def group_norm(op: Op, reading: Reading) -> str:
    """Group normalisation: groups are independent, the channels of one group are not."""
    groups = number(argument(op, 1, "num_groups"))
    channels = f"groups={groups}*c!"
    return f"input[n {channels} ...!] weight[{channels}] bias[{channels}] -> [n {channels} ...!]"


def convolution(op: Op, reading: Reading) -> str:
    """Convolution: input channels are contracted, output channels and groups kept, space is whole (halos)."""
    groups = argument(op, 6 if op.target.split(".")[1] != "convolution" else 8, "groups", 1)
    dims, weight = operand(op, reading), operand(op, reading, 1)
    n = "n " if len(dims) == len(weight) else ""
    space, kernel, made = (" ".join(f"{kind}{index}!" for index in range(len(weight) - 2)) for kind in ("x", "k", "y"))
    g = f"groups={number(groups)}"
    return f"input[{n}{g}*in_channels {space}] weight[{g}*channels in_channels {kernel}] +bias[{g}*channels] -> [{n}{g}*channels {made}]"


def transposed_convolution(op: Op, reading: Reading) -> str:
    """Transposed convolution: as convolution, with the weight's two channel dimensions exchanged."""
    groups = f"groups={number(argument(op, 6, 'groups', 1))}"
    dims, weight = operand(op, reading), operand(op, reading, 1)
    n = "n " if len(dims) == len(weight) else ""
    space, kernel, made = (" ".join(f"{kind}{index}!" for index in range(len(weight) - 2)) for kind in ("x", "k", "y"))
    source = f"{groups}*in_channels"
    return f"input[{n}{source} {space}] weight[{source} channels {kernel}] +bias[{groups}*channels] -> [{n}{groups}*channels {made}]"


def general_convolution(op: Op, reading: Reading) -> str:
    """``aten.convolution``: one op for both kinds."""
    if argument(op, 6, "transposed", False) is True:
        raise Misfit("it is transposed")
    return convolution(op, reading)


def pointwise_loss(position: int, num_weights: int = 0) -> Template:
    """A loss of equal shapes, element by element, then reduced."""

    def rule(op: Op, reading: Reading) -> str:
        shapes = [operand(op, reading), operand(op, reading, 1)]
        rank = max(len(dims) for dims in shapes)
        how = argument(op, position, "reduction", MEAN)
        letters = names(rank)
        terms = letters if how == NONE else [f"({letter}:{'mean' if how == MEAN else 'sum'})" for letter in letters]
        operands = [(name, terms[rank - len(dims) :]) for name, dims in zip(("input", "target"), shapes, strict=True)]
        for name in ("weight", "pos_weight")[:num_weights]:
            dims = _named(op, reading, name, 2 if name == "weight" else 3)
            operands.append((name, terms[rank - len(dims) :] if dims is not None else []))
        return write(operands, letters if how == NONE else [])

    return rule


def _named(op: Op, reading: Reading, name: str, position: int) -> Dims | None:
    return reading.tensor(argument(op, position, name))


def classification_loss(op: Op, reading: Reading) -> str:
    """Cross-entropy and negative log-likelihood: ``input[n classes ...] target[n ...]``, then reduced over all but the classes."""
    entropy = "cross_entropy" in op.target
    how = argument(op, 3, "reduction", MEAN)
    smoothing = argument(op, 5, "label_smoothing", 0.0) if entropy else 0.0
    dims, target = operand(op, reading), operand(op, reading, 1)
    plain = entropy and smoothing == 0.0 and len(target) < len(dims) and _named(op, reading, "weight", 2) is None
    classes = "(classes:softmax)" if plain else "classes!"
    combine = {NONE: "", MEAN: ":weighted_mean", SUM: ":sum"}[number(how)]
    letters = names(len(dims) - 1)
    rest = [f"({letter}{combine})" if combine else letter for letter in letters]
    full = [*rest[:1], classes, *rest[1:]] if len(dims) > 1 else [classes]
    hard = rest if len(target) < len(dims) else full
    results = [letters if how == NONE else []]
    if len(op.outputs) == 2:  # the total weight, beside the loss
        results.append([])
    return write([("self", full), ("target", hard), ("weight", [classes])], *results)


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


def found_along(op: Op, reading: Reading) -> str:
    """``topk``, ``kthvalue``, ``max`` along a dimension: it is read whole, and what is found has another size."""
    letters = names(len(operand(op, reading)))
    place = 2 if op.target.startswith(("aten.topk", "aten.kthvalue")) else 1
    dim = number(argument(op, place, "dim", -1)) % max(len(letters), 1)
    source = [letter + "!" if index == dim else letter for index, letter in enumerate(letters)]
    rank = len(op.outputs[0].shape)
    result = [*letters[:dim], *(["_found!"] if rank == len(letters) else []), *letters[dim + 1 :]]
    return write([("input", source)], *[result] * len(op.outputs))


def einsum(op: Op, reading: Reading) -> str:
    """``einsum``: its equation is a rule already."""
    equation = str(op.args[0]).replace(" ", "")
    inputs, _, result = equation.partition("->")
    parts = inputs.split(",")
    if "->" not in equation:
        once = sorted({letter for letter in inputs if letter.isalpha() and inputs.count(letter) == 1})
        result = ("..." if "..." in inputs else "") + "".join(once)
    single = {letter for letter in inputs if letter.isalpha() and letter not in result and sum(letter in part for part in parts) == 1}
    operands = [(f"tensor{index}", [f"({t})" if t in single else t for t in _spaced(part)]) for index, part in enumerate(parts)]
    return write(operands, _spaced(result))


def _spaced(text: str) -> list[str]:
    return ["..." if token == "." else token for token in text.replace("...", ".")]


def tensordot(op: Op, reading: Reading) -> str:
    """``tensordot``: listed dimensions are contracted pairwise."""
    left, right = operand(op, reading), operand(op, reading, 1)
    lefts, rights = names(len(left)), names(len(right), skip=len(left))
    pairs = zip(numbers(op.args[2]), numbers(op.args[3]), strict=True)
    for i, j in pairs:
        rights[j] = lefts[i]
    result = [t for t in lefts if t not in rights] + [t for t in rights if t not in lefts]
    return write([("input", lefts), ("other", rights)], result)


def matmul(op: Op, reading: Reading) -> str:
    """``matmul``: vectors on either side have no row or column of their own."""
    left, right = len(operand(op, reading)), len(operand(op, reading, 1))
    first = "[(k)]" if left == 1 else "[... i k]"
    second = "[k]" if right == 1 else "[... k j]"
    if left == 1:
        first = "[k]"
    result = ["..."] if left > 1 or right > 1 else []
    result += ["i"] if left > 1 else []
    result += ["j"] if right > 1 else []
    return f"input{first} other{second} -> [{' '.join(result)}]"


def recurrent(num_states: int) -> Template:
    """LSTM, GRU and plain recurrent layers: the batch is kept, everything else is whole."""

    def rule(op: Op, reading: Reading) -> str:
        if not isinstance(op.args[1 if num_states == 1 else 2], tuple | Ref):
            raise Misfit("its arguments are unknown")
        batch_first = op.args[-1] is True
        tensors = _tensor_ranks(op, reading)
        states = ["layers! b hidden!", "layers! b cell!"][:num_states]
        steps = "b steps! in!" if batch_first else "steps! b in!"
        made = "b steps! out!" if batch_first else "steps! b out!"
        operands = [f"input[{steps}]", *(f"state{i}[{state}]" for i, state in enumerate(states))]
        for index, rank in enumerate(tensors[1 + num_states :]):
            operands.append(f"weight{index}[{' '.join(f'_p{index}_{place}!' for place in range(rank))}]")
        return f"{' '.join(operands)} -> [{made}] {' '.join(f'[{state}]' for state in states)}"

    return rule


def _tensor_ranks(op: Op, reading: Reading) -> list[int]:
    ranks = []
    for argument_ in op.args:
        for item in argument_ if isinstance(argument_, tuple) else (argument_,):
            dims = reading.tensor(item)
            if dims is not None:
                ranks.append(len(dims))
    return ranks


def pixel_shuffle(op: Op, reading: Reading) -> str:
    """``pixel_shuffle``: two factors of the channels move into space."""
    r = number(op.args[1])
    return f"self[... channels*r={r}*s={r} h w] -> [... channels h*r w*s]"


def unfolding(op: Op, reading: Reading) -> str:
    """``unfold``: windows over one dimension."""
    letters = names(len(operand(op, reading)))
    dim = number(op.args[1]) % len(letters)
    source = [letter + "!" if place == dim else letter for place, letter in enumerate(letters)]
    result = ["_windows!" if place == dim else letter for place, letter in enumerate(letters)]
    return write([("input", source)], [*result, "_window!"])


def halved(op: Op, reading: Reading) -> str:
    """``glu``: two halves of one dimension meet element by element: ``[a two*b] -> [a b]``."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 1, "dim", -1)) % len(letters)
    source = [f"_two=2!*{letter}" if place == dim else letter for place, letter in enumerate(letters)]
    return write([("input", source)], letters)


def similarity(op: Op, reading: Reading) -> str:
    """``cosine_similarity``: two tensors meet along a dimension, which must be whole."""
    shapes = [operand(op, reading), operand(op, reading, 1)]
    rank = max(len(dims) for dims in shapes)
    letters = names(rank)
    dim = number(argument(op, 2, "dim", 1)) % rank
    terms = [letter + "!" if place == dim else letter for place, letter in enumerate(letters)]
    operands = [(name, terms[rank - len(dims) :]) for name, dims in zip(("x1", "x2"), shapes, strict=True)]
    return write(operands, letters[:dim] + letters[dim + 1 :])


def difference(op: Op, reading: Reading) -> str:
    """``diff``: neighbours along a dimension, which may first be lengthened at both ends."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 2, "dim", -1)) % len(letters)
    shapes = {name: [f"{stem}!" if place == dim else letter for place, letter in enumerate(letters)] for name, stem in _DIFFERENCE.items()}
    result = shapes.pop("result")
    return write(shapes.items(), result)


_DIFFERENCE = {"input": "_old", "prepend": "_before", "append": "_after", "result": "_new"}


def prelu(op: Op, reading: Reading) -> str:
    """``prelu``: pointwise, with one weight per channel (dimension 1) or one for all."""
    if len(operand(op, reading)) < 2:
        return "input[...] weight[1] -> [...]"
    return "input[n channels ...] weight[channels] -> [n channels ...]"
