"""Reductions, searches, normalisations, ops along one dimension, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from whale.axes.operators.entry import Family, Moves, Operator, Template, along, chosen, letters_of, names, operand, put, write
from whale.axes.outcome import Dims, Reading, argument, number
from whale.ir.graph import Argument, Op


def reduction(how: str = "", position: int = 1) -> Template:
    """Combines given dimensions to one value: ``input[a (b)] -> [a]``; `how` is "" if parts do not combine."""

    def rule(op: Op, reading: Reading) -> str:
        rank = len(operand(op, reading))
        value = argument(op, position, "dim")
        dims = chosen(None if isinstance(value, bool) else value, rank)
        letters = names(rank)
        keep = len(op.outputs[0].shape) == rank
        terms = [(f"({letter}:{how})" if how else f"{letter}!") if index in dims else letter for index, letter in enumerate(letters)]
        result = ["1" if index in dims else letter for index, letter in enumerate(letters) if keep or index not in dims]
        return write([("input", terms)], *[result] * len(op.outputs))

    return rule


def found_along(op: Op, reading: Reading) -> str:
    """``topk``, ``kthvalue``, ``max`` along a dimension: it is read whole, and the result has another size."""
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
    terms = put(letters, dim, f"{letters[dim]}!")
    operands = [(name, terms[rank - len(dims) :]) for name, dims in zip(("x1", "x2"), shapes, strict=True)]
    return write(operands, put(letters, dim))


def distance(op: Op, reading: Reading) -> str:
    """``pairwise_distance``: two tensors meet along their last dimension, which must be whole and may be kept."""
    shapes = [operand(op, reading), operand(op, reading, 1)]
    letters = names(max(len(dims) for dims in shapes))
    terms = [*letters[:-1], letters[-1] + "!"]
    operands = [(name, terms[len(terms) - len(dims) :]) for name, dims in zip(("x1", "x2"), shapes, strict=True)]
    return write(operands, [*letters[:-1], *(["_distance!"] if len(op.outputs[0].shape) == len(letters) else [])])


def difference(op: Op, reading: Reading) -> str:
    """``diff``: neighbours along a dimension, which may first be lengthened at both ends."""
    letters, dim = letters_of(op, reading, 2, -1)
    shapes = {name: put(letters, dim, f"{stem}!") for name, stem in _DIFFERENCE.items()}
    result = shapes.pop("result")
    return write(shapes.items(), result)


_DIFFERENCE = {"input": "_old", "prepend": "_before", "append": "_after", "result": "_new"}


def diagonal(op: Op, reading: Reading) -> str:
    """``diag``: a diagonal of a matrix, or a matrix of a diagonal."""
    return "self[n!] -> [_rows! _columns!]" if len(operand(op, reading)) == 1 else "self[i! j!] -> [_places!]"


REDUCTIONS: Family = {
    "sum": Moves(reduction("sum"), gradient="one number", rows="sum"),
    "nansum count_nonzero": Operator(reduction("sum"), rows="counted"),
    "mean": Moves(reduction("mean"), rows="mean"),
    "amax": Operator(reduction("max"), "contractions.extreme", keeps="result", rows="greatest"),
    "amin": Operator(reduction("min"), "contractions.extreme", keeps="result", rows="least"),
    "max.default": Operator(reduction("max"), "contractions.extreme", rows="greatest"),
    "min.default": Operator(reduction("min"), "contractions.extreme", rows="least"),
    "any _is_any_true": Operator(reduction("any"), rows="greatest"),
    "all _is_all_true": Operator(reduction("all"), rows="least"),
    "prod": Operator(reduction("prod")),
    "var std logsumexp argmax argmin": Operator(reduction()),
    "var_mean std_mean": Operator(reduction()),
    "norm linalg_vector_norm": Operator(reduction(position=2)),
    "nanmean": Operator(reduction()),
    "max.dim min.dim median.dim nanmedian.dim mode topk kthvalue": Operator(found_along),
    "bincount": Operator("self[n!] weights[n!] -> [_counted!]", rows="counted"),
    "histc": Operator("self[...!] -> [_counted!]"),
    "cosine_similarity": Operator(similarity),
    "pairwise_distance": Operator(distance),
}

ALONG_A_DIMENSION: Family = {
    "cumsum": Operator(along(), rows="linear"),
    "cumprod logcumsumexp": Operator(along()),
    "cummax cummin": Operator(along()),
    "sort": Operator(along(default=-1)),
    "sort.stable": Operator(along(position=2, default=-1)),
    "argsort": Operator(along(default=-1)),
    "diff": Operator(difference),
    "flip": Moves(along(name="dims"), rows="moved"),
    "roll": Moves(along(position=2, name="dims"), rows="moved"),
    "tril triu": Operator("self[... i! j!] -> [... i! j!]", rows="linear"),
    "diag": Operator(diagonal, rows="linear"),
    "diagonal": Operator("self[i! j!] -> [i!]", rows="moved"),
    "trace": Operator("self[i! j!] -> []", rows="linear"),
    "multinomial": Operator("self[... n!] -> [... _drawn!]"),
}


def normalized(op: Op, reading: Reading) -> str:
    """Normalisation over as many trailing dimensions as ``normalized_shape`` has; native forms also return statistics."""
    shape = argument(op, 1, "normalized_shape")
    letters = names(len(shape) if isinstance(shape, tuple) else 1)
    whole = " ".join(f"{letter}!" for letter in letters)
    statistics = f" [... {' '.join('1' for _ in letters)}]" * (len(op.outputs) - 1)
    return f"input[... {whole}] weight[{whole}] bias[{whole}] -> [... {whole}]{statistics}"


def batch_norm(training: int) -> Template:
    """In training statistics are over batch and space; else it is pointwise per channel. `training` is the position of the flag."""

    def rule(op: Op, reading: Reading) -> str:
        mark = "!" if argument(op, training, "training", False) is True else ""
        rest = "" if len(operand(op, reading)) == 2 else f" ...{mark}"
        statistics = (" [channels]" if mark else " [_none!]") * (len(op.outputs) - 1)
        rows = "n~" if mark and not statistics else f"n{mark}"
        operands = f"input[{rows} channels{rest}] weight[channels] bias[channels] running_mean[channels] running_var[channels]"
        return f"{operands} -> [{rows} channels{rest}]{statistics}"

    return rule


def group_norm(op: Op, reading: Reading) -> str:
    """Groups are independent, the channels of one group are not."""
    groups = number(argument(op, 1, "num_groups"))
    channels = f"groups={groups}*c!"
    return f"input[n {channels} ...!] weight[{channels}] bias[{channels}] -> [n {channels} ...!]"


def weight_norm(op: Op, reading: Reading) -> str:
    """``_weight_norm``: each position of one dimension has its own length; if that dimension is -1, all have one."""
    letters = names(len(operand(op, reading)))
    own = number(argument(op, 2, "dim", 0))
    terms = [letter if place == own else letter + "!" for place, letter in enumerate(letters)]
    lengths = [letter if place == own else "1" for place, letter in enumerate(letters)] if operand(op, reading, 1) else []
    return write([("v", terms), ("g", lengths)], terms)


def halved(op: Op, reading: Reading) -> str:
    """``glu``: two halves of one dimension meet element by element: ``[a two*b] -> [a b]``."""
    letters, dim = letters_of(op, reading, 1, -1)
    return write([("input", put(letters, dim, f"_two=2!*{letters[dim]}"))], letters)


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
    "softmax _softmax _safe_softmax": Operator(along(), keeps="result", core="softmax"),
    "log_softmax _log_softmax": Operator(along(), keeps="result"),
    "_weight_norm": Operator(weight_norm),
    "glu": Operator(halved),
}


NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for the reduction of a loss


def reduced(letters: Sequence[str], how: Argument, mean: str = "mean") -> list[str]:
    """The terms of dimensions over which a loss is combined, by its argument ``reduction``."""
    combine = {NONE: "", MEAN: mean, SUM: "sum"}[number(how)]
    return [f"({letter}:{combine})" if combine else letter for letter in letters]


def pointwise_loss(position: int, num_weights: int = 0, read: Sequence[str] = ("input", "target")) -> Template:
    """A loss of equal shapes, element by element, then reduced."""

    def rule(op: Op, reading: Reading) -> str:
        shapes = [operand(op, reading, place) for place in range(len(read))]
        rank = max(len(dims) for dims in shapes)
        how = argument(op, position, "reduction", MEAN)
        letters = names(rank)
        terms = reduced(letters, how)
        operands = [(name, terms[rank - len(dims) :]) for name, dims in zip(read, shapes, strict=True)]
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
    letters = names(len(dims) - 1)
    rest = reduced(letters, how, mean="weighted_mean")
    full = [*rest[:1], classes, *rest[1:]] if len(dims) > 1 else [classes]
    hard = rest if len(target) < len(dims) else full
    results = [letters if how == NONE else []]
    if len(op.outputs) == 2:  # the total weight, after the loss
        results.append([])
    return write([("self", full), ("target", hard), ("weight", [classes])], *results)


def ctc_loss(op: Op, reading: Reading) -> str:
    """The CTC loss of each row; concatenated targets of all rows belong to no row."""
    if len(operand(op, reading, 1)) == 2:
        return "log_probs[t! n c!] targets[n s!] input_lengths[n] target_lengths[n] -> [n]"
    return "log_probs[t! n! c!] targets[s!] input_lengths[n!] target_lengths[n!] -> [n!]"


def embedded_loss(num_embeddings: int, reduction: int, target: bool) -> Template:
    """A loss of each row of several embeddings ``[n d]`` or ``[d]``, and perhaps its target, then reduced."""

    def rule(op: Op, reading: Reading) -> str:
        how = argument(op, reduction, "reduction", MEAN)
        rows = reduced("n", how) if len(operand(op, reading)) == 2 else []
        operands = [(f"x{index}", [*rows, "d!"]) for index in range(num_embeddings)]
        return write([*operands, *([("target", rows)] if target else [])], ["n"] if how == NONE and rows else [])

    return rule


def margin_loss(op: Op, reading: Reading) -> str:
    """``multi_margin_loss``: of each row's scores and its target, then reduced. ``multilabel_margin_loss`` has targets in a row too."""
    is_single = "multi_margin" in op.target
    how = argument(op, 5 if is_single else 2, "reduction", MEAN)
    rows = reduced("n", how) if len(operand(op, reading)) == 2 else []
    weight = [("weight", ["c!"])] if is_single and _named(op, reading, "weight", 4) is not None else []
    targets = rows if is_single else [*rows, "c!"]
    return write([("self", [*rows, "c!"]), ("target", targets), *weight], ["n"] if how == NONE and rows else [])


Classes = partial(Operator, classification_loss, "contractions.class_loss", keeps="inputs and result")

LOSSES: Family = {
    "cross_entropy_loss": Classes(is_two=True),
    "nll_loss nll_loss_nd nll_loss2d": Classes(),
    "nll_loss_forward": Classes(),  # two results
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div": Operator(pointwise_loss(2)),
    "ctc_loss": Operator(ctc_loss),
    "poisson_nll_loss": Operator(pointwise_loss(5)),
    "binary_cross_entropy": Operator(pointwise_loss(3, num_weights=1)),
    "binary_cross_entropy_with_logits": Operator(pointwise_loss(4, num_weights=2)),
    "hinge_embedding_loss": Operator(pointwise_loss(3)),
    "margin_ranking_loss": Operator(pointwise_loss(4, read=("input1", "input2", "target"))),
    "cosine_embedding_loss": Operator(embedded_loss(2, reduction=4, target=True)),
    "triplet_margin_loss": Operator(embedded_loss(3, reduction=7, target=False)),
    "multi_margin_loss multilabel_margin_loss": Operator(margin_loss),
}
