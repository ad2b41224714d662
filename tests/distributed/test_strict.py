"""The laws where messages go by the rules of NCCL, and a control for each rule: it fails where it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from tests import strict
from tests.distributed import (
    test_bridges,
    test_copies_of_state,
    test_local_steps,
    test_overlap,
    test_precision,
    test_replan,
    test_scattering,
    test_schedules,
    test_second_owners,
    test_sparse_gradients,
    test_split,
    test_state_law,
    test_sums,
    test_unlike_replicas,
)
from tests.distributed.training import Case, run_case, train_rank, train_reference
from tests.distributed.world import World as Ranks
from tests.gpu import test_ranks_on_one_gpu
from tests.standin import DEVICE, StandIn, held, put
from tests.strict import BrokenRule, strict_network

Group = dist.ProcessGroup


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """Four ranks that send by the rules."""
    with Ranks(4, network="strict") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def on_device() -> Iterator[Ranks]:
    """The same with tensors of the stand-in device."""
    with Ranks(4, network="strict device") as ranks:
        yield ranks


# -- controls --------------------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype = torch.float32, size: int = 4) -> Tensor:
    return put(torch.arange(1, size + 1).to(dtype))


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def total(group: Group, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    return dist.all_reduce(value, op, group, async_op=True)


def send_or_receive(rank: int, group: Group, *values: tuple[Tensor, Tensor]) -> None:
    """Rank 0 sends the first of each, rank 1 receives into the second."""
    wait(*(dist.isend(sent, 1, group) if rank == 0 else dist.irecv(room, 0, group) for sent, room in values))


def nothing_wrong(rank: int, group: Group) -> None:
    """Also the numbers, before and after the waits."""
    sent, room, summed = numbers(), numbers(), numbers()
    works = [dist.isend(sent, 1, group) if rank == 0 else dist.irecv(room, 0, group), total(group, summed)]
    assert all(held(summed).isnan()) and (rank == 0 or all(held(room).isnan()))
    wait(*works)
    assert held(summed).tolist() == [2, 4, 6, 8] and held(room).tolist() == [1, 2, 3, 4]
    parts = [numbers(size=1), numbers(size=3)]
    dist.all_gather(parts, numbers(size=1 + 2 * rank), group)
    assert [held(each).tolist() for each in parts] == [[1], [1, 2, 3]]
    dist.reduce_scatter(parts[rank], [numbers(size=1), numbers(size=3)], group=group)
    assert held(parts[rank]).tolist() == [[2], [2, 4, 6]][rank]
    swapped = numbers(size=3)
    dist.all_to_all_single(swapped, numbers(size=3), [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1], group)
    assert held(swapped).tolist() == [[1, 1, 2], [2, 3, 3]][rank]
    dist.broadcast(summed, 1, group)
    dist.reduce(summed, 0, group=group)
    assert held(summed).tolist() == [4, 8, 12, 16] if rank == 0 else all(held(summed).isnan())
    operations = [dist.P2POp(dist.isend, sent, 1 - rank, group), dist.P2POp(dist.irecv, room, 1 - rank, group)]
    wait(*dist.batch_isend_irecv(operations))


def other_order(rank: int, group: Group) -> None:
    works = [lambda: total(group, numbers()), lambda: dist.broadcast(numbers(), 0, group, async_op=True)]
    wait(*(work() for work in (works if rank == 0 else reversed(works))))


def swapped_sends(rank: int, group: Group) -> None:
    first, second = numbers(size=3), numbers(size=5)
    send_or_receive(rank, group, (first, second), (second, first))


def other_type(rank: int, group: Group) -> None:
    send_or_receive(rank, group, (numbers(), numbers(torch.int32)))


def other_length(rank: int, group: Group) -> None:
    send_or_receive(rank, group, (numbers(), numbers(size=3)))


def both_send_first(rank: int, group: Group) -> None:
    wait(dist.isend(numbers(), 1 - rank, group), dist.irecv(numbers(), 1 - rank, group))


def a_sum_of_other_sizes(rank: int, group: Group) -> None:
    total(group, numbers(size=4 + rank)).wait()


def another_root(rank: int, group: Group) -> None:
    dist.broadcast(numbers(), rank, group)


def another_sum(rank: int, group: Group) -> None:
    total(group, numbers(), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]).wait()


def unlike_parts(rank: int, group: Group) -> None:
    sizes = [[2, 2], [1, 3]][rank]
    dist.all_to_all_single(numbers(), numbers(), sizes, sizes, group)


def unlike_batches(rank: int, group: Group) -> None:
    operations = [dist.P2POp(dist.isend, numbers(size=4 + rank), 1 - rank, group), dist.P2POp(dist.irecv, numbers(), 1 - rank, group)]
    wait(*dist.batch_isend_irecv(operations))


def a_type_that_it_lacks(rank: int, group: Group) -> None:
    total(group, numbers(torch.int16)).wait()


def strides(rank: int, group: Group) -> None:
    total(group, put(torch.ones(4, 4)).t()[:2]).wait()


def host_memory(rank: int, group: Group) -> None:
    dist.all_gather([torch.empty(4), torch.empty(4)], numbers(), group)


def host_memory_where_gloo_is_not(rank: int, group: Group) -> None:
    dist.all_reduce(torch.ones(4), group=dist.new_group(backend="nccl"))


def written_while_it_is_sent(rank: int, group: Group) -> None:
    value = numbers()
    work = dist.isend(value, 1, group) if rank == 0 else dist.irecv(value, 0, group)
    if rank == 0:
        value.add_(1)
    work.wait()


def written_before_it_is_there(rank: int, group: Group) -> None:
    value = numbers()
    work = total(group, value)
    value.add_(1)
    held(value).fill_(1)
    work.wait()


def the_host_waits(rank: int, group: Group) -> None:
    total(group, numbers()).wait(timedelta(seconds=60))


def destroyed_in_flight(rank: int, group: Group) -> None:
    if rank == 0:
        total(group, numbers())
    dist.destroy_process_group(group)


def never_waited_for(rank: int, group: Group) -> None:
    total(group, numbers())


def first_uses_in_other_orders(rank: int, group: Group) -> None:
    """Messages both ways, each through a new communicator: the first use of each waits for the other end."""
    groups = dist.new_group(), dist.new_group()
    with mock.patch.object(strict, "PATIENCE_SECONDS", 0.5):
        works = [lambda: dist.isend(numbers(), 1 - rank, groups[rank]), lambda: dist.irecv(numbers(), 1 - rank, groups[1 - rank])]
        wait(*(work() for work in works))


CONTROLS: dict[Callable[[int, Group], None], str] = {
    nothing_wrong: "",
    other_order: "has come to all-reduce of 4 x float32, RedOpType.SUM; rank 1 to broadcast of 4 x float32, from 0",
    swapped_sends: "has come to message from 0 to 1 of 3 x float32; rank 1 to message from 0 to 1 of 5 x float32",
    other_type: "rank 1 to message from 0 to 1 of 4 x int32",
    other_length: "rank 1 to message from 0 to 1 of 3 x float32",
    both_send_first: "has come to message from 0 to 1 of 4 x float32; rank 1 to message from 1 to 0 of 4 x float32",
    a_sum_of_other_sizes: "rank 1 to all-reduce of 5 x float32",
    another_root: "rank 1 to broadcast of 4 x float32, from 1",
    another_sum: "RedOpType.SUM; rank 1 to all-reduce of 4 x float32, RedOpType.MAX",
    unlike_parts: "all-to-all with 2 x float32 of 0, 2 x float32 of 1; rank 1 to all-to-all with 1 x float32 of 0, 1 x float32 of 1",
    unlike_batches: "messages with 4 x float32 of 0, 4 x float32 of 1; rank 1 to messages with 4 x float32 of 0, 5 x float32 of 1",
    a_type_that_it_lacks: "torch.int16, which NCCL has not",
    strides: "what is not contiguous",
    host_memory: "tensors of the device and of the host",
    host_memory_where_gloo_is_not: "host memory in a group of NCCL alone",
    written_while_it_is_sent: "memory of send on communicator 1 of ranks (0, 1) was written before its wait",
    written_before_it_is_there: "memory of all-reduce on communicator 1 of ranks (0, 1) was written before its wait",
    the_host_waits: "the host waits for all-reduce",
    destroyed_in_flight: "is destroyed, and nobody has waited for all-reduce",
    never_waited_for: "is destroyed, and nobody has waited for all-reduce",
    first_uses_in_other_orders: "was never the next operation of all its ranks",
}


def said_of(rank: int, num_ranks: int) -> list[str]:
    """What a rank is told of each control; "" for nothing."""
    found = []
    for control in CONTROLS:
        told = ""
        try:
            with StandIn(), strict_network(DEVICE):
                group = dist.new_group()
                total(group, numbers()).wait()  # all have met, but for pairs
                for ends in ((0, 1), (1, 0)):
                    wait(dist.isend(numbers(), ends[1], group) if rank == ends[0] else dist.irecv(numbers(), ends[0], group))
                control(rank, group)
        except BrokenRule as error:
            told = str(error)
        found.append(told)
    return found


def test_who_breaks_a_rule_is_told() -> None:
    with Ranks(2, network="gloo") as ranks:
        told = [dict(zip(CONTROLS, said, strict=True)) for said in ranks.run(said_of)]
    for control, wanted in CONTROLS.items():
        said = [own[control] for own in told]
        assert any(wanted in text for text in said) if wanted else said == ["", ""], f"{control.__name__}: {said}"


def caught(rank: int, num_ranks: int) -> None:
    with suppress(BrokenRule):
        dist.all_reduce.__self__.of(None).broken("a rule")  # type: ignore[attr-defined]


def test_a_broken_rule_that_somebody_catches_is_told_in_the_end(world: Ranks) -> None:
    with pytest.raises(Exception, match="BrokenRule: a rule"):
        world.run(caught, num_ranks=2)


def launches(rank: int, num_ranks: int, case: Case) -> set[str]:
    train_rank(rank, num_ranks, case)
    return {kind for kind, number in dist.all_reduce.__self__.launches.items() if number}  # type: ignore[attr-defined]


def test_the_network_carries_what_is_tested(world: Ranks) -> None:
    found = run_case(world, launches, test_schedules.pipeline("1f1b", 2, 2, (1.0,) * 4))
    assert all({"all-reduce", "send", "receive"} <= kinds for kinds in found)


class Narrow(nn.Module):
    """Two stages, of which the first sends numbers in types that NCCL lacks; in split groups also parts of them are exchanged."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        for name in ("front", "back"):
            with whale.split(num_devices, name=name) if num_devices > 1 else whale.replicate(1, name=name):
                self.add_module(name, Half())

    def forward(self, x: Tensor) -> Tensor:
        hidden, signs, turned = self.front(x, x.new_ones(8).to(torch.int16), None)
        output, signs, turned = self.back(hidden, signs, turned)
        return output * signs.double() + turned.abs()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, signs: Tensor, turned: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x) if turned is None else self.linear(x * signs.double() + turned.real)
        signs = ((hidden > 0).flip(-1).to(torch.int16) * 2 - 1).flip(-1) + signs.flip(-1)
        return hidden.tanh(), signs, torch.complex(hidden, hidden.flip(-1))


