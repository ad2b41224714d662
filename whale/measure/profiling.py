"""Measures a model on the ranks of this run: each distinct op once, and the whole model's passes, per kind of device.

Times of ranks of one kind are pooled (medians), and merged with an earlier profile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from whale.comm import World
from whale.errors import ClusterError
from whale.hardware import DeviceProfile
from whale.ir.cluster import Cluster, Device
from whale.ir.figure import Figure
from whale.ir.graph import ModelGraph, Op
from whale.ir.profile import KindProfile, OpTimes, Profile, model_fingerprint, signature
from whale.measure.devices import rank_profiles
from whale.measure.op_times import Inputs, OpRounds, PassRounds, time_op, time_passes
from whale.measure.samples import RoundTimer, own_time
from whale.units import counted

ROUND_SECONDS = 5e-3  # of an op: there are many, and the longer whole passes give their total
OPS_PER_REPORT = 20  # ops between two lines of progress
STEP = 4  # ratio of consecutive numbers of rows


def rows_to_measure(graph: ModelGraph) -> tuple[int, ...]:
    """Numbers of rows from one to the example's, ascending; the example's alone if the capture is for that only."""
    rows, found = graph.num_rows, [graph.num_rows]
    while graph.dynamic and rows > 1:
        rows = max(1, rows // STEP)
        found.append(rows)
    return tuple(reversed(found))


def distinct_ops(graph: ModelGraph) -> dict[str, Op]:
    """The first op of each signature, without sizes, views and items, which take no time of their own."""
    found: dict[str, Op] = {}
    for op in graph.ops:
        if op.kind == "call" and op.outputs and "view" not in op.tags and op.target != "operator.getitem":
            found.setdefault(signature(op, graph), op)
    return found


def own_kind(cluster: Cluster, profile: DeviceProfile, position: int) -> Device:
    """The kind of the cluster's device that a rank stands for: of its model, if possible on its host.

    Raises:
        ClusterError: the cluster has no such device.
    """
    alike = [device for device in cluster.devices if device.model == profile.model]
    if not alike:
        models = ", ".join(sorted({device.model for device in cluster.devices}))
        raise ClusterError(
            f"this device ({profile.model}) is not in cluster {cluster.name!r} ({models})",
            hint="whale probe --output C.yaml describes this machine",
        )
    here = [device for device in alike if device.host == profile.host] or alike
    return here[position % len(here)].kind


@dataclass(frozen=True)
class Known:
    """Earlier profiles."""

    profile: Profile | None  # as read; None if there is none
    again: bool  # whether to measure again anyway

    @property
    def model(self) -> str:
        return self.profile.model if self.profile is not None and not self.again else ""

    def of(self, kind: Device, rows: Sequence[int]) -> KindProfile:
        """Known times of a kind of device under this torch, at these rows."""
        found = self.profile.kinds if self.profile is not None and not self.again else ()
        alike = (each for each in found if each.device == kind and each.torch == torch.__version__ and each.rows == tuple(rows))
        return next(alike, KindProfile(kind, "", "", tuple(rows), ()))

    def others(self, model: str, kinds: Container[Device]) -> tuple[KindProfile, ...]:
        """Known times of the same model on other kinds of device."""
        if self.profile is None or self.profile.model != model:
            return ()
        return tuple(each for each in self.profile.kinds if each.device not in kinds)


def profile_model(
    world: World, cluster: Cluster, graph: ModelGraph, inputs: Inputs, known: Known, num_rounds: int, tell: Callable[[str], None]
) -> Profile:
    """Measures a model on all ranks; every rank calls it.

    Ops that an earlier profile has for the same device, torch and rows are not measured again; nor are passes of the same model.

    Args:
        world: this process among its peers.
        cluster: whose devices the ranks stand for.
        graph: the captured model.
        inputs: of its ops, on this rank's device.
        known: earlier measurements; equal on all ranks.
        num_rounds: samples of each thing.
        tell: is called with what is measured next.

    Returns:
        On every rank, the profile of the model on these and other devices.
    """
    rows, ops, model = rows_to_measure(graph), distinct_ops(graph), model_fingerprint(graph)
    if known.profile is not None and known.profile.model != model:
        tell(f"the profile in the file is of another model ({known.profile.model}); it is replaced by that of this model ({model})")
    kind = own_kind(cluster, rank_profiles(world)[world.rank], world.local_rank)
    kinds = [each for each in world.gather_objects(kind) if isinstance(each, Device)]
    before = {each: known.of(each, rows) for each in kinds}
    wanted = {name: op for name, op in ops.items() if not all(name in each.by_signature for each in before.values())}
    there = f"; {len(ops) - len(wanted)} are known" if len(wanted) < len(ops) else ""
    tell(f"{len(wanted)} of {len(ops)} distinct ops at {', '.join(map(str, rows))} rows{there}")
    is_known = known.model == model and all(each.forward for each in before.values())
    measured_rows = () if is_known and not wanted else rows
    own = RankTimes(
        kind, machine_name(world.device), *_timed(RoundTimer(world, num_rounds, ROUND_SECONDS), inputs, wanted, measured_rows, tell)
    )
    reports = [each for each in world.gather_objects(own) if isinstance(each, RankTimes)]
    measured = tuple(pooled_kind([each for each in reports if each.kind == one], before[one], tuple(ops), rows) for one in before)
    return Profile(model, (*measured, *known.others(model, before)))


def _timed(
    clock: RoundTimer, inputs: Inputs, wanted: Mapping[str, Op], rows: Sequence[int], tell: Callable[[str], None]
) -> tuple[dict[str, tuple[OpRounds, ...]], tuple[PassRounds, ...]]:
    """Ops, and the passes: a round before the ops, one after them, the others in between, since a core may be slow for some seconds.

    Ops are timed by the rank's own time, and stretched like the passes, which last long enough to show what wall time adds.
    """
    once, own = replace(clock, num_rounds=1), replace(clock, now=own_time(clock.world.device))
    if rows:
        tell("the whole model at these rows, before, between and after the ops")
    passes, ops = tuple(_passes(once, inputs, rows)), dict[str, tuple[OpRounds, ...]]()
    names, num_gaps = tuple(wanted), max(clock.num_rounds - 1, 1)
    for gap in range(num_gaps):
        for name in names[gap * len(names) // num_gaps : (gap + 1) * len(names) // num_gaps]:
            ops[name] = tuple(time_op(own, inputs, wanted[name], num_rows) for num_rows in rows)
            if len(ops) % OPS_PER_REPORT == 0:
                tell(f"{len(ops)} of {len(wanted)} ops are measured")
        if clock.num_rounds > 1:
            passes = tuple(map(PassRounds.joined, passes, _passes(once, inputs, rows)))
    stretch = passes[-1].stretch if passes else 1.0
    return {name: tuple(each.stretched(stretch) for each in rounds) for name, rounds in ops.items()}, passes


def _passes(clock: RoundTimer, inputs: Inputs, rows: Sequence[int]) -> Iterator[PassRounds]:
    return (time_passes(clock, inputs, num_rows) for num_rows in rows)


def machine_name(device: torch.device) -> str:
    """A device's own name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return f"CPU rank of {counted(torch.get_num_threads(), 'thread')}"


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank."""

    kind: Device  # of its device
    machine: str  # the device's own name
    ops: Mapping[str, tuple[OpRounds, ...]]  # by signature, per number of rows
    passes: tuple[PassRounds, ...]  # of the whole model, per number of rows; empty if known


def pooled_kind(ranks: Sequence[RankTimes], before: KindProfile, signatures: Iterable[str], rows: tuple[int, ...]) -> KindProfile:
    """The pooled times of ranks (at least one) of one kind.

    Args:
        ranks: their times.
        before: known times of the kind.
        signatures: the model's distinct ops.
        rows: that were measured.
    """
    first = ranks[0]
    ops = tuple(_times(name, [rank.ops[name] for rank in ranks]) if name in first.ops else before.by_signature[name] for name in signatures)
    forward, backward = (before.forward, before.backward) if not first.passes else _pass_figures([rank.passes for rank in ranks], rows)
    apart = before.apart if not first.passes else _apart([rank.passes for rank in ranks])
    return KindProfile(first.kind, first.machine, torch.__version__, rows, ops, forward, backward, apart)


def _times(name: str, ranks: Sequence[tuple[OpRounds, ...]]) -> OpTimes:
    reason = next((rounds.reason for rank in ranks for rounds in rank if rounds.reason), "")
    if reason:
        return OpTimes(name, reason=reason)
    forward = list(_figures(name, [[rounds.forward for rounds in rank] for rank in ranks]))
    backward = list(_figures(name, [[rounds.backward for rounds in rank] for rank in ranks]))
    spread = max(figure.spread for figure in (*forward, *backward))
    return OpTimes(name, tuple(figure.value for figure in forward), tuple(figure.value for figure in backward), round(spread, 3))


def _figures(name: str, ranks: Sequence[Sequence[Sequence[float]]]) -> Iterator[Figure]:
    """Per number of rows the figure of all ranks' rounds; none if nothing was timed."""
    for rounds in zip(*ranks, strict=True):
        samples = [seconds for own in rounds for seconds in own]
        if samples:
            yield Figure.of(name, "s", samples)


