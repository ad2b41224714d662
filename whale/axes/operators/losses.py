"""Losses: element by element or by class, then reduced."""

from __future__ import annotations

from whale.axes.operators.entry import Family, Operator, Template, names, operand, write
from whale.axes.outcome import Dims, Reading, argument, number
from whale.ir.graph import Op

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for the reduction of a loss."""


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


def ctc_loss(op: Op, reading: Reading) -> str:
    """The CTC loss of each row; targets that stand one after another, of all rows in one, belong to no row."""
    if len(operand(op, reading, 1)) == 2:
        return "log_probs[t! n c!] targets[n s!] input_lengths[n] target_lengths[n] -> [n]"
    return "log_probs[t! n! c!] targets[s!] input_lengths[n!] target_lengths[n!] -> [n!]"


LOSSES: Family = {
    "cross_entropy_loss": Operator(classification_loss, "contractions.class_loss", keeps="inputs and result", is_two=True),
    "nll_loss nll_loss_nd nll_loss2d nll_loss_forward": Operator(classification_loss, "contractions.class_loss", keeps="inputs and result"),
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div": Operator(pointwise_loss(2)),
    "ctc_loss": Operator(ctc_loss),
    "poisson_nll_loss": Operator(pointwise_loss(5)),
    "binary_cross_entropy": Operator(pointwise_loss(3, num_weights=1)),
    "binary_cross_entropy_with_logits": Operator(pointwise_loss(4, num_weights=2)),
}
