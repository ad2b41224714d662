"""The table of rules: for each operator, what it does with the axes of its operands.

Most rules are one line of notation (`whale.axes.notation` says how to read it). A rule whose letters depend on the
op's arguments names the template that writes its notation; three families (views, concatenations, factories) are code.
Overloads and in-place forms share the rule of their operator, unless the table names them. Ops that torch tags
``pointwise`` need no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Union

from whale.axes.outcome import Outcome, Reading
from whale.axes.rules.attention import attention
from whale.axes.rules.concatenations import cat, slice_, split
from whale.axes.rules.factories import constant, factory, numbering, positions
from whale.axes.rules.frequencies import inverse_short_transform, short_transform, transform
from whale.axes.rules.indexing import index, index_written
from whale.axes.rules.lookups import bags, chosen_rows, embedding, gathering, part_written, scattering
from whale.axes.rules.losses import classification_loss, ctc_loss, pointwise_loss
from whale.axes.rules.matrices import einsum, matmul, tensordot
from whale.axes.rules.normalisations import batch_norm, group_norm, normalized
from whale.axes.rules.pointwise import COPIES, pointwise, prelu
from whale.axes.rules.recurrences import recurrent, recurrent_cell
from whale.axes.rules.reductions import distance, found_along, reduction, similarity
from whale.axes.rules.shapes import (
    difference,
    expansion,
    halved,
    interleaved_repetition,
    move,
    padding,
    permutation,
    pixel_shuffle,
    repetition,
    reverse,
    select,
    stack,
    swap,
    unbind,
    unfolding,
)
from whale.axes.rules.space import convolution, general_convolution, placed, resized, sampled, transposed_convolution
from whale.axes.rules.templates import along
from whale.axes.rules.views import view
from whale.ir.graph import Op

Rule = Union[str, Callable[[Op, Reading], Union[str, Outcome]]]

MATRICES: dict[str, Rule] = {
    "linear": "input[... i] weight[o i] +bias[o] -> [... o]",
    "addmm": "+self[i j] mat1[i k] mat2[k j] -> [i j]",
    "mm": "self[i k] mat2[k j] -> [i j]",
    "bmm": "self[b i k] mat2[b k j] -> [b i j]",
    "baddbmm": "+self[b i j] batch1[b i k] batch2[b k j] -> [b i j]",
    "matmul": matmul,
    "mv": "self[i k] vec[k] -> [i]",
    "dot": "self[k] tensor[k] -> []",
    "outer": "self[i] vec2[j] -> [i j]",
    "bilinear": "input1[... i] input2[... j] weight[o i j] +bias[o] -> [... o]",
    "einsum": einsum,
    "tensordot": tensordot,
    "cdist": "x1[... i d!] x2[... j d!] -> [... i j]",
    "linalg_slogdet": "A[... i! j!] -> [...] [...]",
    "slogdet": "self[... i! j!] -> [...] [...]",
    "linalg_det": "A[... i! j!] -> [...]",
    "det": "self[... i! j!] -> [...]",
    "linalg_inv": "A[... i! j!] -> [... _k! _l!]",
    "linalg_eigvalsh": "self[... i! j!] -> [... _k!]",
    "linalg_eigh": "self[... i! j!] -> [... _k!] [... _k! _l!]",
    **dict.fromkeys(("inverse", "linalg_cholesky", "cholesky", "linalg_matrix_exp"), "self[... i! j!] -> [... _k! _l!]"),
    "_grouped_mm": "self[n! k] mat2[e! k j] offs[e!] +bias[e! j] -> [n! j]",
}

ATTENTION: dict[str, Rule] = {
    "scaled_dot_product_attention": attention,
}

LOOKUPS: dict[str, Rule] = {
    "embedding": embedding,
    "embedding_bag": bags,
    "index_select": chosen_rows,
    "gather": gathering(dim=1, index=2),
    "index": index,
    "take_along_dim": gathering(dim=2, index=1),
    "one_hot": "self[...] -> [... classes^]",
    "bucketize": "self[...] boundaries[n!] -> [...]",
    "searchsorted": "sorted_sequence[... n!] self[... m] -> [... m]",
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_fill", "index_copy"), scattering),
    "index_put": index_written,
    **dict.fromkeys(("select_scatter", "slice_scatter"), part_written),
}

NORMALISATIONS: dict[str, Rule] = {
    "layer_norm": normalized("[... D]"),
    "native_layer_norm": normalized("[... D]", "[... O]", "[... O]"),
    "rms_norm": normalized("[... D]"),
    "batch_norm": batch_norm(training=5),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), batch_norm(training=5, num_results=3)),
    "_native_batch_norm_legit.no_stats": batch_norm(training=3, num_results=3),
    "group_norm": group_norm,
    "instance_norm": (
        "input[n channels ...!] weight[channels] bias[channels] running_mean[channels] running_var[channels] -> [n channels ...!]"
    ),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"), along("!")),
    "glu": halved,
}

LOSSES: dict[str, Rule] = {
    "cross_entropy_loss": classification_loss,
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward"), classification_loss),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), pointwise_loss(2)),
    "ctc_loss": ctc_loss,
    "poisson_nll_loss": pointwise_loss(5),
    "binary_cross_entropy": pointwise_loss(3, num_weights=1),
    "binary_cross_entropy_with_logits": pointwise_loss(4, num_weights=2),
}

REDUCTIONS: dict[str, Rule] = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), reduction("sum")),
    "mean": reduction("mean"),
    **dict.fromkeys(("amax", "max.default"), reduction("max")),
    **dict.fromkeys(("amin", "min.default"), reduction("min")),
    **dict.fromkeys(("any", "_is_any_true"), reduction("any")),
    **dict.fromkeys(("all", "_is_all_true"), reduction("all")),
    "prod": reduction("prod"),
    **dict.fromkeys(("var", "std", "logsumexp", "argmax", "argmin"), reduction("")),
    **dict.fromkeys(("var_mean", "std_mean"), reduction("", num_results=2)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), reduction("", position=2)),
    "nanmean": reduction(""),
    **dict.fromkeys(("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode", "topk", "kthvalue"), found_along),
    "bincount": "self[n!] weights[n!] -> [_counted!]",
    "histc": "self[...!] -> [_counted!]",
    "cosine_similarity": similarity,
    "pairwise_distance": distance,
}

ALONG_A_DIMENSION: dict[str, Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), along("!")),
    **dict.fromkeys(("cummax", "cummin"), along("!", num_results=2)),
    "sort": along("!", default=-1, num_results=2),
    "sort.stable": along("!", position=2, default=-1, num_results=2),
    "argsort": along("!", default=-1),
    "diff": difference,
    "flip": along("!", name="dims"),
    "roll": along("!", position=2, name="dims"),
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
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), swap()),
    "t": swap(0, 1),
    "mT": swap(-2, -1),
    "numpy_T": reverse,
    "permute": permutation,
    "movedim": move,
    "moveaxis": move,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expansion),
    **dict.fromkeys(("repeat", "tile"), repetition),
    "repeat_interleave.self_int": interleaved_repetition,
    **dict.fromkeys(("cat", "concat"), cat),
    "stack": stack,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk", "tensor_split"), split),
    "unbind": unbind,
    **dict.fromkeys(("slice", "narrow"), slice_),
    "select": select,
    **dict.fromkeys(("pad", "constant_pad_nd"), padding),
    "pixel_shuffle": pixel_shuffle,
    "unfold": unfolding,
}

SPACE: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    "convolution": general_convolution,
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    **dict.fromkeys((f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)), resized),
    **dict.fromkeys((f"adaptive_max_pool{d}d" for d in (1, 2, 3)), resized),
    **dict.fromkeys((f"_adaptive_avg_pool{d}d" for d in (2, 3)), resized),
    **dict.fromkeys((f"max_pool{d}d_with_indices" for d in (2, 3)), resized),
    **dict.fromkeys((f"upsample_{kind}2d" for kind in ("nearest", "bilinear", "bicubic")), resized),
    **dict.fromkeys((f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)), resized),
    "im2col": "self[... c! h! w!] -> [... _patch! _places!]",
    "col2im": "self[... patch! places!] -> [... _c! _h! _w!]",
    "max_unpool2d": "self[... h! w!] indices[... h! w!] -> [... _H! _W!]",
    "grid_sampler": sampled,
    "affine_grid_generator": placed,
}

FREQUENCIES: dict[str, Rule] = {
    **dict.fromkeys((f"fft_{kind}fft" for kind in ("", "i", "r", "ir", "h", "ih")), transform(default=-1)),
    **dict.fromkeys((f"fft_{kind}fft2" for kind in ("", "i", "r", "ir")), transform(default=(-2, -1))),
    **dict.fromkeys((f"fft_{kind}fftn" for kind in ("", "i", "r", "ir")), transform()),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), along("!")),
    "stft": short_transform,
    "istft": inverse_short_transform,
}

RECURRENCES: dict[str, Rule] = {
    "lstm.input": recurrent(2),
    **dict.fromkeys(("gru.input", "rnn_tanh.input", "rnn_relu.input"), recurrent(1)),
    "lstm_cell": recurrent_cell(2),
    **dict.fromkeys(("gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), recurrent_cell(1)),
}

FACTORIES: dict[str, Rule] = {
    "arange": positions,
    **dict.fromkeys(("linspace", "eye"), numbering),
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "randint"), factory),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), factory),
    **dict.fromkeys(("full", "new_full", "scalar_tensor"), constant),
    "randperm": "-> [n!]",
    **dict.fromkeys((f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")), pointwise),
}

POINTWISE: dict[str, Rule] = {
    "prelu": prelu,
    "feature_dropout": "input[n channels ...!] -> [n channels ...!]",
    "view_as_complex": "self[... _two!] -> [...]",
    "view_as_real": "self[...] -> [... _two!]",
    **dict.fromkeys(sorted(COPIES), pointwise),
    **dict.fromkeys(
        (
            "broadcast_tensors", "copy", "fill", "zero", "dropout", "native_dropout", "alpha_dropout", "bernoulli", "where",
            "masked_fill", "lerp", "nan_to_num", "softplus", "hardtanh", "rrelu_with_noise", "relu6", "selu", "celu", "normal",
            "uniform", "bitwise_not", "_conj", "resolve_conj", "resolve_neg", "requires_grad",
            "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__iand__", "__ior__", "__ixor__",
            "floor_divide", "multiply", "divide", "subtract", "negative", "absolute", "fix", "greater", "greater_equal", "less",
            "less_equal", "not_equal", "isclose", "arctan", "arctan2", "hardswish", "log_sigmoid",
            "conj", "real", "imag", "polar", "complex", "fake_quantize_per_tensor_affine",
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
        "Frequencies": FREQUENCIES,
        "Recurrences": RECURRENCES,
        "Factories": FACTORIES,
        "Pointwise without torch's tag": POINTWISE,
    }
)

TABLE: Mapping[str, Rule] = MappingProxyType({f"aten.{name}": rule for family in FAMILIES.values() for name, rule in family.items()})
"""Every operator that has a rule, by ``aten.name`` or ``aten.name.overload``."""