def _pass_figures(ranks: Sequence[tuple[PassRounds, ...]], rows: tuple[int, ...]) -> tuple[tuple[Figure, ...], tuple[Figure, ...]]:
    """Figures of the forward and of the backward pass; none if the model did not fit at some number of rows.

    None of the backward pass if both passes took no longer than the forward pass alone.
    """
    if any(not rounds.forward for rank in ranks for rounds in rank):
        return (), ()
    forward = [_pass("forward pass", num_rows, [rank[at].forward for rank in ranks]) for at, num_rows in enumerate(rows)]
    both = [_pass("forward and backward pass", num_rows, [rank[at].both for rank in ranks]) for at, num_rows in enumerate(rows)]
    backward = tuple(map(_rest, both, forward, rows))
    return tuple(forward), backward if all(figure.value > 0.0 for figure in backward) else ()


def _pass(name: str, num_rows: int, ranks: Sequence[Sequence[float]]) -> Figure:
    """Of each round the slowest rank: a step waits for it."""
    return Figure.of(f"{name}, {counted(num_rows, 'row')}", "s", [max(seconds) for seconds in zip(*ranks, strict=True)])


def _apart(ranks: Sequence[tuple[PassRounds, ...]]) -> tuple[float, ...]:
    """Extra seconds if weight gradients wait, per number of rows; none if none can.

    By the ranks' own time, stretched as ops are: it is less than waiting for a core adds to a pass.
    """
    found = []
    for each in zip(*ranks, strict=True):
        samples = [seconds * passes[-1].stretch for rounds, passes in zip(each, ranks, strict=True) for seconds in rounds.apart]
        found += [max(median(samples), 0.0)] if samples else []
    return tuple(found) if len(found) == len(ranks[0]) else ()


def _rest(both: Figure, forward: Figure, num_rows: int) -> Figure:
    """The backward pass: both passes without the forward pass; of noise alone it may be zero or less."""
    value, low, high = (seconds - forward.value for seconds in (both.value, both.low, both.high))
    return replace(both, name=f"backward pass, {counted(num_rows, 'row')}", value=value, low=low, high=high)
