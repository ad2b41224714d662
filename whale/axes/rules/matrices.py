"""Rules of products whose letters depend on ranks or an equation."""

from __future__ import annotations

from whale.axes.outcome import Reading, numbers
from whale.axes.rules.templates import names, operand, write
from whale.ir.graph import Op


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
    first = "k" if left == 1 else "... i k"
    second = "k" if right == 1 else "... k j"
    result = " ".join(["..."] * (max(left, right) > 1) + ["i"] * (left > 1) + ["j"] * (right > 1))
    return f"input[{first}] other[{second}] -> [{result}]"
