"""Ops over space (convolutions, pools, interpolation, padding) and Fourier transforms, whose dimensions are whole and change their
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from whale.axes.operators.entry import Family, Operator, Shape, Template, along, chosen, names, operand, write
from whale.axes.outcome import Reading, RuleMisfit, argument, number
from whale.ir.graph import Argument, Op


def resized(op: Op, reading: Reading) -> str:
    """An op over trailing dimensions that may change their size (pools, interpolation): the leading two are kept."""
    letters = names(len(operand(op, reading)))
    kept = letters[: len(letters) - _num_spatial(op)]
    source = [*kept, *(f"{letter}!" for letter in letters[len(kept) :])]
    result = [*kept, *(f"_new_{letter}!" for letter in letters[len(kept) :])]
    return write([("input", source)], *[result] * len(op.outputs))


def sampled(op: Op, reading: Reading) -> str:
    """``grid_sampler``: independent samples of an image at given places; the image's own space is whole."""
    space = [f"x{index}!" for index in range(len(operand(op, reading)) - 2)]
    places = [f"y{index}" for index in range(len(space))]
    return write([("input", ["n", "channels", *space]), ("grid", ["n", *places, "_place!"])], ["n", "channels", *places])


def placed(op: Op, reading: Reading) -> str:
    """``affine_grid_generator``: the places of an image moved by each row's matrix."""
    return write([("theta", ["n", "_to!", "_from!"])], ["n", *(f"_y{index}!" for index in range(len(op.outputs[0].shape) - 1))])


def _num_spatial(op: Op) -> int:
    digits = [int(char) for char in op.target.split(".")[1] if char in "123"]
    return digits[0] if digits else 2


def _sides(op: Op, reading: Reading) -> tuple[str, str, str, str]:
    """Of a convolution, the batch if it has one, and the space of its input, its kernel and its result."""
    dims, weight = operand(op, reading), operand(op, reading, 1)
    space, kernel, made = (" ".join(f"{kind}{index}!" for index in range(len(weight) - 2)) for kind in ("x", "k", "y"))
    return "n " if len(dims) == len(weight) else "", space, kernel, made


def convolution(op: Op, reading: Reading) -> str:
    """Input channels are contracted, output channels and groups kept, space is whole (halos)."""
    groups = argument(op, 6 if op.target.split(".")[1] != "convolution" else 8, "groups", 1)
    n, space, kernel, made = _sides(op, reading)
    g = f"groups={number(groups)}"
    return f"input[{n}{g}*in_channels {space}] weight[{g}*channels in_channels {kernel}] +bias[{g}*channels] -> [{n}{g}*channels {made}]"


def transposed_convolution(op: Op, reading: Reading) -> str:
    """As `convolution`, with the weight's two channel dimensions exchanged."""
    groups = f"groups={number(argument(op, 6, 'groups', 1))}"
    n, space, kernel, made = _sides(op, reading)
    source = f"{groups}*in_channels"
    return f"input[{n}{source} {space}] weight[{source} channels {kernel}] +bias[{groups}*channels] -> [{n}{groups}*channels {made}]"


def general_convolution(op: Op, reading: Reading) -> str:
    """``aten.convolution``: one op for both kinds."""
    if argument(op, 6, "transposed", False) is True:
        raise RuleMisfit("it is transposed")
    return convolution(op, reading)


def filtered(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """Each element of the result is a sum over the filter: input channels of its group times the filter's area."""
    area: int = prod(args[1][1:])
    return 2 * prod(results[0]) * area


def spread(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """Transposed: each element of the input meets its filter: output channels of its group times the filter's area."""
    made: int = prod(args[0]) * prod(args[1][1:])
    return 2 * made


SPACE: Family = {
    "conv1d conv2d conv3d": Operator(convolution, "contractions.convolution", ("bias", 2), filtered, weights="convolution"),
    "convolution": Operator(general_convolution, "contractions.convolution", ("bias", 2)),
    "conv_transpose1d conv_transpose2d conv_transpose3d": Operator(transposed_convolution, "contractions.convolution", ("bias", 2), spread),
    "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d": Operator(
        resized, keeps="inputs and places"
    ),
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d": Operator(resized),
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d": Operator(resized),
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d": Operator(resized),
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d": Operator(resized),
    "im2col": Operator("self[... c! h! w!] -> [... _patch! _places!]"),
    "col2im": Operator("self[... patch! places!] -> [... _c! _h! _w!]"),
    "max_unpool2d": Operator("self[... h! w!] indices[... h! w!] -> [... _H! _W!]"),
    "grid_sampler": Operator(sampled),
    "affine_grid_generator": Operator(placed, "shapes.placed"),
}


def transform(default: Argument = None) -> Template:
    """``input[a b!] -> [a _new_b!]`` along given dimensions; else along the last ones that have new sizes, or all."""

    def rule(op: Op, reading: Reading) -> str:
        letters = names(len(operand(op, reading)))
        dims, sizes = argument(op, 2, "dim", default), argument(op, 1, "s", None)
        if dims in (None, ()) and isinstance(sizes, tuple):
            dims = tuple(range(-len(sizes), 0))
        transformed = chosen(dims, len(letters))
        source = [letter + "!" if index in transformed else letter for index, letter in enumerate(letters)]
        result = [f"_new_{letter}!" if index in transformed else letter for index, letter in enumerate(letters)]
        return write([("self", source)], result)

    return rule


def short_transform(op: Op, reading: Reading) -> str:
    """``stft``: a row of samples becomes frequencies by frames."""
    rows = names(len(operand(op, reading)) - 1)
    parts = ["_real!"] if len(op.outputs[0].shape) == len(rows) + 3 else []
    return write([("self", [*rows, "samples!"]), *_window(op, reading)], [*rows, "_frequencies!", "_frames!", *parts])


def inverse_short_transform(op: Op, reading: Reading) -> str:
    rows = names(len(op.outputs[0].shape) - 1)
    return write([("self", [*rows, "frequencies!", "frames!"]), *_window(op, reading)], [*rows, "_samples!"])


def _window(op: Op, reading: Reading) -> list[tuple[str, list[str]]]:
    return [] if reading.tensor(argument(op, 4, "window")) is None else [("window", ["_window!"])]


FREQUENCIES: Family = {
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft": Operator(transform(default=-1)),
    "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2": Operator(transform(default=(-2, -1))),
    "fft_fftn fft_ifftn fft_rfftn fft_irfftn": Operator(transform()),
    "fft_fftshift fft_ifftshift": Operator(along()),
    "stft": Operator(short_transform),
    "istft": Operator(inverse_short_transform),
}
