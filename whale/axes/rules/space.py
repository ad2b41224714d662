"""Rules of ops over space: convolutions, pools, interpolation, padding."""

from __future__ import annotations

from whale.axes.outcome import Misfit, Reading, argument, number
from whale.axes.rules.templates import names, operand, write
from whale.ir.graph import Op


def resized(op: Op, reading: Reading) -> str:
    """An op over trailing dimensions that may change their size (pools, interpolation): the leading two are kept."""
    letters = names(len(operand(op, reading)))
    kept = letters[: len(letters) - _num_spatial(op)]
    source = [*kept, *(f"{letter}!" for letter in letters[len(kept) :])]
    result = [*kept, *(f"_new_{letter}!" for letter in letters[len(kept) :])]
    return write([("input", source)], *[result] * len(op.outputs))


def sampled(op: Op, reading: Reading) -> str:
    """``grid_sampler``: values of an image at places, each by itself; the image's own space is whole."""
    space = [f"x{index}!" for index in range(len(operand(op, reading)) - 2)]
    places = [f"y{index}" for index in range(len(space))]
    return write([("input", ["n", "channels", *space]), ("grid", ["n", *places, "_place!"])], ["n", "channels", *places])


def placed(op: Op, reading: Reading) -> str:
    """``affine_grid_generator``: the places that each row's matrix moves an image's to."""
    return write([("theta", ["n", "_to!", "_from!"])], ["n", *(f"_y{index}!" for index in range(len(op.outputs[0].shape) - 1))])


def _num_spatial(op: Op) -> int:
    digits = [int(char) for char in op.target.split(".")[1] if char in "123"]
    return digits[0] if digits else 2


def convolution(op: Op, reading: Reading) -> str:
    """Convolution: input channels are contracted, output channels and groups kept, space is whole (halos)."""
    groups = argument(op, 6 if op.target.split(".")[1] != "convolution" else 8, "groups", 1)
    dims, weight = operand(op, reading), operand(op, reading, 1)
    n = "n " if len(dims) == len(weight) else ""
    space, kernel, made = (" ".join(f"{kind}{index}!" for index in range(len(weight) - 2)) for kind in ("x", "k", "y"))
    g = f"groups={number(groups)}"
    return f"input[{n}{g}*in_channels {space}] weight[{g}*channels in_channels {kernel}] +bias[{g}*channels] -> [{n}{g}*channels {made}]"


def transposed_convolution(op: Op, reading: Reading) -> str:
    """Transposed convolution: as convolution, with the weight's two channel dimensions exchanged."""
    groups = f"groups={number(argument(op, 6, 'groups', 1))}"
    dims, weight = operand(op, reading), operand(op, reading, 1)
    n = "n " if len(dims) == len(weight) else ""
    space, kernel, made = (" ".join(f"{kind}{index}!" for index in range(len(weight) - 2)) for kind in ("x", "k", "y"))
    source = f"{groups}*in_channels"
    return f"input[{n}{source} {space}] weight[{source} channels {kernel}] +bias[{groups}*channels] -> [{n}{groups}*channels {made}]"


def general_convolution(op: Op, reading: Reading) -> str:
    """``aten.convolution``: one op for both kinds."""
    if argument(op, 6, "transposed", False) is True:
        raise Misfit("it is transposed")
    return convolution(op, reading)
