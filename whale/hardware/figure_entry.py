"""The measured figures of a cluster file: ``{figure: NAME, value: 81 GFLOP/s, low: ..., high: ..., samples: 22}``."""

from __future__ import annotations

from collections.abc import Iterator

from whale.hardware.fields import EXAMPLES, Entry
from whale.ir.figure import Figure
from whale.units import parse_quantity

MOST_SAMPLES = 1_000_000_000
_AMOUNTS = ("value", "low", "high")


def read_figures(entry: Entry) -> Iterator[Figure]:
    """The figures of the list ``measured``; faults are noted in the entry."""
    if not isinstance(entry.data, list):
        entry.fault(f"measured is a list of figures, as `whale probe` writes them ({entry.data!r} is not)")
    for item in entry.items("figure"):
        if not item.is_mapping(("figure", *_AMOUNTS, "samples"), required=("figure", *_AMOUNTS)):
            continue
        name, unit = item.text("figure"), _unit(item)
        amounts = [item.quantity(key, unit, zero=key == "low") for key in _AMOUNTS]
        if name is None or None in amounts:
            continue
        value, low, high = (amount for amount in amounts if amount is not None)
        if not low <= value <= high:
            item.fault(f"{item.name}: value lies between low and high ({item.get('value')} does not)", "value")
            continue
        yield Figure(name, unit, value, low, high, item.count("samples", 1, MOST_SAMPLES))


def _unit(item: Entry) -> str:
    """The unit that the value is written in; seconds, whose reading then fails, where it is none."""
    for unit in EXAMPLES:
        try:
            parse_quantity(str(item.get("value")), unit)
        except ValueError:
            continue
        return unit
    return "s"
