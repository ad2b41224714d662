"""Fourier transforms: what is transformed is whole and gets another size, all else is kept."""

from __future__ import annotations

from whale.axes.operators.entry import Family, Operator, Template, along, chosen, names, operand, write
from whale.axes.outcome import Reading, argument
from whale.ir.graph import Argument, Op


def transform(position: int = 2, default: Argument = None) -> Template:
    """``input[a b!] -> [a _new_b!]``, along given dimensions; where none are, along the last ones that have new sizes, or all.

    Args:
        position: of the dimensions among the arguments.
        default: the dimensions where the op is given none.
    """

    def rule(op: Op, reading: Reading) -> str:
        letters = names(len(operand(op, reading)))
        dims, sizes = argument(op, position, "dim", default), argument(op, 1, "s", None)
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
    """``istft``: frequencies by frames become a row of samples."""
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
