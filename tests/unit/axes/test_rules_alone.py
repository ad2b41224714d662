"""Every rule alone: what it says of each axis is tried on the operator itself, forward and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.axes.law import Case, Law, Shard
from whale.axes.operators import OPERATORS

torch.manual_seed(0)


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def bits(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def most(*shape: int) -> Tensor:
    """A mask of four elements of five."""
    return (torch.arange(math.prod(shape)) % 5 > 0).view(shape)


def to_shape(shard: Shard) -> object:
    """Ops whose second argument is a shape: the local one."""
    return shard.operator(shard.args[0], list(shard.shape), *shard.args[2:], **shard.kwargs)


def made(shard: Shard) -> object:
    """Factories: the local shape, and what follows it."""
    return shard.operator(list(shard.shape), *shard.args[1:], **shard.kwargs)


def reshaped(shard: Shard) -> object:
    return shard.args[0].reshape(shard.shape)  # type: ignore[attr-defined]


def counted(shard: Shard) -> object:
    return torch.arange(*shard.part)


def numbered(shard: Shard) -> object:
    """Factories of values by places: the part of the whole."""
    made: Tensor = shard.operator(*shard.args, **shard.kwargs)
    dim = next((place for place, (own, size) in enumerate(zip(shard.shape, made.shape, strict=True)) if own != size), 0)
    return made.narrow(dim, shard.part[0], shard.part[1] - shard.part[0])


def causal_rows(shard: Shard) -> object:
    """Attention of some of 5 queries to the first of 6 keys."""
    query, key, value, *_ = shard.args
    places = torch.arange(*(shard.part if query.shape[-2] < 5 else (0, 5)))  # type: ignore[attr-defined]
    return shard.operator(query, key, value, places[:, None] >= torch.arange(6))


def split_sizes(shard: Shard) -> object:
    """``split`` into parts of the local size."""
    source: Tensor = shard.args[0]
    return torch.ops.aten.split.Tensor(source, shard.shape[shard.args[2]], shard.args[2])  # type: ignore[call-overload]


def one_hot(shard: Shard) -> object:
    source: Tensor = shard.args[0]
    classes = torch.arange(*shard.part) if shard.shape[-1] != 7 else torch.arange(7)
    return (source[..., None] == classes).long()


def pixel_shuffled(shard: Shard) -> object:
    source: Tensor = shard.args[0]
    (n, channels, height, width), (h, w) = shard.shape, source.shape[-2:]
    factored = source.reshape(n, channels, height // h, width // w, h, w)
    return factored.permute(0, 1, 4, 2, 5, 3).reshape(shard.shape)


def labels() -> Tensor:
    return torch.tensor([0, 2, -100, 1, 3])


def spoken(targets: Tensor) -> tuple[Tensor, ...]:
    """Scores of 6 frames, 5 rows and 4 letters, what was said, and lengths."""
    return x(6, 5, 4).log_softmax(-1), targets, torch.tensor([6, 5, 6, 4, 6]), torch.tensor([1, 2, 2, 1, 2])


MATRICES = [
    Case("linear.default", (x(2, 3, 5), x(7, 5), x(7)), {"contracted": [5], "kept": [2, 3, 7]}),
    Case("linear.default", (x(5), x(7, 5)), {"contracted": [5], "kept": [7]}),
    Case("addmm.default", (x(7), x(3, 5), x(5, 7)), {"contracted": [5], "kept": [3, 7]}),
    Case("addmm.default", (x(3, 1), x(3, 5), x(5, 7)), {"contracted": [5], "kept": [3, 7]}),
    Case("mm.default", (x(3, 5), x(5, 7)), {"contracted": [5], "kept": [3, 7]}),
    Case("bmm.default", (x(2, 3, 5), x(2, 5, 7)), {"contracted": [5], "kept": [2, 3, 7]}),
    Case("baddbmm.default", (x(2, 3, 7), x(2, 3, 5), x(2, 5, 7)), {"contracted": [5], "kept": [2, 3, 7]}),
    Case("matmul.default", (x(2, 3, 5), x(5, 7)), {"contracted": [5], "kept": [2, 3, 7]}),
    Case("matmul.default", (x(2, 1, 3, 5), x(4, 5, 7)), {"contracted": [5], "kept": [2, 3, 4, 7]}),
    Case("matmul.default", (x(2, 3, 5), x(5)), {"contracted": [5], "kept": [2, 3]}),
    Case("matmul.default", (x(5), x(2, 5, 7)), {"contracted": [5], "kept": [2, 7]}),
    Case("matmul.default", (x(5), x(5)), {"contracted": [5]}),
    Case("mv.default", (x(3, 5), x(5)), {"contracted": [5], "kept": [3]}),
    Case("dot.default", (x(5), x(5)), {"contracted": [5]}),
    Case("vdot.default", (x(5), x(5)), {"contracted": [5]}),
    Case("outer.default", (x(3), x(5)), {"kept": [3, 5]}),
    Case("bilinear.default", (x(2, 3), x(2, 5), x(7, 3, 5), x(7)), {"contracted": [3, 5], "kept": [2, 7]}),
    Case("einsum.default", ("bhsd,bhtd->bhst", [x(2, 3, 5, 4), x(2, 3, 7, 4)]), {"contracted": [4], "kept": [2, 3, 5, 7]}),
    Case("einsum.default", ("ij,jk", [x(3, 5), x(5, 7)]), {"contracted": [5], "kept": [3, 7]}),
    Case("einsum.default", ("ii->i", [x(3, 3)]), {"whole": [3]}),
    Case("einsum.default", ("...ij->...j", [x(2, 3, 5)]), {"contracted": [3], "kept": [2, 5]}),
    Case("tensordot.default", (x(2, 3, 5), x(5, 7, 2), [2, 0], [0, 2]), {"contracted": [2, 5], "kept": [3, 7]}),
    Case("cdist.default", (x(2, 3, 5), x(2, 4, 5)), {"kept": [2, 3, 4], "whole": [5]}, grad=False),
    Case("linalg_slogdet.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3]}),
    Case("slogdet.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3]}),
    Case("linalg_det.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3]}),
    Case("det.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3]}),
    Case("linalg_eigvalsh.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3, 3]}, grad=False),
    Case("linalg_eigh.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3, 3, 3]}, grad=False),
    Case("linalg_inv.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3, 3, 3]}),
    Case("linalg_cholesky.default", (torch.eye(3).double().expand(2, 3, 3) * 2,), {"kept": [2], "whole": [3, 3, 3, 3]}),
    Case("linalg_matrix_exp.default", (x(2, 3, 3),), {"kept": [2], "whole": [3, 3, 3, 3]}),
]

ATTENTION = [
    Case("scaled_dot_product_attention.default", (x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7)), {"kept": [2, 3, 5, 7], "whole": [4, 6]}),
    Case(
        "scaled_dot_product_attention.default",
        (x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7), bits(2, 1, 5, 6)),
        {"kept": [2, 3, 5, 7], "whole": [4, 6]},
        grad=False,
    ),
    Case("scaled_dot_product_attention.default", (x(2, 5, 4), x(2, 6, 4), x(2, 6, 7)), {"kept": [2, 5, 7], "whole": [4, 6]}),
    Case(
        "scaled_dot_product_attention.default",
        (x(2, 6, 5, 4), x(2, 3, 7, 4), x(2, 3, 7, 4)),
        {"kept": [2, 2, 3, 4, 5], "whole": [4, 7]},
        {"enable_gqa": True},
    ),
    Case(
        "scaled_dot_product_attention.default",
        (x(2, 6, 5, 4), x(2, 1, 7, 4), x(2, 1, 7, 4)),
        {"kept": [2, 4, 5, 6], "whole": [4, 7]},
        {"enable_gqa": True},
    ),
    Case(
        "scaled_dot_product_attention.default",
        (x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7), None, 0.0, True),
        {"kept": [2, 3, 5, 7], "whole": [4, 6]},
        local=causal_rows,
    ),
    Case(
        "scaled_dot_product_attention.default",
        (x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7), x(5, 6)),
        {"kept": [2, 3, 5, 7], "whole": [4, 6]},
    ),
]  # fmt: skip

LOOKUPS = [
    Case(
        "embedding_bag.padding_idx",
        (x(9, 4), ids(9, 6), torch.tensor([0, 2, 3]), False, 0, False, x(6), False, -1),
        {"kept": [4], "whole": [3, 3, 3, 3, 6, 6, 9]},
    ),
    Case(
        "embedding_bag.padding_idx",
        (x(9, 4), ids(9, 6), torch.tensor([0, 2, 3]), False, 2, False, None, False, -1),
        {"whole": [3, 3, 3, 3, 4, 4, 6, 6, 9]},
    ),
    Case("embedding.default", (x(11, 5), ids(11, 2, 3)), {"contracted": [11], "kept": [2, 3, 5]}),
    Case("embedding.default", (x(11, 5), ids(11, 2, 3), -1, True), {"contracted": [11], "kept": [5], "whole": [2, 3]}),
    Case("index_select.default", (x(3, 7), 1, ids(7, 5)), {"contracted": [7], "kept": [3, 5]}),
    Case("gather.default", (x(3, 7), 1, ids(7, 3, 5)), {"contracted": [7], "kept": [3, 5]}),
    Case("gather.default", (x(4, 7), 1, ids(7, 3, 5)), {"contracted": [7], "kept": [5], "whole": [3, 4]}),
    Case("index.Tensor", (x(5, 7), [ids(5, 2, 3)]), {"contracted": [5], "kept": [2, 3, 7]}),
    Case("index.Tensor", (x(5, 7, 4), [ids(5, 2, 1), ids(7, 3)]), {"contracted": [5, 7], "kept": [2, 3, 4]}),
    Case("index.Tensor", (x(5, 7), [most(5)]), {"kept": [7], "whole": [4, 5]}),
    Case("index.Tensor", (x(7, 3, 5), [None, most(3, 5)]), {"kept": [7], "whole": [3, 5, 12]}),
    Case("one_hot.default", (ids(7, 2, 3), 7), {"broadcast": [7], "kept": [2, 3]}, local=one_hot),
    Case("bucketize.Tensor", (x(2, 3), torch.arange(5.0, dtype=torch.float64)), {"kept": [2, 3], "whole": [5]}),
    Case(
        "searchsorted.Tensor", (torch.arange(10.0).reshape(2, 5).double(), x(2, 3)), {"kept": [2, 3], "whole": [5]}, grad=False
    ),
    Case("scatter.src", (x(3, 7), 1, ids(7, 3, 5), x(3, 5)), {"kept": [3], "whole": [5, 7]}, grad=False),
    Case("scatter.value", (x(3, 7), 1, ids(7, 3, 5), 2.0), {"kept": [3], "whole": [5, 7]}),
    Case("scatter_add.default", (x(3, 7), 1, ids(7, 3, 5), x(3, 5)), {"kept": [3], "whole": [5, 7]}),
    Case("scatter_reduce.two", (x(3, 7), 1, ids(7, 3, 5), x(3, 5), "amax"), {"kept": [3], "whole": [5, 7]}, grad=False),
    Case("index_add.default", (x(7, 3), 0, ids(7, 5), x(5, 3)), {"kept": [3], "whole": [5, 7]}),
    Case("index_copy.default", (x(7, 3), 0, torch.tensor([4, 1]), x(2, 3)), {"kept": [3], "whole": [2, 7]}),
    Case("index_fill.int_Scalar", (x(7, 3), 0, ids(7, 5), 1.0), {"kept": [3], "whole": [5, 7]}),
    Case("index_put.default", (x(7, 3), [ids(7, 5)], x(5, 3), True), {"kept": [3], "whole": [5, 5, 7]}),
    Case("index_put.default", (x(3, 7, 2), [None, ids(7, 5)], x(3, 5, 2)), {"kept": [2, 3], "whole": [5, 5, 7]}),
    Case("index_put.default", (x(3, 7, 2), [None, ids(7, 5)], x(1, 5, 2)), {"kept": [2, 3], "whole": [5, 5, 7]}),
    Case("index_put.default", (x(3, 7, 2), [None, ids(7, 5)], x(2), True), {"kept": [2, 3], "whole": [5, 7]}),
    Case("index_put.default", (x(7, 3, 5), [ids(7, 2), None, ids(5, 2)], x(2, 3)), {"kept": [3], "whole": [2, 2, 2, 5, 7]}),
    Case("index_put.default", (x(3, 7, 5), [None, ids(7, 2), ids(5, 2)], x(3, 2)), {"kept": [3], "whole": [2, 2, 2, 5, 7]}),
    Case("index_put.default", (x(7, 3), [bits(7, 3)], torch.tensor(1.0).double()), {"kept": [3, 7]}),
    Case("index_put.default", (x(5, 7), [most(5)], x(7)), {"kept": [5, 7]}),
    Case("index_put.default", (x(5, 7), [most(5)], x(4, 7)), {"kept": [7], "whole": [4, 5]}),
    Case("nonzero.default", (most(5, 7),), {"whole": [2, 5, 7, 28]}),
    Case("select_scatter.default", (x(3, 7), x(3), 1, 2), {"kept": [3], "whole": [7]}),
    Case("slice_scatter.default", (x(3, 7), x(3, 2), 1, 2, 4), {"kept": [3], "whole": [2, 7]}),
    Case("take_along_dim.default", (x(3, 7), ids(7, 3, 5), 1), {"contracted": [7], "kept": [3, 5]}),
]  # fmt: skip

NORMALISATIONS = [
    Case("layer_norm.default", (x(2, 3, 5), [5], x(5), x(5)), {"kept": [2, 3], "whole": [5]}),
    Case("layer_norm.default", (x(2, 3, 5), [3, 5]), {"kept": [2], "whole": [3, 5]}),
    Case("native_layer_norm.default", (x(2, 3, 5), [5], x(5), x(5), 1e-5), {"kept": [2, 3], "whole": [5]}),
    Case("rms_norm.default", (x(2, 3, 5), [5], x(5)), {"kept": [2, 3], "whole": [5]}),
    Case(
        "batch_norm.default", (x(5, 3, 4), x(3), x(3), None, None, True, 0.1, 1e-5, False), {"kept": [3], "pooled": [5], "whole": [4]}
    ),
    Case(
        "batch_norm.default", (x(5, 3, 4), x(3), x(3), x(3), x(3).abs(), False, 0.1, 1e-5, False), {"kept": [3, 4, 5]}, grad=False
    ),
    Case("batch_norm.default", (x(5, 3), x(3), x(3), x(3), x(3).abs(), False, 0.1, 1e-5, False), {"kept": [3, 5]}, grad=False),
    Case("native_batch_norm.default", (x(5, 3, 4), x(3), x(3), None, None, True, 0.1, 1e-5), {"kept": [3], "whole": [4, 5]}),
    Case(
        "_native_batch_norm_legit.default",
        (x(5, 3, 4), x(3), x(3), x(3), x(3).abs(), True, 0.1, 1e-5),
        {"kept": [3], "whole": [4, 5]},
        grad=False,
    ),
    Case("_native_batch_norm_legit.no_stats", (x(5, 3, 4), x(3), x(3), True, 0.1, 1e-5), {"kept": [3], "whole": [4, 5]}),
    Case("instance_norm.default", (x(5, 3, 4), x(3), x(3), None, None, True, 0.1, 1e-5, False), {"kept": [3, 5], "whole": [4]}),
    Case(
        "group_norm.default",
        (x(5, 6, 4), 3, x(6), x(6), 1e-5),
        {"kept": [3, 5], "whole": [2, 4]},
        local=lambda c: c.operator(c.args[0], c.args[0].shape[1] // 2, *c.args[2:]),  # type: ignore[attr-defined]
    ),
    Case("softmax.int", (x(2, 3, 5), -1), {"kept": [2, 3], "whole": [5]}),
    Case("_softmax.default", (x(2, 3, 5), 1, False), {"kept": [2, 5], "whole": [3]}),
    Case("_safe_softmax.default", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}, grad=False),
    Case("log_softmax.int", (x(2, 3, 5), -1), {"kept": [2, 3], "whole": [5]}),
    Case("_log_softmax.default", (x(2, 3, 5), 0, False), {"kept": [3, 5], "whole": [2]}),
    Case("glu.default", (x(2, 6, 5), 1), {"kept": [2, 3, 5], "whole": [2]}),
    Case("_weight_norm.default", (x(4, 3, 5), x(4, 1, 1)), {"kept": [4], "whole": [3, 5]}),
    Case("_weight_norm.default", (x(4, 3, 5), x(1, 1, 5), 2), {"kept": [5], "whole": [3, 4]}),
    Case("pairwise_distance.default", (x(2, 3, 5), x(2, 3, 5)), {"kept": [2, 3], "whole": [5]}),
    Case("pairwise_distance.default", (x(2, 5), x(5), 2.0, 1e-6, True), {"kept": [2], "whole": [5]}),
    Case("cosine_similarity.default", (x(2, 3, 5), x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
]  # fmt: skip

LOSSES = [
    Case("cross_entropy_loss.default", (x(5, 4), labels(), None, 2), {"contracted": [4, 5]}),
    Case("cross_entropy_loss.default", (x(5, 4), labels()), {"contracted": [4, 5]}),
    Case("cross_entropy_loss.default", (x(5, 4, 3), ids(4, 5, 3), None, 2), {"contracted": [3, 4, 5]}),
    Case("cross_entropy_loss.default", (x(5, 4), labels(), None, 0), {"contracted": [4], "kept": [5]}),
    Case("cross_entropy_loss.default", (x(5, 4), labels(), x(4).abs(), 2), {"contracted": [5], "whole": [4]}, grad=False),
    Case("cross_entropy_loss.default", (x(5, 4), labels(), None, 2, -100, 0.1), {"contracted": [5], "whole": [4]}),
    Case("cross_entropy_loss.default", (x(5, 4), x(5, 4).abs(), None, 2), {"contracted": [5], "whole": [4]}),
    Case("nll_loss.default", (x(5, 4), labels(), None, 2), {"contracted": [5], "whole": [4]}),
    Case("nll_loss_nd.default", (x(5, 4), labels(), None, 1), {"contracted": [5], "whole": [4]}),
    Case("nll_loss2d.default", (x(5, 4, 3, 2), ids(4, 5, 3, 2), None, 2), {"contracted": [2, 3, 5], "whole": [4]}),
    Case("nll_loss_forward.default", (x(5, 4), labels(), None, 2, -100), {"contracted": [5], "whole": [4]}),
    *(
        Case(f"{name}.default", (x(5, 3), x(5, 3)), {"contracted": [3, 5]})
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    ),
    Case("soft_margin_loss.default", (x(5, 3), x(5, 3).sign()), {"contracted": [3, 5]}, grad=False),
    Case("hinge_embedding_loss.default", (x(5, 3), x(5, 3).sign()), {"contracted": [3, 5]}),
    Case("margin_ranking_loss.default", (x(5, 3), x(5, 3), x(5, 3).sign(), 0.1), {"contracted": [3, 5]}),
    Case("margin_ranking_loss.default", (x(5, 3), x(5, 3), x(3).sign(), 0.1, 0), {"kept": [3, 5]}),
    Case("cosine_embedding_loss.default", (x(5, 3), x(5, 3), x(5).sign()), {"contracted": [5], "whole": [3]}),
    Case("cosine_embedding_loss.default", (x(5, 3), x(5, 3), x(5).sign(), 0.1, 0), {"kept": [5], "whole": [3]}),
    Case("triplet_margin_loss.default", (x(5, 3), x(5, 3), x(5, 3)), {"contracted": [5], "whole": [3]}),
    Case("triplet_margin_loss.default", (x(5, 3), x(5, 3), x(5, 3), 1.0, 2.0, 1e-6, False, 2), {"contracted": [5], "whole": [3]}),
    Case("multi_margin_loss.default", (x(5, 3), ids(3, 5)), {"contracted": [5], "whole": [3]}),
    Case("multi_margin_loss.default", (x(5, 3), ids(3, 5), 1, 1, x(3).abs(), 0), {"kept": [5], "whole": [3]}, grad=False),
    Case("multilabel_margin_loss.default", (x(5, 3), ids(3, 5, 3)), {"contracted": [5], "whole": [3]}),
    Case("kl_div.default", (x(5, 3), x(5, 3).abs()), {"contracted": [3, 5]}),
    Case("mse_loss.default", (x(5, 3), x(5, 3), 2), {"contracted": [3, 5]}),
    Case("mse_loss.default", (x(5, 3), x(5, 3), 0), {"kept": [3, 5]}),
    Case("ctc_loss.Tensor", (*spoken(ids(3, 5, 2) + 1), 0, 0), {"kept": [5], "whole": [2, 4, 6]}),
    Case("ctc_loss.Tensor", (*spoken(ids(3, 8) + 1), 0, 0), {"whole": [4, 5, 6, 8]}),
    Case("poisson_nll_loss.default", (x(5, 3), x(5, 3), True, False, 1e-8, 2), {"contracted": [3, 5]}),
    Case("binary_cross_entropy.default", (x(5, 3).sigmoid(), x(5, 3).sigmoid(), x(3).abs(), 2), {"contracted": [3, 5]}, grad=False),
    Case("binary_cross_entropy_with_logits.default", (x(5, 3), x(5, 3).sigmoid(), None, x(3).abs(), 1), {"contracted": [3, 5]}, grad=False),
]

REDUCTIONS = [
    Case("sum.default", (x(2, 3),), {"contracted": [2, 3]}),
    Case("sum.dim_IntList", (x(2, 3, 5), [1]), {"contracted": [3], "kept": [2, 5]}),
    Case("sum.dim_IntList", (x(2, 3, 5), [-1, 0], True), {"contracted": [2, 5], "kept": [3]}),
    Case("nansum.default", (x(2, 3, 5), [1]), {"contracted": [3], "kept": [2, 5]}),
    Case("count_nonzero.dim_IntList", (ids(2, 2, 3), [1]), {"contracted": [3], "kept": [2]}),
    Case("mean.default", (x(2, 3),), {"contracted": [2, 3]}),
    Case("mean.dim", (x(2, 3, 5), [-1], True), {"contracted": [5], "kept": [2, 3]}),
    Case("amax.default", (x(2, 3, 5), [1]), {"contracted": [3], "kept": [2, 5]}),
    Case("amin.default", (x(2, 3, 5), [1], True), {"contracted": [3], "kept": [2, 5]}),
    Case("max.default", (x(2, 3),), {"contracted": [2, 3]}),
    Case("min.default", (x(2, 3),), {"contracted": [2, 3]}),
    Case("any.dim", (bits(2, 3, 5), 1), {"contracted": [3], "kept": [2, 5]}),
    Case("all.default", (bits(2, 3),), {"contracted": [2, 3]}),
    Case("_is_all_true.default", (bits(2, 3),), {"contracted": [2, 3]}),
    Case("_is_any_true.default", (bits(2, 3),), {"contracted": [2, 3]}),
    Case("prod.dim_int", (x(2, 3, 5), 1), {"contracted": [3], "kept": [2, 5]}),
    Case("var.correction", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("std.default", (x(2, 3), True), {"whole": [2, 3]}),
    Case("var_mean.correction", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("std_mean.correction", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("logsumexp.default", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("argmax.default", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("argmin.default", (x(2, 3, 5), 1, True), {"kept": [2, 5], "whole": [3]}),
    Case("norm.ScalarOpt_dim", (x(2, 3, 5), 2, [1]), {"kept": [2, 5], "whole": [3]}),
    Case("linalg_vector_norm.default", (x(2, 3, 5), 2, [1], True), {"kept": [2, 5], "whole": [3]}),
    Case("max.dim", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("min.dim", (x(2, 3, 5), 1, True), {"kept": [2, 5], "whole": [3]}),
    Case("nanmedian.dim", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("mode.default", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("nanmean.default", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("median.dim", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("topk.default", (x(2, 7), 3), {"kept": [2], "whole": [3, 7]}),
    Case("kthvalue.default", (x(2, 7), 3), {"kept": [2], "whole": [7]}),
    Case("bincount.default", (ids(5, 7), None, 5), {"whole": [5, 7]}),
    Case("histc.default", (x(7), 5, -1, 1), {"whole": [5, 7]}),
]

ALONG = [
    *(
        Case(f"{name}.default", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]})
        for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
    ),
    Case("sort.default", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("sort.stable", (x(2, 3, 5),), {"kept": [2, 5], "whole": [3]}, {"stable": True, "dim": 1}),
    Case("argsort.default", (x(2, 3, 5),), {"kept": [2, 3], "whole": [5]}),
    Case("diff.default", (x(2, 3, 5), 1, -1, x(2, 3, 1)), {"kept": [2, 3], "whole": [5, 5]}),
    Case("flip.default", (x(2, 3, 5), [1]), {"kept": [2, 5], "whole": [3]}),
    Case("roll.default", (x(2, 3, 5), [1], [2]), {"kept": [2, 3], "whole": [5]}),
    Case("tril.default", (x(2, 3, 5),), {"kept": [2], "whole": [3, 5]}),
    Case("triu.default", (x(2, 3, 5), 1), {"kept": [2], "whole": [3, 5]}),
    Case("diagonal.default", (x(3, 3),), {"whole": [3, 3]}),
    Case("trace.default", (x(3, 3),), {"whole": [3, 3]}),
    Case("diag.default", (x(3),), {"whole": [3, 3, 3]}),
    Case("diag.default", (x(3, 5),), {"whole": [3, 3, 5]}),
]

SHAPES = [
    Case("view.default", (x(2, 3, 24), [2, 3, 4, 6]), {"kept": [2, 3, 4, 6]}, local=to_shape),
    Case("reshape.default", (x(2, 3, 5), [-1, 5]), {"kept": [2, 3, 5]}, local=reshaped),
    Case("reshape.default", (x(2, 6), [3, 4]), {"whole": [2, 3, 4, 6]}, local=reshaped),
    Case("_unsafe_view.default", (x(6, 5), [2, 3, 5]), {"kept": [2, 3, 5]}, local=to_shape),
    Case("flatten.using_ints", (x(2, 3, 5), 1), {"kept": [2, 3, 5]}, local=reshaped),
    Case("unflatten.int", (x(2, 15), 1, [3, 5]), {"kept": [2, 3, 5]}, local=reshaped),
    Case("view_as.default", (x(6), x(2, 3)), {"kept": [2, 3]}, local=reshaped, grad=False),
    Case("squeeze.dim", (x(2, 1, 5), 1), {"kept": [2, 5]}),
    Case("unsqueeze.default", (x(2, 5), 1), {"kept": [2, 5]}),
    Case("transpose.int", (x(2, 3, 5), 1, -1), {"kept": [2, 3, 5]}),
    Case("swapaxes.default", (x(2, 3, 5), 0, 1), {"kept": [2, 3, 5]}),
    Case("t.default", (x(2, 3),), {"kept": [2, 3]}),
    Case("t.default", (x(3),), {"kept": [3]}),
    Case("mT.default", (x(2, 3, 5),), {"kept": [2, 3, 5]}),
    Case("numpy_T.default", (x(2, 3),), {"kept": [2, 3]}),
    Case("permute.default", (x(2, 3, 5), [2, 0, 1]), {"kept": [2, 3, 5]}),
    Case("movedim.intlist", (x(2, 3, 5), [0], [2]), {"kept": [2, 3, 5]}),
    Case("expand.default", (x(3, 1), [2, 3, 5]), {"broadcast": [2, 5], "kept": [3]}, local=to_shape),
    Case("expand_as.default", (x(3, 1), x(2, 3, 5)), {"kept": [2, 3, 5]}, local=lambda c: c.args[0].expand(c.shape)),  # type: ignore[attr-defined]
    Case(
        "repeat.default",
        (x(3, 5), [2, 1, 4]),
        {"broadcast": [2, 4], "kept": [3, 5]},
        local=lambda c: c.args[0].repeat([n // m for n, m in zip(c.shape, (1, *c.args[0].shape), strict=True)]),  # type: ignore[attr-defined]
    ),
    Case("repeat.default", (x(1, 5), [3, 1]), {"broadcast": [3], "kept": [5]}, local=lambda c: c.args[0].repeat(c.shape[0], 1)),  # type: ignore[attr-defined]
    Case(
        "repeat_interleave.self_int",
        (x(3, 5), 4, 1),
        {"broadcast": [4], "kept": [3, 5]},
        local=lambda c: c.args[0].repeat_interleave(c.shape[1] // c.args[0].shape[1], 1),  # type: ignore[attr-defined]
    ),
    Case("cat.default", ([x(2, 3), x(2, 5)], 1), {"kept": [2], "whole": [3, 5]}),
    Case("cat.default", ([x(2, 3), x(2, 3)], 1), {"kept": [2, 3], "whole": [2]}),
    Case("stack.default", ([x(2, 3), x(2, 3)], 1), {"kept": [2, 3], "whole": [2]}),
    Case("meshgrid.default", ([x(3), x(5), x(4)],), {"kept": [3, 4, 5]}),
    Case("meshgrid.indexing", ([x(3), x(5), x(4)],), {"kept": [3, 4, 5]}, {"indexing": "xy"}),
    Case("split.Tensor", (x(2, 6), 2, 1), {"kept": [2, 2], "whole": [3]}, local=split_sizes),
    Case("split_with_sizes.default", (x(2, 7), [3, 4], 1), {"kept": [2], "whole": [3, 4]}),
    Case("chunk.default", (x(2, 6), 2, 1), {"kept": [2, 3], "whole": [2]}),
    Case("tensor_split.sections", (x(2, 6), 2, 1), {"kept": [2, 3], "whole": [2]}),
    Case("unbind.int", (x(2, 3, 5), 1), {"kept": [2, 5], "whole": [3]}),
    Case("slice.Tensor", (x(2, 7), 1, 0, 3), {"kept": [2], "whole": [3, 7]}),
    Case("slice.Tensor", (x(2, 7), 1, 0, 2**63 - 1), {"kept": [2, 7]}),
    Case("narrow.default", (x(2, 7), 1, 2, 3), {"kept": [2], "whole": [3, 7]}),
    Case("select.int", (x(2, 3, 5), 1, 0), {"kept": [2, 5], "whole": [3]}),
    Case("pad.default", (x(2, 3), [0, 2]), {"kept": [2], "whole": [3, 5]}),
    Case("constant_pad_nd.default", (x(2, 3), [1, 1, 0, 0]), {"kept": [2], "whole": [3, 5]}),
    Case("pixel_shuffle.default", (x(2, 12, 3, 5), 2), {"kept": [2, 2, 2, 3, 3, 5]}, local=pixel_shuffled),
    Case("unfold.default", (x(2, 7), 1, 3, 2), {"kept": [2], "whole": [3, 3, 7]}),
]  # fmt: skip

SPACE = [
    Case("conv1d.default", (x(2, 3, 7), x(5, 3, 3), x(5)), {"contracted": [3], "kept": [2, 5], "whole": [3, 5, 7]}),
    Case(
        "conv2d.default",
        (x(2, 6, 7, 7), x(9, 2, 3, 3), x(9), [1, 1], [0, 0], [1, 1], 3),
        {"contracted": [2], "kept": [2, 3, 3], "whole": [3, 3, 5, 5, 7, 7]},
        local=lambda c: c.operator(*c.args[:6], c.args[0].shape[1] // c.args[1].shape[1]),  # type: ignore[attr-defined]
    ),
    Case("conv2d.default", (x(3, 7, 7), x(5, 3, 3, 3)), {"contracted": [3], "kept": [5], "whole": [3, 3, 5, 5, 7, 7]}),
    Case(
        "convolution.default",
        (x(2, 3, 7), x(5, 3, 3), x(5), [1], [0], [1], False, [0], 1),
        {"contracted": [3], "kept": [2, 5], "whole": [3, 5, 7]},
    ),
    Case("conv_transpose1d.default", (x(2, 3, 7), x(3, 5, 3), x(5)), {"contracted": [3], "kept": [2, 5], "whole": [3, 7, 9]}),
    Case("max_pool2d.default", (x(2, 3, 6, 6), [2, 2]), {"kept": [2, 3], "whole": [3, 3, 6, 6]}),
    Case("max_pool2d_with_indices.default", (x(2, 3, 6, 6), [2, 2]), {"kept": [2, 3], "whole": [3, 3, 6, 6]}),
    Case("avg_pool1d.default", (x(2, 3, 6), [2]), {"kept": [2, 3], "whole": [3, 6]}),
    Case("adaptive_avg_pool2d.default", (x(2, 3, 6, 6), [1, 1]), {"kept": [2, 3], "whole": [6, 6]}),
    Case("adaptive_max_pool2d.default", (x(2, 3, 6, 6), [2, 2]), {"kept": [2, 3], "whole": [2, 2, 6, 6]}),
    Case("upsample_nearest2d.vec", (x(2, 3, 4, 4), [8, 8], None), {"kept": [2, 3], "whole": [4, 4, 8, 8]}),
    Case("im2col.default", (x(2, 3, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1]), {"kept": [2], "whole": [3, 4, 5, 12, 12]}),
    Case("col2im.default", (x(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]), {"kept": [2], "whole": [3, 4, 5, 12, 12]}),
    Case("max_unpool2d.default", (x(2, 3, 2, 2), ids(16, 2, 3, 2, 2), [4, 4]), {"kept": [2, 3], "whole": [2, 2, 4, 4]}, grad=False),
    Case("grid_sampler.default", (x(2, 3, 4, 5), x(2, 6, 7, 2), 0, 0, True), {"kept": [2, 3, 6, 7], "whole": [2, 4, 5]}),
    Case(
        "affine_grid_generator.default",
        (x(2, 2, 3), [2, 1, 4, 5], False),
        {"kept": [2], "whole": [2, 2, 3, 4, 5]},
        local=lambda s: of_rows(s),
    ),
    Case("reflection_pad2d.default", (x(2, 3, 4, 4), [1, 1, 1, 1]), {"kept": [2, 3], "whole": [4, 4, 6, 6]}),
]


def lstm(batch_first: bool) -> Case:
    weights = [x(8, 3), x(8, 2), x(8), x(8)]
    source = x(5, 7, 3) if batch_first else x(7, 5, 3)
    args = (source, [x(1, 5, 2), x(1, 5, 2)], weights, True, 1, 0.0, False, False, batch_first)
    whole = [7, 3, 2, 2, 8, 3, 8, 2, 8, 8]
    return Case("lstm.input", args, {"kept": [5], "whole": sorted([*whole, 2])}, grad=False)


RECURRENCES = [
    lstm(True),
    lstm(False),
    *(
        Case(
            f"{kind}.input",
            (x(5, 7, 3), x(1, 5, 2), [x(n, 3), x(n, 2), x(n), x(n)], True, 1, 0.0, False, False, True),
            {"kept": [5], "whole": sorted([2, 2, 2, 3, 3, n, n, n, n, 7])},
            grad=False,
        )
        for kind, n in (("gru", 6), ("rnn_tanh", 2), ("rnn_relu", 2))
    ),
    Case(
        "lstm_cell.default",
        (x(5, 3), [x(5, 2), x(5, 2)], x(8, 3), x(8, 2), x(8), x(8)),
        {"kept": [5], "whole": [2, 2, 2, 3, 3, 8, 8, 8, 8]},
    ),
    *(
        Case(
            f"{kind}_cell.default",
            (x(5, 3), x(5, 2), x(n, 3), x(n, 2), x(n), x(n)),
            {"kept": [5], "whole": sorted([2, 2, 3, 3, n, n, n, n])},
        )
        for kind, n in (("gru", 6), ("rnn_tanh", 2), ("rnn_relu", 2))
    ),
]

FREQUENCIES = [
    Case("fft_rfft.default", (x(2, 3, 8),), {"kept": [2, 3], "whole": [5, 8]}),
    Case("fft_rfft.default", (x(2, 8, 3), 12, 1), {"kept": [2, 3], "whole": [7, 8]}),
    Case("fft_irfft.default", (x(2, 3, 5).to(torch.complex128),), {"kept": [2, 3], "whole": [5, 8]}),
    Case("fft_fft2.default", (x(2, 3, 4, 5),), {"kept": [2, 3], "whole": [4, 4, 5, 5]}),
    Case("fft_irfft2.default", (x(2, 3, 4, 5), [6, 6]), {"kept": [2, 3], "whole": [4, 5, 6, 6]}),
    Case("fft_fftn.default", (x(2, 3, 5), None, [1, 2]), {"kept": [2], "whole": [3, 3, 5, 5]}),
    Case("fft_fftn.default", (x(3, 5),), {"whole": [3, 3, 5, 5]}),
    Case("fft_rfftn.default", (x(2, 3, 5), [8]), {"kept": [2, 3], "whole": [5, 5]}),
    Case("fft_fftshift.default", (x(2, 3), [1]), {"kept": [2], "whole": [3]}),
    Case("fft_ifftshift.default", (x(2, 3),), {"whole": [2, 3]}),
    Case("stft.default", (x(3, 32), 8, 4, 8, x(8)), {"kept": [3], "whole": [5, 7, 8, 32]}, kwargs={"return_complex": True}),
    Case("stft.center", (x(3, 32), 8, 4), {"kept": [3], "whole": [2, 5, 9, 32]}, kwargs={"return_complex": False}),
    Case("istft.default", (x(3, 5, 9).to(torch.complex128), 8, 4, 8, torch.ones(8).double()), {"kept": [3], "whole": [5, 8, 9, 32]}),
]


def of_rows(shard: Shard) -> object:
    """Ops whose size argument is an image's: the local rows of it."""
    return shard.operator(shard.args[0], [shard.shape[0], *shard.args[1][1:]], *shard.args[2:])


