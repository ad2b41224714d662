"""Checked access to a YAML file's values: a wrong one becomes a fault with its line, and reading goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from whale.config import Document, did_you_mean
from whale.errors import ClusterError, WhaleError
from whale.units import parse_quantity

EXAMPLES = {"B": "16 GiB", "B/s": "25 Gbit/s", "s": "5 us", "FLOP/s": "15.7 TFLOP/s"}


@dataclass(frozen=True)
class Entry:
    """One value of a document, with its name for errors."""

    document: Document  # the file
    name: str  # in words (``host big``)
    data: object  # the plain value
    way: tuple[str | int, ...] = ()  # its path in the document
    faults: list[WhaleError] = field(default_factory=list)  # shared by all entries of a document

    def fault(self, message: str, *way: str | int, hint: str | None = None) -> None:
        """Notes a fault at this value, or at one below it."""
        self.faults.append(ClusterError(message, where=self.document.place(*self.way, *way), hint=hint))

    def get(self, key: str) -> object:
        return self.data.get(key) if isinstance(self.data, dict) else None

    def has(self, key: str) -> bool:
        """Whether the key exists, whatever its value."""
        return isinstance(self.data, dict) and key in self.data

    def below(self, key: str, name: str) -> Entry:
        return Entry(self.document, name, self.get(key), (*self.way, key), self.faults)

    def items(self, name: str) -> Iterator[Entry]:
        for index, item in enumerate(self.data if isinstance(self.data, list) else ()):
            yield Entry(self.document, f"{name} {index + 1}", item, (*self.way, index), self.faults)

    def is_mapping(self, known: Iterable[str], required: Iterable[str] = ()) -> bool:
        """Whether this is a mapping with these keys; unknown and missing ones are faults."""
        names = list(known)
        if not isinstance(self.data, dict):
            found = "is empty" if self.data is None else f"is {self.data!r}, not a mapping"
            self.fault(f"{self.name} {found}; it takes the keys {', '.join(names)}")
            return False
        for key in self.data:
            if key not in names:
                self.fault(f"unknown key {key!r} in {self.name}", key, hint=did_you_mean(key, names))
        missing = [key for key in required if self.data.get(key) is None]
        for key in missing:
            self.fault(f"{self.name} lacks {key!r}")
        return not missing

    def quantity(self, key: str, unit: str, *, zero: bool = False) -> float | None:
        """A positive amount (or zero, if allowed); None if it is absent or wrong."""
        if not self.has(key):
            return None
        value = self.get(key)
        rule = "at least 0" if zero else "above 0"
        try:
            amount = parse_quantity(value, unit)  # type: ignore[arg-type]  # refuses other types itself
        except ValueError:
            self.fault(f"{self.name}: {key} {value!r} is not an amount in {unit} {rule}", key, hint=f"for example {EXAMPLES[unit]}")
            return None
        if not math.isfinite(amount) or amount < 0 or (amount == 0 and not zero):
            self.fault(f"{self.name}: {key} {value!r} is not {rule}", key)
            return None
        return amount

    def number(self, key: str, high: float = math.inf, *, zero: bool = False) -> float | None:
        """A number above 0 (or 0, if allowed) and at most `high`; None if it is absent or wrong."""
        if not self.has(key):
            return None
        value = self.get(key)
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        if not 0 <= number <= high or math.isinf(number) or (number == 0 and not zero):
            limit = f" and at most {high:g}" if math.isfinite(high) else ""
            self.fault(f"{self.name}: {key} {value!r} is not a number {'of at least' if zero else 'above'} 0{limit}", key)
            return None
        return number

    def count(self, key: str, default: int, high: int) -> int:
        """A whole number from 1 to `high`; the default if it is absent or wrong."""
        if not self.has(key):
            return default
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            self.fault(f"{self.name}: {key} {value!r} is not a whole number from 1 to {high}", key)
            return default
        return value

    def flag(self, key: str) -> bool:
        """True or false; false if it is absent or wrong."""
        value = self.get(key)
        if self.has(key) and not isinstance(value, bool):
            self.fault(f"{self.name}: {key} {value!r} is not true or false", key)
        return value is True

    def text(self, key: str) -> str | None:
        """Text, or a number as text (a host may be called 7); None if it is absent or wrong."""
        value = self.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value):
            return str(value)
        if self.has(key):
            self.fault(f"{self.name}: {key} {value!r} is not text", key)
        return None
