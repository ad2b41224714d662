"""Which operand of an op is added to its product: where the product is summed over devices, it is added once."""

from __future__ import annotations

from whale.ir.graph import Op, Ref

ADDED: dict[str, tuple[str, int]] = {
    "linear": ("bias", 2), "addmm": ("self", 0), "baddbmm": ("self", 0), "bilinear": ("bias", 3), "_grouped_mm": ("bias", 3),
    "conv1d": ("bias", 2), "conv2d": ("bias", 2), "conv3d": ("bias", 2), "convolution": ("bias", 2),
    "conv_transpose1d": ("bias", 2), "conv_transpose2d": ("bias", 2), "conv_transpose3d": ("bias", 2),
}  # fmt: skip
"""Per operator, the operand's name and position."""


def operator_name(target: str) -> str:
    """``aten.add_.Tensor`` is ``add``."""
    name = target.split(".")[1] if "." in target else target
    return name if name.startswith("_") else name.rstrip("_")


def added_operand(op: Op) -> str | None:
    """The op that makes the added operand; None where there is none."""
    name, position = ADDED.get(operator_name(op.target), ("", -1))
    if not name:
        return None
    argument = op.args[position] if position < len(op.args) else dict(op.kwargs).get(name)
    return argument.op if isinstance(argument, Ref) else None
