"""Normalisations: what must be whole to be normalised."""

from __future__ import annotations

from whale.axes.operators.entry import Family, Operator, Template, along, names, operand, write
from whale.axes.outcome import Reading, argument, number
from whale.ir.graph import Op


def normalized(op: Op, reading: Reading) -> str:
    """Normalisation over trailing dimensions: as many as ``normalized_shape`` has; native forms return statistics, too."""
    shape = argument(op, 1, "normalized_shape")
    letters = names(len(shape) if isinstance(shape, tuple) else 1)
    whole = " ".join(f"{letter}!" for letter in letters)
    statistics = f" [... {' '.join('1' for _ in letters)}]" * (len(op.outputs) - 1)
    return f"input[... {whole}] weight[{whole}] bias[{whole}] -> [... {whole}]{statistics}"


def batch_norm(training: int) -> Template:
    """Batch normalisation: in training it takes statistics over batch and space; afterwards it is pointwise per channel.

    Args:
        training: position of the argument that says so.
    """

    def rule(op: Op, reading: Reading) -> str:
        mark = "!" if argument(op, training, "training", False) is True else ""
        rest = "" if len(operand(op, reading)) == 2 else f" ...{mark}"
        statistics = (" [channels]" if mark else " [_none!]") * (len(op.outputs) - 1)
        rows = "n~" if mark and not statistics else f"n{mark}"
        operands = f"input[{rows} channels{rest}] weight[channels] bias[channels] running_mean[channels] running_var[channels]"
        return f"{operands} -> [{rows} channels{rest}]{statistics}"

    return rule


def group_norm(op: Op, reading: Reading) -> str:
    """Group normalisation: groups are independent, the channels of one group are not."""
    groups = number(argument(op, 1, "num_groups"))
    channels = f"groups={groups}*c!"
    return f"input[n {channels} ...!] weight[{channels}] bias[{channels}] -> [n {channels} ...!]"


def weight_norm(op: Op, reading: Reading) -> str:
    """``_weight_norm``: each position of one dimension has a length of its own; of none, where all have one together."""
    letters = names(len(operand(op, reading)))
    own = number(argument(op, 2, "dim", 0))
    terms = [letter if place == own else letter + "!" for place, letter in enumerate(letters)]
    lengths = [letter if place == own else "1" for place, letter in enumerate(letters)] if operand(op, reading, 1) else []
    return write([("v", terms), ("g", lengths)], terms)


def halved(op: Op, reading: Reading) -> str:
    """``glu``: two halves of one dimension meet element by element: ``[a two*b] -> [a b]``."""
    letters = names(len(operand(op, reading)))
    dim = number(argument(op, 1, "dim", -1)) % len(letters)
    source = [f"_two=2!*{letter}" if place == dim else letter for place, letter in enumerate(letters)]
    return write([("input", source)], letters)


NORMALISATIONS: Family = {
    "layer_norm": Operator(normalized),
    "native_layer_norm": Operator(normalized),
    "rms_norm": Operator(normalized),
    "batch_norm": Operator(batch_norm(training=5), "contractions.batch_norm"),
    "native_batch_norm _native_batch_norm_legit": Operator(batch_norm(training=5)),
    "_native_batch_norm_legit.no_stats": Operator(batch_norm(training=3)),
    "group_norm": Operator(group_norm, "contractions.group_norm"),
    "instance_norm": Operator(
        "input[n channels ...!] weight[channels] bias[channels] running_mean[channels] running_var[channels] -> [n channels ...!]"
    ),
    "softmax _softmax _safe_softmax log_softmax _log_softmax": Operator(along(), keeps="result"),
    "_weight_norm": Operator(weight_norm),
    "glu": Operator(halved),
}
