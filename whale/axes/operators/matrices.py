"""Matrix products, attention, recurrent layers and linear algebra."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from whale.axes.operators.entry import Family, Operator, Shape, Template, names, operand, write
from whale.axes.outcome import Reading, RuleMisfit, argument, numbers
from whale.ir.graph import Op, Ref


def einsum(op: Op, reading: Reading) -> str:
    """Its equation is a rule already."""
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
    left, right = operand(op, reading), operand(op, reading, 1)
    lefts, rights = names(len(left)), names(len(right), skip=len(left))
    pairs = zip(numbers(op.args[2]), numbers(op.args[3]), strict=True)
    for i, j in pairs:
        rights[j] = lefts[i]
    result = [t for t in lefts if t not in rights] + [t for t in rights if t not in lefts]
    return write([("input", lefts), ("other", rights)], result)


def matmul(op: Op, reading: Reading) -> str:
    """Vectors on either side have no row or column of their own."""
    left, right = len(operand(op, reading)), len(operand(op, reading, 1))
    first = "k" if left == 1 else "... i k"
    second = "k" if right == 1 else "... k j"
    result = " ".join(["..."] * (max(left, right) > 1) + ["i"] * (left > 1) + ["j"] * (right > 1))
    return f"input[{first}] other[{second}] -> [{result}]"


def attention(op: Op, reading: Reading) -> str:
    """Heads are independent, and so are queries, each of which reads all keys and values, or under a causal mask those up to it."""
    sequence = "sequence"
    if argument(op, 5, "is_causal", False) is True:  # by positions that are not known where rows are in the same dimension
        rows = set(reading.atoms.leaves(reading.batch))
        sequence += "<" if rows.isdisjoint(reading.atoms.leaves(operand(op, reading)[-2])) else "!"
    return (
        f"query[... heads*group {sequence} head_dim!] key[... heads memory& head_dim!] value[... heads memory& value_dim] "
        f"+attn_mask[... heads*group sequence& memory&] -> [... heads*group {sequence} value_dim]"
    )


def rows_by_matrix(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """``x[..., i] w[o, i]``: each element of the result is a sum of i products."""
    depth: int = args[0][-1]
    return 2 * prod(results[0]) * depth


def all_letters(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """``einsum``: all letters multiplied out, operand by operand."""
    equation, operands = args[:2]
    sizes: dict[str, int] = {}
    extra = 1
    for letters, shape in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=True):
        before, dots, after = letters.partition("...")
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(reversed(after), reversed(shape), strict=False))
        if dots:
            extra = max(extra, prod(shape[len(before) : len(shape) - len(after)]))
    return 2 * extra * prod(sizes.values()) * max(len(operands) - 1, 1)


def one_matrix_per_row(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """``_grouped_mm``: rows sorted by group, one matrix per group."""
    made: int = prod(args[0]) * args[1][-1]
    return 2 * made


def scores_and_values(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """``softmax(q[.., s, e] k[.., t, e]^T) v[.., t, f]``, masked or not."""
    query, key, value = args[:3]
    num_products: int = prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 2 * num_products


MATRICES: Family = {
    "linear": Operator(
        "input[... i] weight[o i] +bias[o] -> [... o]",
        "contractions.with_bias",
        ("bias", 2),
        flops=rows_by_matrix,
        weights="linear",
        rows="product",
    ),
    "addmm": Operator(
        "+self[i j] mat1[i k] mat2[k j] -> [i j]",
        "contractions.added_product",
        ("self", 0),
        factors=(1, 2),
        weights="addmm",
        rows="product",
    ),
    "mm": Operator("self[i k] mat2[k j] -> [i j]", weights="matmul", core="product", rows="product"),
    "bmm": Operator("self[b i k] mat2[b k j] -> [b i j]", core="product", rows="product"),
    "baddbmm": Operator(
        "+self[b i j] batch1[b i k] batch2[b k j] -> [b i j]",
        "contractions.added_product",
        ("self", 0),
        factors=(1, 2),
        core="product",
        rows="product",
    ),
    "matmul": Operator(matmul, flops=rows_by_matrix, weights="matmul", core="product", rows="product"),
    "mv": Operator("self[i k] vec[k] -> [i]", flops=rows_by_matrix, rows="product"),
    "dot": Operator("self[k] tensor[k] -> []", flops=rows_by_matrix, rows="product"),
    "vdot": Operator("self[k] other[k] -> []", flops=rows_by_matrix, rows="product"),
    "inner": Operator(flops=rows_by_matrix, rows="product"),
    "outer": Operator("self[i] vec2[j] -> [i j]", rows="product"),
    "bilinear": Operator("input1[... i] input2[... j] weight[o i j] +bias[o] -> [... o]", "contractions.with_bias", ("bias", 3)),
    "einsum": Operator(einsum, flops=all_letters, core="product", rows="product"),
    "tensordot": Operator(tensordot, rows="product"),
    "cdist": Operator("x1[... i d!] x2[... j d!] -> [... i j]"),
    "linalg_slogdet": Operator("A[... i! j!] -> [...] [...]"),
    "slogdet": Operator("self[... i! j!] -> [...] [...]"),
    "linalg_det": Operator("A[... i! j!] -> [...]"),
    "det": Operator("self[... i! j!] -> [...]"),
    "linalg_inv": Operator("A[... i! j!] -> [... _k! _l!]"),
    "linalg_eigvalsh": Operator("self[... i! j!] -> [... _k!]"),
    "linalg_eigh": Operator("self[... i! j!] -> [... _k!] [... _k! _l!]"),
    "inverse linalg_cholesky cholesky linalg_matrix_exp": Operator("self[... i! j!] -> [... _k! _l!]"),
    "_grouped_mm": Operator(
        "self[n! k] mat2[e! k j] offs[e!] +bias[e! j] -> [n! j]", "contractions.grouped_product", ("bias", 3), one_matrix_per_row
    ),
}

ATTENTION: Family = {
    "scaled_dot_product_attention": Operator(
        attention, "contractions.attention", flops=scores_and_values, factors=(0, 1, 2), core="all", keeps="inputs and result"
    ),
}


def recurrent(num_states: int) -> Template:
    """LSTM, GRU and plain recurrent layers: the batch is kept, everything else is whole."""

    def rule(op: Op, reading: Reading) -> str:
        if not isinstance(op.args[1 if num_states == 1 else 2], tuple | Ref):
            raise RuleMisfit("its arguments are unknown")
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


def recurrent_cell(num_states: int) -> Template:
    """One step of them: the batch is kept; a gate reads all of the state, so the rest is whole."""

    def rule(op: Op, reading: Reading) -> str:
        states = ["b hidden!", "b cell!"][:num_states]
        ranks = _tensor_ranks(op, reading)[1 + num_states :]
        weights = [f"weight{index}[{' '.join(f'_p{index}_{place}!' for place in range(rank))}]" for index, rank in enumerate(ranks)]
        operands = ["input[b in!]", *(f"state{index}[{state}]" for index, state in enumerate(states)), *weights]
        return f"{' '.join(operands)} -> {' '.join(f'[{state}]' for state in states)}"

    return rule


def _tensor_ranks(op: Op, reading: Reading) -> list[int]:
    ranks = []
    for argument_ in op.args:
        for item in argument_ if isinstance(argument_, tuple) else (argument_,):
            dims = reading.tensor(item)
            if dims is not None:
                ranks.append(len(dims))
    return ranks


def matrices_by_steps(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """Every matrix (they follow input and state) meets every step of every sequence."""
    weights = (weight for item in args[2:] for weight in (item if isinstance(item, list) else [item]))
    steps: int = prod(args[0][:-1])
    return 2 * steps * sum(prod(shape) for shape in weights if isinstance(shape, tuple) and len(shape) == 2)


_INPUT_AND_WEIGHTS = (0, 2, 3, 4, 5)

RECURRENCES: Family = {
    "lstm.input": Operator(recurrent(2), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "gru.input rnn_tanh.input rnn_relu.input": Operator(recurrent(1), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "lstm_cell": Operator(recurrent_cell(2), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "gru_cell rnn_tanh_cell rnn_relu_cell": Operator(recurrent_cell(1), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
}
