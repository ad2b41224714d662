"""Rules of normalisations: what must be whole to be normalised."""

from __future__ import annotations

from whale.axes.outcome import Reading, argument, number
from whale.axes.rules.templates import Template, names, operand
from whale.ir.graph import Op


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
    """Batch normalisation: in training it takes statistics over batch and space; afterwards it is pointwise per channel."""

    def rule(op: Op, reading: Reading) -> str:
        mark = "!" if argument(op, training, "training", False) is True else ""
        rest = "" if len(operand(op, reading)) == 2 else f" ...{mark}"
        statistics = " [channels]" * (num_results - 1) if mark else " [_none!]" * (num_results - 1)
        rows = "n~" if mark and num_results == 1 else f"n{mark}"
        operands = f"input[{rows} channels{rest}] weight[channels] bias[channels] running_mean[channels] running_var[channels]"
        return f"{operands} -> [{rows} channels{rest}]{statistics}"

    return rule


def group_norm(op: Op, reading: Reading) -> str:
    """Group normalisation: groups are independent, the channels of one group are not."""
    groups = number(argument(op, 1, "num_groups"))
    channels = f"groups={groups}*c!"
    return f"input[n {channels} ...!] weight[{channels}] bias[{channels}] -> [n {channels} ...!]"