FACTORIES = [
    Case("arange.default", (7,), {"broadcast": [7]}, local=counted),
    Case("arange.start", (0, 7), {"broadcast": [7]}, local=counted),
    Case("linspace.default", (0.0, 1.0, 7), {"broadcast": [7]}, local=numbered),
    Case("eye.m", (3, 5), {"broadcast": [3, 5]}, local=numbered),
    Case("zeros.default", ([2, 3],), {"broadcast": [2, 3]}, local=made),
    Case("ones.default", ([2, 3],), {"broadcast": [2, 3]}, local=made),
    Case("full.default", ([2, 3], 4.0), {"broadcast": [2, 3]}, local=made),
    Case("new_zeros.default", (x(5), [2, 3]), {"broadcast": [2, 3]}, local=to_shape, grad=False),
    Case("new_ones.default", (x(5), [2, 3]), {"broadcast": [2, 3]}, local=to_shape, grad=False),
    Case("new_full.default", (x(5), [2, 3], 1.5), {"broadcast": [2, 3]}, local=to_shape, grad=False),
    Case("scalar_tensor.default", (3.0,), {}),
    Case("zeros_like.default", (x(2, 3),), {"kept": [2, 3]}, grad=False),
    Case("ones_like.default", (x(2, 3),), {"kept": [2, 3]}, grad=False),
    Case("full_like.default", (x(2, 3), 2.0), {"kept": [2, 3]}, grad=False),
    Case("randperm.default", (5,), {"whole": [5]}),
    Case("tril_indices.default", (3, 4), {"whole": [2, 6]}),
]

