"""Replicas as a user writes them: the blocks of ``replicas``, and ``plan``, which may fix anything and leaves the rest to the planner.

plan:
  split: 8                         any key of a block, for all its replicas
  num_stages: 4
  replicas: 16                     how many, ``all`` that the devices give (the default), or blocks

replicas:
  - devices: [host0/0, host0/1]    a count, or the names
    num_stages: 2                  any key of the section `pipeline`, for this replica alone
  - devices: 2
    split: 2                       devices of each split group
    rows: 12                       weight in the rows of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whale.config.keys import Key, Recomputation, at_least, nearest
from whale.config.stages import STAGES, StageBlock, read_stages
from whale.errors import ConfigError, WhaleError

REPLICAS, PLAN, MODEL = "replicas", "plan", "model"

Place = Callable[..., object]  # the line of a value, by its path: number of the block, key

ALL, EVEN = "all", "even"

# the keys of a replica whose stages are written in full
_WITH_STAGES = (STAGES, MODEL, "rows", "recompute", "schedule", "num_micro_batch", "num_chunks", "group_size", "receive_early")

RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """One replica as the user wants it, or several equal ones."""

    # names, of each virtual device in order, or a count; None for as many as its stages and split groups take
    devices: tuple[str, ...] | tuple[tuple[str, ...], ...] | int | None = None
    split: int | None = None  # devices of each split group; None: one, or what the scopes say
    rows: int | None = None  # its weight in the rows of the batch; None: balanced
    pipeline: tuple[tuple[str, Any], ...] = ()  # its own keys of the section ``pipeline`` with their values
    count: int | None = 1  # of replicas; None for as many as the remaining devices give
    micro_batch_rows: int | None = None  # rows of a micro-batch, from which their number follows; None: the number is stated
    blocks: tuple[int, ...] | str | None = None  # number of the model's repeated blocks in each stage, or ``even``; None: the planner cuts
    axes: tuple[str, ...] | None = None  # cut in split stages, wherever ops may work along them; None: the planner chooses
    more_axes: tuple[str, ...] = ()  # that the planner may cut in addition to `axes`
    recompute: Recomputation | None = None  # as ``recompute.policy``; None: as that says
    stages: tuple[StageBlock, ...] = ()  # of a replica that is written in full; empty if the planner makes them
    model: str | None = None  # fingerprint of the model of `stages`; None: for any whose ops have the names
    place: Place | None = field(default=None, compare=False, repr=False)  # gives the line of each key, by name

    @property
    def names(self) -> tuple[str, ...]:
        """The devices that are named."""
        found = self.devices if isinstance(self.devices, tuple) else ()
        return tuple(name for each in found for name in ((each,) if isinstance(each, str) else each))

    @property
    def placed(self) -> tuple[tuple[str, ...], ...] | None:
        """The devices of each virtual device; None if the planner places them."""
        found = self.devices if isinstance(self.devices, tuple) else ()
        return tuple(each for each in found if not isinstance(each, str)) or None

    def at(self, *way: str | int) -> object:
        """The user's line of a key, or of a value inside; None if unknown."""
        return None if self.place is None else self.place(*way)

    @contextmanager
    def placed_here(self) -> Iterator[None]:
        """Gives faults without a line that of the block."""
        try:
            yield
        except WhaleError as fault:
            fault.where = self.at() if fault.where is None else fault.where
            raise

    def as_data(self) -> dict[str, Any]:
        """In the form of a recipe."""
        found: dict[str, Any] = {}
        for name in (*_READERS, RECOMPUTE):
            value = getattr(self, name)
            if name == "count":
                value = {1: None, None: ALL}.get(value, value)
            if name == RECOMPUTE and isinstance(value, tuple):
                value = dict(value)
            if value is not None and value != ():
                found[name] = [list(each) if isinstance(each, tuple) else each for each in value] if isinstance(value, tuple) else value
        stages = {STAGES: [stage.as_data() for stage in self.stages]} if self.stages else {}
        return found | dict(self.pipeline) | stages


def _count_key(name: str) -> Key:
    return Key(f"{REPLICAS}.{name}", "int", False, None, "", at_least(1), (), (), (), None)


