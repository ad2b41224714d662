"""``whale simulate --against``: two plans of a model side by side, or its plans on two clusters or by two recipes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import gcd
from pathlib import Path
from typing import Literal

from whale.cli.planned import Planned, planned
from whale.cli.tables import print_table
from whale.config import ReplicaBlock, StageBlock, read_yaml
from whale.config.settings import is_of_block, is_section
from whale.config.stages import OpRange, show_range
from whale.errors import ConfigError
from whale.ir.plan import Replica, describe_shards
from whale.planning.written import written_replicas
from whale.search.objective import format_cost
from whale.units import format_bytes, format_seconds

NONE = "-"

Row = tuple[str, str, str]
"""What differs, and how it is in both plans."""


def compare(arguments: argparse.Namespace) -> None:
    """Plans with a command line's own files, A, and with those of ``--against`` in their place, B; prints the differences."""
    a = planned(arguments)
    b = planned(argparse.Namespace(**vars(arguments) | {"report": None} | _in_place(arguments.against)), like=a)
    figures, found, is_same = dict(_figures(a, b)), list(differences(a, b)), _written(a) == _written(b)
    if arguments.json:
        told = {name: {"a": one, "b": other} for name, (one, other) in figures.items()}
        named = [dict(zip(("replica", "what", "a", "b"), row, strict=True)) for row in found]
        print(json.dumps({"figures": told, "differences": named, "same": is_same}, indent=1))
        return
    rows = [(name, _shown(name, one), _shown(name, other), f"{other / one:.3f} x" if one else "") for name, (one, other) in figures.items()]
    print_table(f"A: as given; B: against {', '.join(arguments.against)}", ("figure", "A", "B", "B / A"), rows, ("A", "B", "B / A"))
    if found:
        print_table("what differs", ("replica", "what", "A", "B"), found)
    elif is_same:
        print("the plans are the same")
    else:
        print("the plans differ in what their cuts leave whole or send in parts: whale plan ... --output plan.yaml writes all of it")


def _in_place(paths: Sequence[str]) -> dict[str, str]:
    """Files that replace a command line's own, by kind; a ConfigError where two are of one kind."""
    found: dict[str, str] = {}
    for path in paths:
        kind = kind_of(path)
        if kind in found:
            raise ConfigError(f"--against names two files of one kind ({kind}): {found[kind]} and {path}", hint="name one of each kind")
        found[kind] = path
    return found


def differences(a: Planned, b: Planned) -> Iterator[tuple[str, str, str, str]]:
    """Replica, what differs there, and its value in both plans; replicas with the same differences, except in devices, once."""
    found: dict[tuple[Row, ...], list[tuple[int, list[Row]]]] = {}
    facts = ([dict(each) for each in _all_facts(own)] for own in (a, b))
    for index, (one, other) in enumerate(zip_longest(*facts, fillvalue=dict[str, str]())):
        differing = [(what, one.get(what, NONE), other.get(what, NONE)) for what in one | other if one.get(what) != other.get(what)]
        found.setdefault(tuple(row for row in differing if not row[0].endswith("devices")), []).append((index, differing))
    for same in found.values():
        first, rows = same[0]
        name = str(first) + (f" +{len(same) - 1}" if len(same) > 1 else "")
        yield from ((name, *row) for row in rows)


def _all_facts(found: Planned) -> Iterator[Iterator[tuple[str, str]]]:
    """`_facts` of every replica."""
    rows = found.plan.all_micro_batch_rows(found.plan.planned_rows)
    for replica, block, own in zip(found.plan.replicas, _written(found), rows, strict=True):
        yield _facts(found, replica, block, [stop - start for start, stop in own])


def _facts(found: Planned, replica: Replica, block: ReplicaBlock, sizes: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Facts of a replica, by name; ``block`` is its part of a written plan, ``sizes`` the rows of its micro-batches."""
    yield "schedule", replica.pipeline.order
    yield "rounds", NONE if found.plan.rounds is None else str(found.plan.rounds)
    if replica.pipeline.num_chunks > 1:
        size = replica.pipeline.group_size
        yield "chunks", f"{replica.pipeline.num_chunks} per device" + ("" if size is None else f", group size {size}")
    yield "rows", str(sum(sizes))
    yield "row weight", str(block.rows)
    for stage, own in zip(replica.stages, block.stages, strict=True):
        name = f"stage {stage.index}"
        yield f"{name} devices", " ".join(own.devices)
        yield f"{name} ops", f"{_runs(own.ops)} ({len(stage.ops)})"
        yield f"{name} rows", " ".join(map(str, stage.rows(sizes[0])))
        yield f"{name} row weights", ":".join(map(str, own.rows))
        if stage.shards:
            yield f"{name} cuts", f"groups of {stage.split}: {describe_shards(stage.shards)}"
        if own.recompute:
            yield f"{name} recomputed", f"{_runs(own.recompute)} ({sum(map(len, stage.recomputed))})"
        if own.halves:
            yield f"{name} rows computed", "in two halves, alternately"
    for edge in replica.edges:
        yield f"stage {edge.source} -> stage {edge.target}", ", ".join(edge.tensors)


def _runs(runs: Iterable[OpRange]) -> str:
    return ", ".join(map(show_range, runs))


def _written(found: Planned) -> tuple[ReplicaBlock, ...]:
    """What a written plan says of each replica, with weights in their smallest numbers."""
    common = gcd(*(replica.share for replica in found.plan.replicas))
    blocks = zip(found.plan.replicas, written_replicas(found.plan, found.graph), strict=True)
    return tuple(replace(own, rows=replica.share // common, stages=tuple(map(_reduced, own.stages))) for replica, own in blocks)


def _reduced(stage: StageBlock) -> StageBlock:
    return replace(stage, rows=tuple(weight // gcd(*stage.rows) for weight in stage.rows))


def _figures(a: Planned, b: Planned) -> Iterator[tuple[str, tuple[float, float]]]:
    yield "step_seconds", (a.step.step_seconds, b.step.step_seconds)
    yield "peak_bytes", (a.fullest_bytes, b.fullest_bytes)
    costs = a.cost_per_sample, b.cost_per_sample
    if costs[0] is not None and costs[1] is not None:
        yield "cost_per_sample", (costs[0], costs[1])
    yield "devices", (len(a.plan.devices), len(b.plan.devices))
    yield "replicas", (len(a.plan.replicas), len(b.plan.replicas))


def _shown(name: str, value: float) -> str:
    forms = {"step_seconds": format_seconds, "peak_bytes": lambda size: format_bytes(round(size)), "cost_per_sample": format_cost}
    return forms[name](value) if name in forms else str(value)


def kind_of(path: str) -> Literal["plan", "cluster", "recipe"]:
    """The kind of a file: a cluster has hosts, a written plan the keys of its blocks, a recipe sections (or misspelt ones)."""
    if Path(path).suffix == ".json":
        return "plan"
    data = read_yaml(path).data
    keys = list(data) if isinstance(data, dict) else []
    if "hosts" in keys:
        return "cluster"
    own, shared = {key for key in keys if is_section(key)}, {key for key in keys if is_of_block(key)}  # recompute is of both
    return "plan" if shared - own and not own - shared else "recipe"
