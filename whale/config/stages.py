"""The stages of a replica that is written in full: devices, ops, rows, cuts and recomputation of each.

stages:
  - devices: [big/0, big/1]
    ops: [embedding .. add_3]          runs of the model's ops, as `whale capture --ops` names them
    split: 2                           devices of each split group; default 1
    rows: [3]                          weight of each split group in the rows of a micro-batch; equal by default
    cut: {heads: [2, 2], hidden: {sizes: [24, 8], whole_in: [gelu]}}
    recompute: [layer_norm .. add_1]   recomputed runs of its ops, or `full`: all of it, by R actions
    halves: false                      whether its rows are computed in two halves that take turns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from whale.config.keys import nearest
from whale.errors import ConfigError, WhaleError
from whale.ir.plan import Shard

STAGES = "stages"

OpRange = tuple[str, str]  # the first and the last of consecutive ops

FULL = "full"  # in place of runs of ops: the whole stage

BETWEEN = " .. "  # separates the ends of a run


@dataclass(frozen=True, slots=True)
class StageBlock:
    """One stage."""

    devices: tuple[str, ...]  # names, in order
    ops: tuple[OpRange, ...]  # runs of calls, in the order of the graph
    split: int = 1  # devices of each split group
    rows: tuple[int, ...] = ()  # per split group, its weight in the rows of a micro-batch; empty for equal ones
    cut: tuple[Shard, ...] = ()  # what is divided over the devices of each group
    recompute: tuple[OpRange, ...] = ()  # recomputed runs of its ops
    halves: bool = False  # whether its rows are computed in two halves that take turns
    recomputes_whole: bool = False  # whether all of it is recomputed, by R actions

    def as_data(self) -> dict[str, Any]:
        """In the form of a written plan."""
        own = {
            "devices": list(self.devices),
            "ops": [show_range(run) for run in self.ops],
            "split": self.split if self.split > 1 else None,
            "rows": list(self.rows),
            "cut": {shard.axis: _shard_data(shard) for shard in self.cut},
            "recompute": FULL if self.recomputes_whole else [show_range(run) for run in self.recompute],
            "halves": self.halves or None,
        }
        return {name: value for name, value in own.items() if value}


def show_range(run: OpRange) -> str:
    """A run as text: ``linear .. add_3``, or the name of its only op."""
    return run[0] if run[0] == run[1] else BETWEEN.join(run)


def _shard_data(shard: Shard) -> Any:
    lists = {name: list(getattr(shard, name)) for name in _LISTS if getattr(shard, name)}
    return {"sizes": list(shard.sizes)} | lists if lists else list(shard.sizes)


_LISTS = tuple(field.name for field in fields(Shard) if field.name not in ("axis", "sizes"))


def read_stages(value: object, place: Callable[..., object]) -> tuple[tuple[StageBlock, ...], list[WhaleError]]:
    """The stages in the value of ``stages``, and the faults of all of them; `place` gives a value's line by its path."""
    if isinstance(value, tuple) and all(isinstance(stage, StageBlock) for stage in value):
        return value, []
    if not isinstance(value, list) or not value:
        return (), [ConfigError(f"{STAGES}: {value!r} is not a list of stages", where=place())]
    stages, faults = [], list[WhaleError]()
    for number, stage in enumerate(value):
        wrong = list(_unknown(stage, number, place))
        known: dict[str, Any] = {}
        for name, content in stage.items() if isinstance(stage, Mapping) else ():
            if name in _READERS:
                try:
                    known[name] = _READERS[name](content)
                except ValueError as error:
                    wrong.append(ConfigError(f"{STAGES}.{name}: {content!r} is not {error}", where=place(number, name)))
        faults += wrong
        if not wrong:
            if known.get("recompute") == FULL:
                known |= {"recompute": (), "recomputes_whole": True}
            stages.append(StageBlock(**known))
    return tuple(stages), faults


def _unknown(stage: object, number: int, place: Callable[..., object]) -> Iterator[WhaleError]:
    if not isinstance(stage, Mapping):
        yield ConfigError(f"a stage: {stage!r} is not 'key: value' lines", where=place(number))
        return
    for name in stage:
        if name not in _READERS:
            close = nearest(str(name), _READERS)
            hint = f"did you mean {close!r}?" if close else f"keys of a stage: {', '.join(_READERS)}"
            yield ConfigError(f"unknown key {name!r} in a stage", where=place(number, name), hint=hint)
    missing = [name for name in ("devices", "ops") if name not in stage]
    if missing:
        yield ConfigError(f"stage {number} lacks {' and '.join(missing)}", where=place(number))


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError("a list of names")


def _runs(value: object) -> tuple[OpRange, ...]:
    try:
        runs = [tuple(text.split(BETWEEN)) for text in _texts(value)]
    except ValueError:
        runs = [()]
    if any(len(run) not in (1, 2) for run in runs):
        raise ValueError(f"a list of ops, and of runs as 'first{BETWEEN}last'")
    return tuple((run[0], run[-1]) for run in runs)


def _recomputed(value: object) -> tuple[OpRange, ...] | str:
    try:
        return FULL if value == FULL else _runs(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {FULL}") from None


def _sizes(value: object, least: int = 1) -> tuple[int, ...]:
    if isinstance(value, list) and value and all(type(each) is int and each >= least for each in value):
        return tuple(value)
    raise ValueError(f"a list of whole numbers at least {least}")


def _width(value: object) -> int:
    if type(value) is int and value >= 1:
        return value
    raise ValueError("a whole number at least 1")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _cut(value: object) -> tuple[Shard, ...]:
    if not isinstance(value, Mapping):
        raise ValueError("axes with the sizes of their parts")
    return tuple(_shard(str(axis), content) for axis, content in value.items())


def _shard(axis: str, content: object) -> Shard:
    try:
        if not isinstance(content, Mapping):
            return Shard(axis, _sizes(content))
        lists = {name: _texts(names) for name, names in content.items() if name != "sizes"}
        if lists.keys() <= set(_LISTS):
            return Shard(axis, _sizes(content.get("sizes")), **lists)
    except ValueError:
        pass
    raise ValueError(f"axes, each with the sizes of its parts, or with sizes, {', '.join(_LISTS)} (of {axis})")


# a `ValueError` says what a key takes
_READERS: Mapping[str, Callable[[Any], object]] = {
    "devices": _texts,
    "ops": _runs,
    "split": _width,
    "rows": _sizes,
    "cut": _cut,
    "recompute": _recomputed,
    "halves": _flag,
}
