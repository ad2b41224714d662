"""Buckets: gradients are accumulated in them, start in one order, and as soon as they are final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from whale.comm import Waits
from whale.ir.plan import Form
from whale.runtime.state.gradient_sync import GradientSync
from whale.runtime.state.holdings import RankLinks
from whale.runtime.state.host_copies import HostCopies
from whale.sharding import Piece, Region
from whale.sharding.buckets import Bucket, BucketSlot

COPIES = HostCopies(torch.device("cpu"))

FLOAT = Form("float32")
PIECE = Piece(Region(), (0, 1), frozenset((0, 1)))


@dataclass
class Owners:
    """Stands for the groups: notes what is reduced, in order, and adds nothing."""

    started: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, ranks: Sequence[int]) -> None:
        self.started.append(flat.clone())

    def reduce(self, flat: torch.Tensor, ranks: Sequence[int], root: int) -> None:
        self.started.append(flat.clone())


@dataclass
class Whole:
    """Stands for holdings of ranks that hold all of everything."""

    stays: bool = True

    def held(self, name: str, rank: int) -> Region:
        return Region()

    def gradient_stays(self, name: str) -> bool:
        return self.stays

    def gradient_is_sparse(self, name: str) -> bool:
        return False

    def kept_index(self, name: str, rank: int) -> None:
        return None

    def index(self, name: str, region: Region, held: Region) -> None:
        return None


def make(names: Sequence[str], stages: Sequence[int], contributors: tuple[int, ...] = (0, 1)) -> tuple[Any, Any, dict[str, Any]]:
    """One bucket for each parameter of four elements; its stages on two replicas."""
    owners = Owners()
    parameters = {name: torch.nn.Parameter(torch.ones(4)) for name in names}
    buckets = [
        Bucket((BucketSlot(name, Piece(Region(), (0, 1), frozenset(contributors)), (), 0, 4),), FLOAT, (0, 1), ((0, stage), (1, stage)))
        for name, stage in zip(names, stages, strict=True)
    ]
    held = {(0, stage) for stage in stages}
    links = RankLinks(Whole(), 0, (0, 1), owners, Waits(timedelta(seconds=1)), COPIES)
    sync = GradientSync(buckets, links, held, parameters, parameters)
    sync.begin()
    return sync, owners, parameters


def test_gradients_are_accumulated_in_their_bucket() -> None:
    sync, owners, parameters = make(["a"], [0])
    place = parameters["a"].grad
    assert place is not None and not place.any()
    (parameters["a"] * 2).sum().backward()
    sync.arm(0)
    (parameters["a"] * 3).sum().backward()
    assert parameters["a"].grad is place and owners.started[0].tolist() == [5.0] * 4
    sync.begin()
    assert parameters["a"].grad.tolist() == [0.0] * 4


def test_a_bucket_waits_for_those_before_it_and_starts_once() -> None:
    sync, owners, parameters = make(["a", "b"], [0, 0])
    sync.arm(0)
    (parameters["b"] * 2).sum().backward()
    assert not owners.started, "the first bucket is not final"
    parameters["a"].sum().backward()
    assert [flat[0].item() for flat in owners.started] == [1.0, 2.0]
    sync.finish_stage(0)
    sync.finish()
    assert len(owners.started) == 2


def test_weight_parts_start_their_buckets_when_their_last_use_is_added() -> None:
    sync, owners, parameters = make(["a", "b"], [0, 0])
    parameters["a"].sum().backward()  # with the input part
    sync.settle(0, [parameters["b"]])
    assert len(owners.started) == 1, "what waits for no weight part is final"
    parameters["b"].grad.add_(2.0)
    sync.is_final(parameters["b"])
    assert [flat[0].item() for flat in owners.started] == [1.0, 2.0]


def test_parameters_of_several_stages_start_last() -> None:
    owners = Owners()
    parameters = {name: torch.nn.Parameter(torch.ones(4)) for name in ("tied", "own")}
    buckets = [
        Bucket((BucketSlot("tied", PIECE, (), 0, 4),), FLOAT, (0, 1), ((0, 0), (0, 1)), False),
        Bucket((BucketSlot("own", PIECE, (), 0, 4),), FLOAT, (0, 1), ((0, 0), (1, 0))),
    ]
    links = RankLinks(Whole(), 0, (0, 1), owners, Waits(timedelta(seconds=1)), COPIES)
    sync = GradientSync(buckets, links, {(0, 0)}, parameters, parameters)
    sync.begin()
    sync.arm(0)
    (parameters["tied"] * 7 + parameters["own"]).sum().backward()
    sync.finish_stage(0)
    assert [flat[0].item() for flat in owners.started] == [1.0]
    sync.finish()
    assert [flat[0].item() for flat in owners.started] == [1.0, 7.0]


def test_what_keepers_have_taken_is_let_go_two_buckets_later() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(4)) for name in "abc"}
    buckets = [
        Bucket((BucketSlot(name, PIECE, ((keeper, 4),), 0, 4),), Form("float32", "owners"), (0, 1), ((0, 0), (1, 0)))
        for keeper, name in enumerate(("a", "b"))
    ]
    buckets.append(replace(buckets[0], slots=(replace(buckets[0].slots[0], name="c"),)))
    kept = {name: parameters[name] for name in "ac"}
    waits = Waits(timedelta(seconds=1))
    sync = GradientSync(buckets, RankLinks(Whole(False), 0, (0, 1), Owners(), waits, COPIES), {(0, 0)}, parameters, kept)
    sync.begin()
    sync.arm(0)
    for name in "abc":
        (parameters[name] * 2).sum().backward()
    assert [bucket.flat is None for bucket in sync._buckets] == [True, False, False]
    assert parameters["a"].grad is not None and parameters["a"].grad.tolist() == [2.0] * 4
    sync.finish()
    sync.wait()
    assert all(bucket.flat is None for bucket in sync._buckets)
    assert parameters["b"].grad is None and parameters["c"].grad is not None


def test_what_another_rank_answers_for_adds_nothing() -> None:
    sync, owners, parameters = make(["a"], [0], contributors=(1,))
    assert all(parameter.grad is None for parameter in parameters.values())
    sync.arm(0)
    (parameters["a"] * 2).sum().backward()
    gradient = parameters["a"].grad
    assert gradient is not None and not owners.started[0].any() and not gradient.any()