POINTWISE = [
    Case("add.Tensor", (x(2, 1, 5), x(3, 1)), {"kept": [2, 3, 5]}),
    Case("broadcast_tensors.default", ([x(2, 1, 5), x(3, 1)],), {"kept": [2, 3, 5]}),
    Case("mul.Scalar", (x(2, 3), 2.0), {"kept": [2, 3]}),
    Case("where.self", (bits(3), x(2, 3), x(2, 1)), {"kept": [2, 3]}),
    Case("masked_fill.Scalar", (x(2, 3), bits(2, 1), 0.0), {"kept": [2, 3]}),
    Case("clone.default", (x(2, 3),), {"kept": [2, 3]}),
    Case("to.dtype", (x(2, 3), torch.float32), {"kept": [2, 3]}),
    Case("dropout.default", (x(2, 3), 0.0, True), {"kept": [2, 3]}),
    Case("softplus.default", (x(2, 3),), {"kept": [2, 3]}),
    Case("lerp.Tensor", (x(2, 3), x(2, 3), x(3)), {"kept": [2, 3]}),
    Case("__and__.Tensor", (bits(2, 3), bits(3)), {"kept": [2, 3]}),
    Case("floor_divide.default", (ids(9, 2, 3), 2), {"kept": [2, 3]}),
    Case("log_sigmoid.default", (x(2, 3),), {"kept": [2, 3]}),
    Case("prelu.default", (x(2, 3, 5), x(3)), {"kept": [2, 3, 5]}),
    Case("prelu.default", (x(2, 3, 5), x(1)), {"kept": [2, 3, 5]}),
    Case("view_as_complex.default", (x(3, 5, 2),), {"kept": [3, 5], "whole": [2]}, grad=False),
    Case("view_as_real.default", (torch.complex(x(3, 5), x(3, 5)),), {"kept": [3, 5], "whole": [2]}, grad=False),
    Case("gelu.default", (x(2, 3),), {"kept": [2, 3]}),
]