def _axes(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError("a list of axes")


def _devices(value: object) -> tuple[str, ...] | tuple[tuple[str, ...], ...] | int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    lists = [own for own in value if isinstance(own, (list, tuple)) and own] if isinstance(value, (list, tuple)) else []
    if lists and len(lists) == len(value) and all(isinstance(each, str) for own in lists for each in own):  # type: ignore[arg-type]
        return tuple(tuple(own) for own in lists)
    raise ValueError("names of devices, lists of them (of each stage in order), or a whole number at least 1")


def _count(value: object) -> int | None:
    if value is None or value == ALL:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"a whole number at least 1, or {ALL}")


def _blocks(value: object) -> tuple[int, ...] | str:
    if value == EVEN:
        return EVEN
    if isinstance(value, (list, tuple)) and value and all(type(each) is int and each >= 0 for each in value):
        return tuple(value)
    raise ValueError(f"a list with the number of blocks of each stage, or {EVEN}")


def _text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("text")


# of the keys of a block that are no configuration keys; a `ValueError` says what a key takes
_READERS: Mapping[str, Key | Callable[[object], object]] = {
    "devices": _devices,
    "split": _count_key("split"),
    "rows": _count_key("rows"),
    "count": _count,
    "micro_batch_rows": _count_key("micro_batch_rows"),
    "blocks": _blocks,
    "axes": _axes,
    "more_axes": _axes,
    MODEL: _text,
}


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads blocks."""

    keys: Mapping[str, Key]  # of the section ``pipeline``, by their names in it, and ``recompute`` for ``recompute.policy``
    # takes a key, a value and its line, and gives the value in the key's own type, or a `ConfigError`
    checked: Callable[[Key, object, object], object]

    def replicas(self, data: object, where: Place) -> tuple[tuple[ReplicaBlock, ...], list[WhaleError]]:
        """The blocks in a list of mappings (or read before; none where it is null), and the faults of all of them."""
        if data is None:
            return (), []
        if isinstance(data, tuple) and all(isinstance(block, ReplicaBlock) for block in data):
            return data, []
        if not isinstance(data, list) or not data:
            return (), [ConfigError(f"{REPLICAS}: {data!r} is not a list of blocks, one per replica", where=where())]
        return self._blocks(data, where)

    def plan(self, data: object, where: Place) -> tuple[tuple[ReplicaBlock, ...], list[WhaleError]]:
        """The blocks of a written plan: its own keys apply to each block that does not override them."""
        if not isinstance(data, Mapping):
            found = "the file is empty" if data is None else repr(data)
            return (), [ConfigError(f"a plan needs 'key: value' lines: {found}", where=where())]
        common = {name: value for name, value in data.items() if name != REPLICAS}
        asked = data.get(REPLICAS, ALL)
        if not isinstance(asked, list):
            block = common | {"count": asked}
            return self._blocks([block], lambda *way: where(*[REPLICAS if key == "count" else key for key in way[1:]]))
        if not asked:
            return (), [ConfigError(f"{REPLICAS}: [] is not a number, {ALL!r}, or a list of at least one block", where=where(REPLICAS))]
        own = [block if isinstance(block, Mapping) else {} for block in asked]
        faults: list[WhaleError] = [
            ConfigError(f"a block of {REPLICAS}: {block!r} is not 'key: value' lines", where=where(REPLICAS, number))
            for number, block in enumerate(asked)
            if not isinstance(block, Mapping)
        ]

        def place(*way: Any) -> object:
            return where(REPLICAS, *way) if len(way) < 2 or way[1] in own[way[0]] else where(*way[1:])

        blocks, wrong = self._blocks([common | dict(block) for block in own], place)
        return blocks, [*faults, *wrong]

    def _blocks(self, data: list[Any], where: Place) -> tuple[tuple[ReplicaBlock, ...], list[WhaleError]]:
        blocks: list[ReplicaBlock] = []
        faults: list[WhaleError] = []
        for number, block in enumerate(data):
            if not isinstance(block, Mapping):
                faults.append(ConfigError(f"a block of {REPLICAS}: {block!r} is not 'key: value' lines", where=where(number)))
                continue
            values: dict[str, Any] = {}
            for name, value in block.items():
                if name == STAGES:
                    values[name], wrong = read_stages(value, partial(where, number, name))
                    faults += wrong
                    continue
                try:
                    values[name] = self._value(name, value, where(number, name))
                except ConfigError as fault:
                    faults.append(fault)
            own = {name: values.pop(name) for name in (*_READERS, RECOMPUTE, STAGES) if name in values}
            pipeline = tuple((name, values[name]) for name in self.keys if name in values)
            blocks.append(ReplicaBlock(**own, pipeline=pipeline, place=partial(where, number)))
        faults += _together(blocks, where) if not faults else []
        return tuple(blocks), faults

    @property
    def names(self) -> tuple[str, ...]:
        """All keys of a block."""
        return tuple(dict.fromkeys((*_READERS, *self.keys, STAGES)))

    def _value(self, name: object, value: object, place: object) -> object:
        found = self.keys.get(str(name)) or _READERS.get(str(name))
        if found is None:
            close = nearest(str(name), self.names)
            hint = f"did you mean {close!r}?" if close else f"keys of a block: {', '.join(self.names)}"
            raise ConfigError(f"unknown key {name!r} in a block of {REPLICAS}", where=place, hint=hint)
        if isinstance(found, Key):
            return self.checked(found, value, place)
        try:
            return found(value)
        except ValueError as error:
            raise ConfigError(f"{REPLICAS}.{name}: {value!r} is not {error}", where=place) from None


def _together(blocks: list[ReplicaBlock], where: Place) -> Iterator[WhaleError]:
    """Rows are stated by all blocks or by none; a device is named once; a block must not contradict itself."""
    stated = [number for number, block in enumerate(blocks) if block.rows is not None]
    if stated and len(stated) < len(blocks):
        silent = [str(number) for number in range(len(blocks)) if number not in stated]
        yield ConfigError(
            f"{REPLICAS}.rows is given for replicas {', '.join(map(str, stated))} and not for {', '.join(silent)}; give it for all or "
            "for none",
            where=where(stated[0], "rows"),
        )
    first: dict[str, int] = {}
    for number, block in enumerate(blocks):
        yield from _contradictions(block, number, where)
        for name in block.names:
            if name in first:
                message = f"device {name} is in replicas {first[name]} and {number}; it can be in one"
                if first[name] == number:
                    message = f"device {name} is listed twice in replica {number}"
                yield ConfigError(message, where=where(number, "devices"))
            first.setdefault(name, number)


def _contradictions(block: ReplicaBlock, number: int, where: Place) -> Iterator[WhaleError]:
    if block.model is not None and not block.stages:
        yield ConfigError(
            f"{MODEL} is given without {STAGES} (replica {number})",
            where=where(number, MODEL),
            hint=f"leave it out: without {STAGES} the planner cuts any model",
        )
    others = [name for name in block.as_data() if name not in _WITH_STAGES]
    if block.stages and others:
        yield ConfigError(
            f"{', '.join(others)} cannot be given together with {STAGES}, which fix them (replica {number})",
            where=where(number, others[0]),
            hint=f"keys that go with {STAGES}: {', '.join(_WITH_STAGES[1:])}",
        )
    if block.names and block.count != 1:
        count = ALL if block.count is None else block.count
        yield ConfigError(
            f"devices are named for {count} replicas (replica {number}, count: {count}); named devices make one",
            where=where(number, "devices"),
            hint="give a number of devices instead of names, or one replica: replicas: 1 where keys are given once for all, else count: 1",
        )
    if block.micro_batch_rows is not None and "num_micro_batch" in dict(block.pipeline):
        yield ConfigError(
            f"num_micro_batch and micro_batch_rows are both given (replica {number}); give one of them",
            where=where(number, "micro_batch_rows"),
        )
    if block.more_axes and block.axes is None:
        yield ConfigError(
            f"more_axes is given without axes (replica {number})",
            where=where(number, "more_axes"),
            hint="leave it out: without axes the planner may cut any",
        )
