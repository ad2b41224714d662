"""What passes ask of the estimate: the cost of a stage on each of its devices, and the figures of the finished plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whale.errors import OutOfMemory
from whale.estimate import Line, StepEstimate, edge_line, estimate_with
from whale.estimate.costs.line import Floats, Started
from whale.estimate.memory.memory import optimizer_bytes
from whale.estimate.memory.passes import BridgedTensor
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.part import NOTHING, Part, Recompute
from whale.estimate.prices.prices import PartCost, Prices
from whale.hardware import half_types
from whale.ir.cluster import Cluster
from whale.ir.graph import DTYPE_BYTES
from whale.ir.plan import Choice, Estimate, Plan, Replica, Stage, TaskGraph, brought_back, devices_of
from whale.planning.structure.stages import find_batch_axes
from whale.sharding.keepers import keeper_groups, sync_groups
from whale.sharding.parameters import parameter_shardings
from whale.units import format_bytes, format_seconds

MAX_ROUNDS = 3
"""Attempts with less where what was brought back does not fit; 2 or 6: no step of the questions of examples/benchmarks/constants.py
differs.
"""


def bare_plan(prices: Prices, replicas: tuple[Replica, ...], graphs: tuple[TaskGraph, ...], num_rows: int, idle: tuple[str, ...]) -> Plan:
    """The plan of replicas, without figures and reasons."""
    used = devices_of(replicas)
    plan = Plan(
        model=prices.graph.fingerprint,
        cluster=prices.cluster.name,
        devices=used,
        idle_devices=idle,
        task_graphs=graphs,
        replicas=replicas,
        batch_axes=find_batch_axes(prices.graph, replicas, prices),
        planned_rows=num_rows,
        parameter_states=prices.states,
        device_models=prices.cluster.models_of(used),
        half_types=half_types(prices.graph, prices.cluster, used),
    )
    if prices.costs.rounds is not None:
        plan = _in_rounds(plan, prices)
    return replace(plan, keeper_groups=_on_hosts(plan, prices)) if prices.costs.zero and prices.costs.zero_within == "host" else plan


def _in_rounds(plan: Plan, prices: Prices) -> Plan:
    """The plan with hosts that step on their own, where it has replicas on several; each keeps a copy of what is sharded."""
    costs = prices.costs
    groups = sync_groups(plan, _hosts(plan, prices))
    if not groups:
        is_one = len(set(_hosts(plan, prices))) == 1
        why = "all devices of the plan are on one host" if is_one else "replicas connect all hosts of the plan"
        told = Choice("rounds", "steps of hosts", "none: gradients are summed over all devices in each step", bound=why)
        return replace(plan, choices=(*plan.choices, told))
    assert costs.rounds is not None, "rounds are asked for"
    found = replace(plan, rounds=replace(costs.rounds, groups=groups), keeper_groups=groups if costs.zero else ())
    told = Choice("rounds", "steps of hosts", found.describe_sync(), bound="communication.sync_steps")
    return replace(found, choices=(*plan.choices, told))


def _hosts(plan: Plan, prices: Prices) -> list[str]:
    return [prices.cluster.by_name[device].host for device in plan.devices]


def _on_hosts(plan: Plan, prices: Prices) -> tuple[int, ...]:
    return keeper_groups(plan, _hosts(plan, prices))


def with_estimate(plan: Plan, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with the time of its step and the figures of its stages.

    Where state is sharded and equal parts do not fit, parts follow free memory. Each host keeps a copy where that is open, fits and is
    faster. With offloading as needed, the plan offloads all of it first, and then brings back what fits.
    """
    found = _with_shares(plan, prices)
    if prices.costs.zero and prices.costs.zero_within == "auto":
        found = _with_copies(*found, prices)
    if prices.costs.brings_back:
        found = _with_less_on_hosts(*found, prices)
    return with_figures(*found), found[1]


