"""The ``replicas`` blocks of a recipe: replicas that need not be alike, each on devices and with a pipeline of its own.

replicas:
  - devices: [host0/0, host0/1]      a count, or the names
    num_stages: 2                    any key of the section `pipeline`, for this replica alone
  - devices: 2
    split: 2                         devices of each split group
    rows: 12                         weight in the rows of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whale.config.keys import Key, at_least
from whale.config.nearest import nearest
from whale.errors import ConfigError, WhaleError

REPLICAS = "replicas"

Place = Callable[..., object]
"""Where a value stands, by the way to it: number of the block, key."""


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """One replica as the user wants it.

    Attributes:
        devices: their names, or how many; None for as many as its stages and split groups take.
        split: devices of each split group; None: one, or what the scopes say.
        rows: its weight in the rows of the batch; None: balanced.
        pipeline: keys of the section ``pipeline`` with their values, where they are its own.
    """

    devices: tuple[str, ...] | int | None = None
    split: int | None = None
    rows: int | None = None
    pipeline: tuple[tuple[str, Any], ...] = ()

    def as_data(self) -> dict[str, Any]:
        """In the form of a recipe."""
        devices = list(self.devices) if isinstance(self.devices, tuple) else self.devices
        own = {"devices": devices, "split": self.split, "rows": self.rows}
        return {key: value for key, value in own.items() if value is not None} | dict(self.pipeline)


_COUNTS = {name: Key(f"{REPLICAS}.{name}", "int", False, None, "", at_least(1), (), False, None) for name in ("split", "rows")}


def read_blocks(
    data: object,
    where: Place,
    keys: Mapping[str, Key],
    checked: Callable[[Key, object, object], object],
) -> tuple[tuple[ReplicaBlock, ...], list[WhaleError]]:
    """The blocks, and the faults of all of them.

    Args:
        data: a list of mappings, or blocks read before.
        where: each value's place.
        keys: of the section ``pipeline``, by their names in it.
        checked: a value of a key in the key's own type, or a `ConfigError`; takes the key, the value and its place.
    """
    if isinstance(data, tuple) and all(isinstance(block, ReplicaBlock) for block in data):
        return data, []
    if not isinstance(data, list) or not data:
        return (), [ConfigError(f"{REPLICAS} is a list of blocks, one per replica ({data!r} is not)", where=where())]
    blocks: list[ReplicaBlock] = []
    faults: list[WhaleError] = []
    for number, block in enumerate(data):
        if not isinstance(block, Mapping):
            faults.append(ConfigError(f"a block of {REPLICAS} is made of 'key: value' lines ({block!r} is not)", where=where(number)))
            continue
        values: dict[str, Any] = {}
        for name, value in block.items():
            try:
                values[name] = _value(name, value, where(number, name), keys, checked)
            except ConfigError as fault:
                faults.append(fault)
        own = {name: values.pop(name) for name in ("devices", *_COUNTS) if name in values}
        blocks.append(ReplicaBlock(**own, pipeline=tuple((name, values[name]) for name in keys if name in values)))
    faults += _together(blocks, where) if not faults else []
    return tuple(blocks), faults


def _value(name: object, value: object, place: object, keys: Mapping[str, Key], checked: Callable[[Key, object, object], object]) -> object:
    if name == "devices":
        return _devices(value, place)
    found = _COUNTS.get(str(name)) or keys.get(str(name))
    if found is None:
        known = ("devices", *_COUNTS, *keys)
        close = nearest(str(name), known)
        hint = f"did you mean {close!r}?" if close else f"keys of a block: {', '.join(known)}"
        raise ConfigError(f"unknown key {name!r} in a block of {REPLICAS}", where=place, hint=hint)
    return checked(found, value, place)


def _devices(value: object, place: object) -> tuple[str, ...] | int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ConfigError(f"{REPLICAS}.devices takes names of devices, or a whole number at least 1 ({value!r} is not)", where=place)


def _together(blocks: list[ReplicaBlock], where: Place) -> Iterator[WhaleError]:
    """Rows are stated by all blocks or by none; a device is named once."""
    stated = [number for number, block in enumerate(blocks) if block.rows is not None]
    if stated and len(stated) < len(blocks):
        silent = [str(number) for number in range(len(blocks)) if number not in stated]
        yield ConfigError(
            f"{REPLICAS}.rows is stated for all replicas or for none (stated: {', '.join(map(str, stated))}, not: {', '.join(silent)})",
            where=where(stated[0], "rows"),
        )
    first: dict[str, int] = {}
    for number, block in enumerate(blocks):
        for name in block.devices if isinstance(block.devices, tuple) else ():
            if name in first:
                message = f"a device belongs to one replica ({name}: to {first[name]} and {number})"
                if first[name] == number:
                    message = f"a replica has each of its devices once ({name}: twice in replica {number})"
                yield ConfigError(message, where=where(number, "devices"))
            first.setdefault(name, number)