def train_narrow(rank: int, num_ranks: int, num_devices: int) -> tuple[list[float], list[float]]:
    """The losses of three steps, and those of the plain model."""
    torch.manual_seed(0)
    model, x = Narrow(num_devices).double(), torch.randn(8, 8, dtype=torch.float64)

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return (output - batch).square().mean()

    rate = partial(torch.optim.SGD, lr=0.1)
    engine = whale.parallelize(model, loss=loss, optimizer=rate, batch=x, config={"pipeline.num_micro_batch": 2})
    losses, expected, optimizer = [], [], rate(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        expected.append(value := loss(model(x), x))
        value.backward()
        losses.append(float(engine.step(x)))
        optimizer.step()
    engine.close()
    return losses, [value.item() for value in expected]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_types_that_it_lacks_travel_as_bytes(world: Ranks, num_devices: int) -> None:
    for losses, expected in world.run(train_narrow, num_devices, num_ranks=2 * num_devices):
        assert losses == pytest.approx(expected, rel=1e-10)


# -- laws ------------------------------------------------------------------------------------------------------


def states_and_checkpoints(world: Ranks, path: Path) -> None:
    """Weights, gradients and optimizer shared out unevenly; from a checkpoint on, the optimizer's alone."""
    case = test_unlike_replicas.unlike(test_unlike_replicas.ONE, test_unlike_replicas.TWO, optimizer="adam")
    plan, graph = world.prepare(test_state_law.plan_case, case)  # type: ignore[attr-defined]
    first, second = (test_state_law.with_state(plan, graph, zero, shares=(3, 1, 2)) for zero in (3, 1))
    test_state_law.check_equal(world, case, (first, second), train_reference(case), saves=True)


def replanning(world: Ranks, path: Path) -> None:
    plans = (test_replan.SPLIT, test_replan.PIPELINE, test_replan.COPIES)
    case = replace(test_replan.FORTH_AND_BACK, rows=(8,) * len(plans))
    for run, num_plans in run_case(world, test_replan.train, case, plans):
        assert num_plans == len(plans)
        assert run.losses == pytest.approx(train_reference(case).losses, rel=test_replan.TOLERANCE)


LAWS: dict[str, Callable[[Ranks, Path], object]] = {
    "schedules": lambda world, path: test_schedules.check(world, test_schedules.CASES["data parallel around, zb_v"]),
    "late receives": lambda world, path: test_schedules.check(world, test_schedules.CASES["late receives, zero bubble"]),
    "one communicator of both directions": lambda world, path: test_schedules.check(world, test_schedules.CASES["stages, gpipe"]),
    "splits": lambda world, path: test_split.test_a_split_model_trains_as_the_plain_one(world, "both stages", 4, False, path / "saved"),
    "states and checkpoints": states_and_checkpoints,
    "copies of state on hosts": lambda world, path: test_copies_of_state.test_law(world, "split and whole", test_copies_of_state.BY_NAME),
    "local steps": lambda world, path: test_local_steps.test_law(world, "split and sharded", saves=False),
    "replanning": replanning,
    "precision": lambda world, path: test_precision.check(
        world, path, test_precision.Case(("linear", "norm"), "fp16", "replicas", "adam", clip=0.5, zero=2)
    ),
    "sums": lambda world, path: test_sums.test_sums_are_in_place_and_equal_on_all_ranks(world, 3),
    "sparse": lambda world, path: test_sparse_gradients.test_sparse_gradients_train_as_in_one_process(
        world, path, test_sparse_gradients.CASES[5]
    ),
    "bridges": lambda world, path: test_bridges.test_axes_that_take_turns_train_as_the_plain_model(world, 1e9, 1e9),
    "parts over slow links": lambda world, path: test_scattering.test_groups_of_unlike_sizes_exchange_parts_exactly(world),
    "overlap": lambda world, path: test_overlap.test_law(world, "weights apart"),
    "a lost host": lambda world, path: test_second_owners.test_no_step_but_that_in_flight_is_lost_with_a_host(
        world, test_second_owners.WRITTEN, path
    ),
}
"""A case of each that is fast; the others by ``WHALE_TEST_NETWORK=strict``."""


@pytest.mark.parametrize("law", LAWS)
def test_law(world: Ranks, tmp_path: Path, law: str) -> None:
    LAWS[law](world, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and forked ranks cannot use it")
@pytest.mark.parametrize("plan", ["zb_h1", "split", "zero 3 and offload"])
def test_law_of_tensors_on_a_device(on_device: Ranks, plan: str) -> None:
    """What goes by the rules is told by the tensors: a host's must not be among them."""
    test_ranks_on_one_gpu.test_the_law_by_precision(on_device, "float32", plan)
