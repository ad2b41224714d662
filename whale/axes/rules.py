"""The table of rules: for each operator, what it does with the axes of its operands.

Most rules are one line of notation (`whale.axes.notation` says how to read it). A rule whose letters depend on the
op's arguments names the template that writes its notation; three families (views, concatenations, factories) are code.
Overloads and in-place forms share the rule of their operator, unless the table names them. Ops that torch tags
``pointwise`` need no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Union

from whale.axes import templates as t
from whale.axes.concatenations import cat, slice_, split
from whale.axes.factories import factory, positions
from whale.axes.indexing import index, index_written
from whale.axes.notation import parse
from whale.axes.outcome import Outcome, Reading
from whale.axes.pointwise import COPIES, pointwise
from whale.axes.views import view
from whale.ir.graph import Op

Rule = Union[str, Callable[[Op, Reading], Union[str, Outcome]]]

MATRICES: dict[str, Rule] = {
    "linear": "input[... i] weight[o i] +bias[o] -> [... o]",
    "addmm": "+self[i j] mat1[i k] mat2[k j] -> [i j]",
    "mm": "self[i k] mat2[k j] -> [i j]",
    "bmm": "self[b i k] mat2[b k j] -> [b i j]",
    "baddbmm": "+self[b i j] batch1[b i k] batch2[b k j] -> [b i j]",
    "matmul": t.matmul,
    "mv": "self[i k] vec[k] -> [i]",
    "dot": "self[k] tensor[k] -> []",
    "outer": "self[i] vec2[j] -> [i j]",
    "bilinear": "input1[... i] input2[... j] weight[o i j] +bias[o] -> [... o]",
    "einsum": t.einsum,
    "tensordot": t.tensordot,
    "cdist": "x1[... i d!] x2[... j d!] -> [... i j]",
    "_grouped_mm": "self[n! k] mat2[e! k j] offs[e!] +bias[e! j] -> [n! j]",
}

ATTENTION: dict[str, Rule] = {
    "scaled_dot_product_attention": (
        "query[... heads*group sequence head_dim!] key[... heads memory! head_dim!] value[... heads memory! value_dim] "
        "attn_mask[... heads*group sequence memory!] -> [... heads*group sequence value_dim]"
    ),
}

LOOKUPS: dict[str, Rule] = {
    "embedding": "weight[(vocabulary:lookup) hidden] indices[...] -> [... hidden]",
    "index_select": t.chosen_rows,
    "gather": t.gathering(dim=1, index=2),
    "index": index,
    "take_along_dim": t.gathering(dim=2, index=1),
    "one_hot": "self[...] -> [... classes^]",
    "bucketize": "self[...] boundaries[n!] -> [...]",
    "searchsorted": "sorted_sequence[... n!] self[... m] -> [... m]",
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_fill", "index_copy"), t.scattering),
    "index_put": index_written,
    **dict.fromkeys(("select_scatter", "slice_scatter"), t.part_written),
}

NORMALISATIONS: dict[str, Rule] = {
    "layer_norm": t.normalized("[... D]"),
    "native_layer_norm": t.normalized("[... D]", "[... O]", "[... O]"),
    "rms_norm": t.normalized("[... D]"),
    "batch_norm": t.batch_norm(training=5),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), t.batch_norm(training=5, num_results=3)),
    "_native_batch_norm_legit.no_stats": t.batch_norm(training=3, num_results=3),
    "group_norm": t.group_norm,
    "instance_norm": (
        "input[n channels ...!] weight[channels] bias[channels] running_mean[channels] running_var[channels] -> [n channels ...!]"
    ),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"), t.along("!")),
    "glu": t.halved,
}

LOSSES: dict[str, Rule] = {
    "cross_entropy_loss": t.classification_loss,
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward"), t.classification_loss),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), t.pointwise_loss(2)),
    "poisson_nll_loss": t.pointwise_loss(5),
    "binary_cross_entropy": t.pointwise_loss(3, num_weights=1),
    "binary_cross_entropy_with_logits": t.pointwise_loss(4, num_weights=2),
}

REDUCTIONS: dict[str, Rule] = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), t.reduction("sum")),
    "mean": t.reduction("mean"),
    **dict.fromkeys(("amax", "max.default"), t.reduction("max")),
    **dict.fromkeys(("amin", "min.default"), t.reduction("min")),
    "any": t.reduction("any"),
    "all": t.reduction("all"),
    "prod": t.reduction("prod"),
    **dict.fromkeys(("var", "std", "logsumexp", "argmax", "argmin"), t.reduction("")),
    **dict.fromkeys(("var_mean", "std_mean"), t.reduction("", num_results=2)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), t.reduction("", position=2)),
    **dict.fromkeys(("max.dim", "min.dim", "median.dim", "topk", "kthvalue"), t.found_along),
    "bincount": "self[n!] weights[n!] -> [_counted!]",
    "histc": "self[...!] -> [_counted!]",
    "cosine_similarity": t.similarity,
}

ALONG_A_DIMENSION: dict[str, Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), t.along("!")),
    "cummax": t.along("!", num_results=2),
    "sort": t.along("!", default=-1, num_results=2),
    "sort.stable": t.along("!", position=2, default=-1, num_results=2),
    "argsort": t.along("!", default=-1),
    "diff": t.difference,
    "flip": t.along("!", name="dims"),
    "roll": t.along("!", position=2, name="dims"),
    "tril": "self[... i! j!] -> [... i! j!]",
    "triu": "self[... i! j!] -> [... i! j!]",
    "diagonal": "self[i! j!] -> [i!]",
    "multinomial": "self[... n!] -> [... _drawn!]",
}

SHAPES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "_unsafe_view",
            "_reshape_alias",
            "view_as",
            "reshape_as",
            "flatten",
            "unflatten",
            "ravel",
            "squeeze",
            "unsqueeze",
        ),
        view,
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), t.swap()),
    "t": t.swap(0, 1),
    "mT": t.swap(-2, -1),
    "numpy_T": t.reverse,
    "permute": t.permutation,
    "movedim": t.move,
    "moveaxis": t.move,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), t.expansion),
    **dict.fromkeys(("repeat", "tile"), t.repetition),
    "repeat_interleave.self_int": t.interleaved_repetition,
    **dict.fromkeys(("cat", "concat"), cat),
    "stack": t.stack,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk", "tensor_split"), split),
    "unbind": t.unbind,
    **dict.fromkeys(("slice", "narrow"), slice_),
    "select": t.select,
    **dict.fromkeys(("pad", "constant_pad_nd"), t.padding),
    "pixel_shuffle": t.pixel_shuffle,
    "unfold": t.unfolding,
}

SPACE: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), t.convolution),
    "convolution": t.general_convolution,
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), t.transposed_convolution),
    **dict.fromkeys((f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)), t.resized),
    **dict.fromkeys((f"adaptive_max_pool{d}d" for d in (1, 2, 3)), t.resized),
    **dict.fromkeys((f"_adaptive_avg_pool{d}d" for d in (2, 3)), t.resized),
    **dict.fromkeys((f"max_pool{d}d_with_indices" for d in (2, 3)), t.resized),
    **dict.fromkeys((f"upsample_{kind}2d" for kind in ("nearest", "bilinear", "bicubic")), t.resized),
    **dict.fromkeys((f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)), t.resized),
}

RECURRENCES: dict[str, Rule] = {
    "lstm.input": t.recurrent(2),
    **dict.fromkeys(("gru.input", "rnn_tanh.input", "rnn_relu.input"), t.recurrent(1)),
}

FACTORIES: dict[str, Rule] = {
    "arange": positions,
    **dict.fromkeys(("zeros", "ones", "full", "empty", "scalar_tensor", "linspace", "rand", "randn", "randint", "eye"), factory),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), factory),
    "randperm": "-> [n!]",
    **dict.fromkeys((f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")), pointwise),
}

POINTWISE: dict[str, Rule] = {
    "prelu": t.prelu,
    "view_as_complex": "self[... _two!] -> [...]",
    "view_as_real": "self[...] -> [... _two!]",
    **dict.fromkeys(sorted(COPIES), pointwise),
    **dict.fromkeys(
        (
            "copy", "fill", "zero", "dropout", "native_dropout", "feature_dropout", "alpha_dropout", "bernoulli", "where",
            "masked_fill", "lerp", "nan_to_num", "softplus", "hardtanh", "rrelu_with_noise", "relu6", "selu", "celu", "normal",
            "uniform", "bitwise_not", "_conj", "resolve_conj", "resolve_neg", "requires_grad",
            "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__iand__", "__ior__", "__ixor__",
            "floor_divide", "multiply", "divide", "subtract", "negative", "absolute", "fix", "greater", "greater_equal", "less",
            "less_equal", "not_equal", "isclose", "arctan", "arctan2", "hardswish", "log_sigmoid",
            "conj", "real", "imag", "polar", "complex",
        ),
        pointwise,
    ),
}  # fmt: skip

FAMILIES: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "Matrices": MATRICES,
        "Attention": ATTENTION,
        "Lookups and writes": LOOKUPS,
        "Normalisations": NORMALISATIONS,
        "Losses": LOSSES,
        "Reductions": REDUCTIONS,
        "Along a dimension": ALONG_A_DIMENSION,
        "Shapes": SHAPES,
        "Space": SPACE,
        "Recurrences": RECURRENCES,
        "Factories": FACTORIES,
        "Pointwise without torch's tag": POINTWISE,
    }
)

TABLE: Mapping[str, Rule] = MappingProxyType({f"aten.{name}": rule for family in FAMILIES.values() for name, rule in family.items()})
"""Every operator that has a rule, by ``aten.name`` or ``aten.name.overload``."""

_own_rules: ContextVar[Mapping[str, str]] = ContextVar("own_rules", default=MappingProxyType({}))


def register_rule(target: str, notation: str) -> None:
    """Gives an op of your own a rule, so that its axes can be cut.

    Args:
        target: ``library.op`` or ``library.op.overload``, as ``torch.ops`` has it. A rule for one of torch's own
            ops replaces the built-in one.
        notation: for example ``"input[... i] weight[o i] -> [... o]"``; docs/axes.md explains it. Operands are the
            op's tensor arguments in order. The rule is believed: it must hold for any part of a letter.

    Raises:
        ConfigError: the notation cannot be read.
    """
    parse(notation)
    _own_rules.set(MappingProxyType({**_own_rules.get(), target: notation}))


def find_rule(op: Op) -> Rule | None:
    """The rule of an op: the user's own, one for the overload, torch's pointwise tag, one for the operator; else None."""
    packet = op.target.rpartition(".")[0] if op.target.count(".") > 1 else op.target
    own = _own_rules.get()
    for name in (op.target, packet):
        if name in own:
            return own[name]
    if op.target in TABLE:
        return TABLE[op.target]
    if "pointwise" in op.tags:
        return pointwise
    return TABLE.get(packet) or TABLE.get(packet.rstrip("_"))
