"""The table of lowerings: per operator, how it computes on parts.

An operator that is in neither table is refused, so that no baked size or position goes unseen. Ops of the user's own
that have a registered rule compute as they are: a rule is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import fx

import whale.runtime.program.shard.contractions as contractions
import whale.runtime.program.shard.shapes as shapes
import whale.runtime.program.shard.tables as tables
from whale.runtime.program.shard.call import Call
from whale.runtime.program.shard.statistics import part_batch_norm

Lowering = Callable[[Call], fx.Node]


def attention(call: Call) -> fx.Node:
    """Attention: heads are independent; queries too, unless their places in the whole decide what they see."""
    if call.raw["is_causal"] is True and call.is_sharded(call.result[-2]):
        call.refuse("a causal mask is made from the positions of the queries", hint="pass the mask as attn_mask")
    return contractions.same(call)


def group_norm(call: Call) -> fx.Node:
    """Group normalisation: where the channels are cut, whole groups are."""
    name = "num_groups" if "num_groups" in call.raw else "group"
    channels = call.held(call.dimensions("input")[1])
    return call.same(**{name: call.raw[name] * channels.count // channels.units})


def batch_norm(call: Call) -> fx.Node:
    """Batch normalisation: where its samples are cut, the statistics are of all parts."""
    if call.role.kind != "pooled":
        return contractions.same(call)
    held = call.held(call.dimensions("input")[0])
    names = ("input", "weight", "bias", "running_mean", "running_var")
    values = [call.value(name) for name in names]
    return call.emit(part_batch_norm, *values, call.value("momentum"), call.raw["eps"], held.count / held.units, call.writer.group)


_AS_THEY_ARE = """
mm bmm matmul mv dot outer einsum tensordot cdist pairwise_distance
embedding_bag
bucketize searchsorted scatter scatter_add scatter_reduce index_add index_fill index_copy index_put select_scatter slice_scatter
layer_norm native_layer_norm rms_norm _fused_rms_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm
instance_norm softmax _softmax _safe_softmax log_softmax _log_softmax glu
mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div ctc_loss poisson_nll_loss binary_cross_entropy
binary_cross_entropy_with_logits
sum nansum count_nonzero mean nanmean any all prod var std var_mean std_mean logsumexp argmax argmin norm linalg_vector_norm
_is_any_true _is_all_true median nanmedian mode topk kthvalue cosine_similarity
cumsum cumprod logcumsumexp cummax cummin sort argsort diff flip roll tril triu multinomial
flatten ravel unsqueeze transpose swapaxes swapdims t mT numpy_T permute movedim moveaxis expand_as cat concat stack unbind select
pad constant_pad_nd unfold im2col col2im max_unpool2d
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
max_pool2d_with_indices max_pool3d_with_indices upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
fft_fftshift fft_ifftshift stft istft grid_sampler fake_quantize_per_tensor_affine
linalg_slogdet slogdet linalg_det det linalg_inv inverse linalg_cholesky cholesky linalg_matrix_exp linalg_eigh linalg_eigvalsh
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
zeros_like ones_like full_like empty_like rand_like randn_like randint_like
prelu view_as_complex view_as_real
to _to_copy clone contiguous detach alias lift_fresh lift_fresh_copy type_as
broadcast_tensors
copy fill zero dropout native_dropout feature_dropout alpha_dropout bernoulli where masked_fill lerp nan_to_num softplus hardtanh
rrelu_with_noise relu6 selu celu normal uniform bitwise_not _conj resolve_conj resolve_neg requires_grad
__and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__
floor_divide multiply divide subtract negative absolute fix greater greater_equal less less_equal not_equal isclose
arctan arctan2 hardswish log_sigmoid conj real imag polar complex
"""

SAME = frozenset(_AS_THEY_ARE.split())
"""Operators that compute on parts as they are: their arguments hold no sizes or positions of dimensions that may be cut."""

LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        **dict.fromkeys(("linear", "bilinear"), contractions.with_bias),
        **dict.fromkeys(("addmm", "baddbmm"), contractions.added_product),
        "_grouped_mm": contractions.grouped_product,
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), contractions.convolution),
        **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), contractions.convolution),
        **dict.fromkeys(("amax", "amin", "max", "min"), contractions.extreme),
        **dict.fromkeys(
            ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward"), contractions.classification_loss
        ),
        "scaled_dot_product_attention": attention,
        "batch_norm": batch_norm,
        "group_norm": group_norm,
        "embedding": tables.embedding,
        "index": tables.index,
        "index_select": tables.index_select,
        **dict.fromkeys(("gather", "take_along_dim"), tables.gather),
        "one_hot": tables.one_hot,
        **dict.fromkeys(("view", "reshape", "_unsafe_view", "_reshape_alias"), shapes.view),
        **dict.fromkeys(("view_as", "reshape_as"), shapes.view_as),
        "unflatten": shapes.unflatten,
        "squeeze": shapes.squeeze,
        **dict.fromkeys(("expand", "broadcast_to"), shapes.sized),
        **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"), shapes.sized),
        **dict.fromkeys(("arange", "linspace", "rand", "randn", "randint", "eye"), shapes.made_whole),
        **dict.fromkeys(("repeat", "tile"), shapes.repeat),
        "repeat_interleave": shapes.repeat_interleave,
        **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk", "tensor_split"), shapes.split),
        **dict.fromkeys(("slice", "narrow"), shapes.slice_),
        "pixel_shuffle": shapes.pixel_shuffle,
        "affine_grid_generator": shapes.placed,
    }
)
"""Operators that need more."""


def lowering(call: Call) -> Lowering:
    """How a call is lowered.

    Raises:
        PlanError: its operator has no lowering.
    """
    found = LOWERINGS.get(call.operator)
    if found is not None and call.op.target.startswith("aten."):
        return found
    if call.operator in SAME or "pointwise" in call.op.tags or not call.op.target.startswith("aten."):
        return contractions.same
    call.refuse("it has no lowering", hint=f"leave {call.axis} whole")