CASES = [
    *MATRICES, *ATTENTION, *LOOKUPS, *NORMALISATIONS, *LOSSES, *REDUCTIONS, *ALONG, *SHAPES, *SPACE, *FREQUENCIES,
    *RECURRENCES, *FACTORIES, *POINTWISE,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_op_on_parts_gives_the_parts_of_the_op(case: Case) -> None:
    law = Law(case)
    assert law.role_sizes() == case.roles
    law.check()


@pytest.mark.parametrize("how", [0, 1, 2])
def test_cross_entropy_from_parts_of_the_classes(how: int) -> None:
    logits, target = x(5, 7).requires_grad_(), torch.tensor([0, 6, -100, 2, 3])
    whole = torch.ops.aten.cross_entropy_loss.default(logits, target, None, how)
    parts = [(0, 3), (3, 7)]
    total = torch.stack([logits[:, a:b].exp().sum(1) for a, b in parts]).sum(0)
    hits = [
        torch.where((target >= a) & (target < b), logits[:, a:b].gather(1, (target - a).clamp(0, b - a - 1)[:, None])[:, 0], 0)
        for a, b in parts
    ]
    each = torch.where(target == -100, 0, total.log() - sum(hits))
    mine = each if how == 0 else each.sum() / (4 if how == 1 else 1)
    torch.testing.assert_close(mine, whole)
    seed = torch.randn_like(whole)
    torch.testing.assert_close(torch.autograd.grad(mine, logits, seed)[0], torch.autograd.grad(whole, logits, seed)[0])


UNTRIED = {
    "random": {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "uniform", "bernoulli", "multinomial"},
    "dropout": {"native_dropout", "feature_dropout", "alpha_dropout", "rrelu_with_noise"},
    "uninitialised": {"empty", "new_empty", "empty_like"},
    "in place only": {"copy", "fill", "zero"},
    "on other devices or builds": {"_grouped_mm"},
    "what a tried op is made of": {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_reshape_alias"},
}
"""Operators that the law does not try, and why."""


def test_every_operator_of_the_table_is_tried() -> None:
    tried = {part for case in CASES for part in (case.target, case.target.split(".")[0])}
    rules_tried = {OPERATORS[name].axes for name in tried if name in OPERATORS}
    excused = {name for names in UNTRIED.values() for name in names}
    missing = [name for name, entry in OPERATORS.items() if name not in tried | excused and entry.axes not in rules_tried | {None}]
    assert not missing


GONE = {"cholesky"}
"""Operators that not every tested version of torch has: 2.15 has no cholesky."""
OF_TORCH = {name: entry for name, entry in OPERATORS.items() if name not in GONE or hasattr(torch.ops.aten, name)}


def test_operands_are_named_as_torch_names_them() -> None:
    """An operand passed by keyword is found by its name, so the table must have torch's."""
    from whale.axes.notation import parse

    for name, entry in OF_TORCH.items():
        if not isinstance(entry.axes, str):
            continue
        packet = getattr(torch.ops.aten, name.split(".")[0])
        known = {argument.name for overload in packet.overloads() for argument in getattr(packet, overload)._schema.arguments}
        assert {operand.name for operand in parse(entry.axes).operands} <= known, name


def test_every_operator_of_the_table_exists() -> None:
    for name in OF_TORCH:
        packet, _, overload = name.partition(".")
        in_place = getattr(torch.ops.aten, packet + "_", None)
        found = getattr(torch.ops.aten, packet, in_place)
        assert found is not None and (not overload or overload in found.overloads()), name
