"""Quantities in text: parsing ``32 GiB`` and ``25 Gbit/s``, printing bytes, seconds, shares and counts."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_quantity(text: str | int | float, unit: str) -> float:
    """Reads a quantity of a unit: ``B``, ``B/s``, ``FLOP/s`` or ``s``.

    Args:
        text: a number in that unit, or text such as ``32 GiB``, ``25 Gbit/s``, ``5 us``.
        unit: of the result. Bits are accepted for bytes (``Gbit/s``).

    Raises:
        ValueError: the text is not a quantity of that unit.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError(f"{text!r} is not a quantity in {unit}")
    if isinstance(text, (int, float)):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity in {unit}")
    number, written = float(match[1]), match[2]
    factor = _factor(written, unit)
    if factor is None:
        raise ValueError(f"{text!r} is not a quantity in {unit}")
    return number * factor


def _factor(written: str, unit: str) -> float | None:
    if written == "":
        return 1.0
    if unit == "s":
        return _SECONDS.get(written)
    bases = [(unit, 1.0)]
    if "B" in unit:
        bases.append((unit.replace("B", "bit", 1), 0.125))
    for base, per_unit in bases:
        if not written.endswith(base):
            continue
        prefix = written[: -len(base)]
        scale = _BINARY.get(prefix, _SCALES.get(prefix))
        return None if scale is None else scale * per_unit
    return None


def format_bytes(num_bytes: float) -> str:
    """``1610612736`` as ``1.50 GiB``."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or name == "TiB":
            return f"{sign}{size:.0f} B" if name == "B" else f"{sign}{size:.2f} {name}"
        size /= 1024
    raise AssertionError("unreachable")


def format_quantity(amount: float, unit: str) -> str:
    """``8.12345e10`` FLOP/s as ``81.23 GFLOP/s``, in four digits that `parse_quantity` reads again."""
    if unit == "s":
        name, scale = next(((name, scale) for name, scale in _SECONDS.items() if amount >= scale), ("ns", 1e-9))
        return f"{amount / scale:.4g} {name}"
    prefix, scale = next(((prefix, scale) for prefix, scale in reversed(_SCALES.items()) if amount >= scale and prefix != "K"), ("", 1.0))
    return f"{amount / scale:.4g} {prefix}{unit}"


def format_seconds(seconds: float) -> str:
    """``0.00123`` as ``1.23 ms``; what rounding leaves, below a picosecond, as ``0 us``."""
    seconds = 0.0 if abs(seconds) < 1e-12 else seconds
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or name == "us":
            return f"{seconds / scale:.3g} {name}" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """``5400`` as ``1.5 hours``: for longer times than a step."""
    for name, unit in (("days", 86_400.0), ("hours", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return format_seconds(seconds)


def format_rate(rate: float) -> str:
    """A number per second: ``15994.2`` as ``15,994``, ``27.432`` as ``27.4``."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def format_share(share: float) -> str:
    """``0.423`` as ``42%``; little, but not nothing, as ``<1%``."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def format_count(count: float) -> str:
    """``1500000`` as ``1.5M``."""
    for name, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{name}"
    return f"{count:.3g}"


def counted(number: int, noun: str) -> str:
    """``1`` and ``row`` as ``1 row``, ``4`` and ``micro-batch`` as ``4 micro-batches``."""
    return f"{number} {_form(noun, number)}"


def listed(noun: str, names: Sequence[object]) -> str:
    """``rank`` and ``[1]`` as ``rank 1``, ``[0, 3]`` as ``ranks 0, 3``."""
    return f"{_form(noun, len(names))} {', '.join(map(str, names))}"


def each_counted(numbers: Sequence[int], noun: str) -> str:
    """``[1]`` and ``stage`` as ``1 stage``, ``[2, 1]`` as ``2, 1 stages``."""
    return f"{', '.join(map(str, numbers))} {_form(noun, numbers[0] if len(numbers) == 1 else 0)}"


def _form(noun: str, number: int) -> str:
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch")) else "s")