def _with_shares(plan: Plan, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with keepers, and its estimate."""
    step = estimate_with(prices, plan)
    if prices.costs.zero and not _fits(step):
        plan = replace(plan, keeper_shares=_by_free_memory(plan, step))
        step = estimate_with(prices, plan)
    return plan, step


def _fits(step: StepEstimate) -> bool:
    return all(each.peak.total <= each.capacity for each in step.devices)


def host_faults(step: StepEstimate, cluster: Cluster) -> Iterator[OutOfMemory]:
    """Hosts whose memory a plan exceeds."""
    known, needed, copies = {host.name: host.memory for host in cluster.hosts}, dict[str, float](), step.redundancy
    parts: dict[str, str] = {}
    for each in step.devices:
        for device in each.devices:
            host = cluster.by_name[device].host
            needed[host] = needed.get(host, 0.0) + each.on_host
    for host, copied, left in copies.host_bytes if copies is not None else ():
        needed[host] = needed.get(host, 0.0) + copied + left
        parts[host] = f" (copies of the state: {format_bytes(copied)}; what is left of it at a fault: {format_bytes(left)})"
    for name, num_bytes in needed.items():
        memory = known[name]
        if memory is not None and num_bytes > memory:
            yield OutOfMemory(
                f"out of memory on host {name}: the plan needs {format_bytes(round(num_bytes))}{parts.get(name, '')}, "
                f"{format_bytes(memory)} usable",
                hint="set memory.offload: none, memory.zero_within: all, memory.redundancy: 0, use fewer devices of this host, or state "
                "the host's memory in the cluster file",
            )


def _with_copies(plan: Plan, step: StepEstimate, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with a copy of the sharded state on each host, if that fits and is faster."""
    groups = _on_hosts(plan, prices)
    if not groups or groups == plan.keeper_groups or not _fits(step):  # copies take no less memory
        return plan, step
    other, found = _with_shares(replace(plan, keeper_groups=groups, keeper_shares=()), prices)
    all_of_them, each_host = "all devices keep one copy of it", "each host keeps a copy of it"
    fits = _fits(found) and not any(host_faults(found, prices.cluster))
    seconds = f"{format_seconds(found.step_seconds)} per step" if fits else "does not fit"
    if fits and found.step_seconds < step.step_seconds:
        choice = _kept(each_host, found, f"{all_of_them}: {format_seconds(step.step_seconds)} per step")
        return replace(other, choices=(*plan.choices, choice)), found
    return replace(plan, choices=(*plan.choices, _kept(all_of_them, step, f"{each_host}: {seconds}"))), step


def _kept(decision: str, step: StepEstimate, runner_up: str) -> Choice:
    return Choice("memory", "sharded state", decision, cost=f"{format_seconds(step.step_seconds)} per step", runner_up=runner_up)


def _with_less_on_hosts(plan: Plan, step: StepEstimate, prices: Prices) -> tuple[Plan, StepEstimate]:
    """The plan with as much back on devices as fits; unchanged where it does not fit itself.

    First what ops read, then optimizer state, the largest parameters first; activations stage by stage.
    """
    for compute_only in (True, False):
        plan, step = _with_less_state(plan, step, prices, compute_only=compute_only)
    for index in sorted({stage.index for replica in plan.replicas for stage in replica.stages if stage.offloads}):
        other = replace(plan, replicas=tuple(_with_activations_back(replica, index) for replica in plan.replicas))
        found = estimate_with(prices, other)
        if _fits(found):
            plan, step = other, found
    return plan, step


def _with_activations_back(replica: Replica, index: int) -> Replica:
    """The replica with one stage's activations on its devices."""

    def back(stage: Stage) -> Stage:
        return replace(stage, program=tuple(replace(segment, offload=False) for segment in stage.program))

    return replace(replica, stages=tuple(back(stage) if stage.index == index else stage for stage in replica.stages))


def _with_less_state(plan: Plan, step: StepEstimate, prices: Prices, *, compute_only: bool) -> tuple[Plan, StepEstimate]:
    """The plan with as many parameters back on devices as fit: what ops read (`compute_only`), or optimizer state."""
    free = [round(each.capacity - each.peak.total) for each in map(step.of, plan.devices)]
    num_bytes = _bytes_on_hosts(plan, prices, compute_only=compute_only) if prices.training and min(free) >= 0 else {}
    for _ in range(MAX_ROUNDS):
        back, left = list[str](), [*free]
        for name, needed in num_bytes.items():
            if all(own <= left[rank] for rank, own in needed.items()):
                back.append(name)
                for rank, own in needed.items():
                    left[rank] -= own
        if not back:
            break
        other = replace(plan, parameter_states=brought_back(plan.parameter_states, frozenset(back), compute_only=compute_only))
        found = estimate_with(prices, other)
        short = [max(0, round(each.peak.total) - each.capacity) for each in map(found.of, plan.devices)]
        if not any(short):
            return other, found
        free = [own - lacking for own, lacking in zip(free, short, strict=True)]
    return plan, step


def _bytes_on_hosts(plan: Plan, prices: Prices, *, compute_only: bool) -> dict[str, dict[int, int]]:
    """Per parameter that can come back, its bytes on each rank's device; the largest first."""
    there = [own for own in plan.parameter_states if (own.compute.home if compute_only else own.kept.home) == "host"]
    if not compute_only:  # what ops read is on the host only where it did not fit
        there = [own for own in there if own.compute.home == "device"]
    shardings = parameter_shardings(plan, prices.graph, prices.axes if plan.is_sharded else None)
    found: dict[str, dict[int, int]] = {}
    for state in brought_back(there, {name for own in there for name in own.parameters}):
        for name in state.parameters:
            held = shardings.kept(name).held
            elements = {region: shardings.num_elements(prices.graph, name, region) for region in held.values()}
            size = DTYPE_BYTES[state.compute.dtype]
            found[name] = {
                rank: elements[region] * size if compute_only else optimizer_bytes(state, elements[region]) for rank, region in held.items()
            }
    return dict(sorted(found.items(), key=lambda each: -max(each[1].values())))


def _by_free_memory(plan: Plan, step: StepEstimate) -> tuple[int, ...]:
    """Per rank, its weight in sharding state: the free memory besides all else, in thousandths of the most."""
    found = (step.of(device) for device in plan.devices)
    free = [max(0.0, each.capacity - each.peak.total + each.peak.optimizer) for each in found]
    return tuple(max(1, round(1000 * own / max(1.0, *free))) for own in free)


def with_figures(plan: Plan, step: StepEstimate) -> Plan:
    """The plan with the figures of an estimate."""
    known: dict[tuple[str, int], Estimate] = {}

    def estimate_of(stage: Stage, device: str) -> Estimate:
        found = step.of(device)
        key = found.devices[0], stage.index
        if key not in known:
            known[key] = found.of_stage(stage.index)
        return known[key]

    def with_estimates(stage: Stage) -> Stage:
        return replace(stage, estimates=tuple(estimate_of(stage, device) for device in stage.virtual_device.devices))

    replicas = tuple(replace(replica, stages=tuple(map(with_estimates, replica.stages))) for replica in plan.replicas)
    return replace(plan, replicas=replicas, step_seconds=step.step_seconds)


BESIDE = 1e-7
"""Weight of kernel time hidden behind the host: it balances divisions that take equally long, and no others. With 0 none of 22 plans
differs, but of three devices that all wait for the host, one of them twice as fast, that one gets 11 of 16 rows and the others 4 and 1, in
place of 8, 4 and 4.
"""


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """What one stage costs one device of its virtual device, by its rows of a micro-batch."""

    forward: Started  # computing, and the messages inside a split group
    backward: Started  # the same, with recomputation
    receive: Line  # seconds of waiting for messages, both ways
    part: PartCost  # bytes
    capacity: int  # bytes that a plan may use on the device

    @property
    def seconds(self) -> Line:
        """Without waiting for the host."""
        return self.forward.device + self.backward.device + self.receive

    def waiting(self, rows: Floats) -> Floats:
        """Seconds of waiting for the host, by rows."""
        found: Floats = np.zeros_like(rows)
        for each in (self.forward, self.backward):
            if each.host > each.device.fixed:
                found = found + replace(each, device=each.device * (1 - BESIDE)).waiting(rows)
        return found


def cost_alone(
    prices: Prices,
    part: Part,
    name: str,
    num_rows: float,
    recompute: Recompute = NOTHING,
    budget: Budget = ALL,
    *,
    waits: bool = False,
    forms: tuple[BridgedTensor, ...] = (),
) -> DeviceCost:
    """What a part costs a device, without messages; lines are about `num_rows` of a micro-batch, arguments as of `Prices.part`."""
    device = prices.cluster.by_name[name]
    forward, backward = prices.started(part, device, num_rows)
    repeated = prices.recomputing(part, recompute, device, num_rows)
    if prices.training and prices.waits_away(recompute):
        copies = prices.copying(device, prices.away(part, recompute.segments))
        forward, backward = forward + copies, backward + copies
    held = prices.part(part, num_rows, recompute, budget, waits=waits, forms=forms)
    return DeviceCost(forward, backward + repeated, Line(), held, prices.capacity(name, budget))


def received_line(prices: Prices, part: PartCost, devices: Sequence[Sequence[str]], stage: int, index: int) -> Line:
    """Seconds that a device of a stage waits for messages of other stages, both ways."""
    own, receive = devices[stage], Line()
    for source, payload, num_messages in part.sends:
        sender = devices[source][index * len(devices[source]) // len(own)]
        if sender != own[index]:
            receive = receive + edge_line(prices.link(sender, own[index]), payload, num_messages)
    return receive
