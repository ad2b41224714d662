"""The loader: over all ranks every row is read, by exactly the ranks whose stages need it, in any plan."""

from __future__ import annotations

import pickle
import random
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

import whale
from tests.examples import at_most
from whale.api.loader import DataPosition, Loader, make_loader
from whale.api.rank_batch import RankBatch, recognized
from whale.errors import BatchError, CheckpointError
from whale.ir.division import intervals
from whale.ir.plan import BATCH, Form, ParameterState, Pipeline, Plan, Replica, Shard, Stage, VirtualDevice
from whale.runtime.execute.batch import check_rows, merge, rank_rows
from whale.runtime.state.engine_state import EngineState


def plan_of(replicas: list[tuple[int, list[list[int]]]], num_micro_batch: int = 1) -> Plan:
    """A plan of (share, per stage the shares of its devices)."""
    devices: list[str] = []
    made = []
    for index, (share, stages) in enumerate(replicas):
        made_stages = []
        for number, shares in enumerate(stages):
            names = tuple(f"d{len(devices) + position}" for position in range(len(shares)))
            devices += names
            made_stages.append(Stage(number, ("t",), (), VirtualDevice(names), tuple(shares), ()))
        pipeline = Pipeline("1f1b", num_micro_batch, tuple(range(len(stages))))
        made.append(Replica(index, share, pipeline, tuple(made_stages), ()))
    return Plan("m", "c", tuple(devices), (), (), tuple(made), (), 8)


SOLO = plan_of([(1, [[1]])])
FIVE_THREE = plan_of([(5, [[1]]), (3, [[1]])])


class Samples:
    """Samples that are their own numbers, and a record of which were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def load(dataset: Any, size: int, plan: Plan = SOLO, rank: int | None = 0, **options: Any) -> Loader:
    return make_loader(dataset, global_batch_size=size, plan=plan, rank=rank, **options)


def values(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_stages = draw(st.integers(1, 3))
    shares = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    replicas = draw(
        st.lists(st.tuples(st.integers(1, 7), st.lists(shares, min_size=num_stages, max_size=num_stages)), min_size=1, max_size=3)
    )
    return plan_of(replicas, draw(st.integers(1, 3)))


def fits(plan: Plan, num_rows: int) -> bool:
    try:
        check_rows(plan, num_rows)
    except BatchError:
        return False
    return True


@given(plans(), st.data())
@at_most(60)
def test_every_row_is_read_by_exactly_the_ranks_that_need_it(plan: Plan, data: st.DataObject) -> None:
    fitting = [num_rows for num_rows in range(1, 64) if fits(plan, num_rows)]
    assume(fitting)
    size = data.draw(st.sampled_from(fitting))
    rest = data.draw(st.sampled_from([0, *(num_rows for num_rows in fitting if num_rows < size)]))
    length = data.draw(st.integers(1, 3)) * size + rest
    options: dict[str, Any] = {"shuffle": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 5))}
    reference = values(load(Samples(length), size, **options))
    datasets = [Samples(length) for _ in plan.devices]
    ranks = [[recognized(batch) for batch in load(dataset, size, plan, rank, **options)] for rank, dataset in enumerate(datasets)]
    assert sorted(index for batch in reference for index in batch) == list(range(length))
    for number, samples in enumerate(reference):
        for replica in plan.replicas:
            for stage in replica.stages:
                for position, device in enumerate(stage.virtual_device.devices):
                    batch = ranks[plan.rank_of[device]][number]
                    needed = [
                        row
                        for start, stop in plan.micro_batch_rows(replica.index, len(samples))
                        for row in range(*intervals(stage.rows(stop - start), start)[position])
                    ]
                    assert [row for interval in batch.origin.rows for row in range(*interval)] == needed
                    assert batch.data.tolist() == [samples[row] for row in needed]
                    assert batch.origin.num_rows == len(samples)
    for rank, dataset in enumerate(datasets):
        compared = 2 if len(plan.devices) > 1 else 0  # of the first sample, which all ranks read
        assert len(dataset.read) == sum(len(batch.data) for batch in ranks[rank]) + compared


def test_uneven_shares_and_a_ragged_end() -> None:
    assert values(load(Samples(20), 8, FIVE_THREE, 0)) == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12], [16, 17, 18]]
    assert values(load(Samples(20), 8, FIVE_THREE, 1)) == [[5, 6, 7], [13, 14, 15], [19]]


def test_rows_of_micro_batches_are_held_apart_where_they_do_not_touch() -> None:
    plan = plan_of([(1, [[1, 1]])], num_micro_batch=2)
    assert rank_rows(plan, 0, 8) == ((0, 2), (4, 6))
    assert rank_rows(plan, 1, 8) == ((2, 4), (6, 8))
    assert rank_rows(plan, None, 8) == ()
    assert merge([(4, 6), (0, 2), (2, 3), (5, 5)]) == ((0, 3), (4, 6))


def test_a_rank_outside_the_plan_gets_the_first_row_of_each_batch_and_none_to_compute() -> None:
    dataset = Samples(8)
    batches = list(load(dataset, 4, rank=None))
    assert [batch.tolist() for batch in batches] == [[0], [4]] and dataset.read == [0, 4]
    known = [recognized(batch) for batch in batches]
    assert [(each.data, each.origin.rows, each.origin.num_rows) for each in known] == [(None, (), 4)] * 2


def test_the_order_is_another_in_each_epoch_and_equal_on_all_ranks() -> None:
    one, other = load(Samples(12), 6, shuffle=True, seed=1), load(Samples(12), 6, shuffle=True, seed=1)
    first, second = values(one), values(one)
    assert first != second and sorted(chain(*first)) == sorted(chain(*second))
    assert values(other) == first
    other.set_epoch(0)
    assert values(other) == first
    assert one.epoch == 2 and len(one) == 2


def test_loading_draws_none_of_the_callers_random_numbers() -> None:
    state = torch.random.get_rng_state()
    values(load(Samples(8), 4, shuffle=True))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_a_position_resumes_at_the_next_batch(kind: type) -> None:
    options: dict[str, Any] = {} if kind is Stream else {"shuffle": True}
    expected = values(load(kind(20), 8, **options))
    loader = load(kind(20), 8, **options)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        position = loader.position
        resumed = load(kind(20), 8, **options)
        resumed.position = position
        following = values(resumed)
        if len(seen) < len(expected):
            assert seen + following == expected
        else:
            assert position["epoch"] == 1 and position["row"] == 0 and len(following) == len(expected)


def test_a_position_holds_for_another_batch_size_and_plan() -> None:
    loader = load(Samples(24), 8, shuffle=True)
    order = list(chain(*values(loader)))
    loader.set_epoch(0)
    next(iter(loader))
    resumed = load(Samples(24), 4, FIVE_THREE, 0, shuffle=True)
    resumed.position = loader.position
    assert next(iter(resumed)).tolist() == order[8:11]


def test_an_iteration_left_early_starts_again() -> None:
    loader = load(Samples(8), 2)
    assert next(iter(loader)).tolist() == [0, 1]
    assert values(loader)[0] == [0, 1]


def test_a_position_of_other_samples_is_refused() -> None:
    with pytest.raises(CheckpointError, match="samples there: 20, here: 21"):
        load(Samples(21), 8).position = load(Samples(20), 8).position
    with pytest.raises(CheckpointError, match="shuffle there: 0, here: 1"):
        load(Samples(20), 8, shuffle=True).position = load(Samples(20), 8).position


def test_batches_that_are_too_small_fail_when_the_loader_is_made() -> None:
    plan = plan_of([(1, [[1]]), (1, [[1]])], num_micro_batch=4)
    gathers = replace(plan, parameter_states=(ParameterState(("w",), Form("float32", "owners")),))
    with pytest.raises(
        BatchError, match=r"the batch has 1 row, fewer than the plan needs: one for each of 2 replicas of 1 micro-batch each"
    ):
        load(Samples(12), 1, gathers)
    with pytest.raises(BatchError, match="the batch has 1 row, fewer"):
        load(Samples(17), 16, gathers)
    assert len(load(Samples(17), 16, plan, drop_last=True)) == 1
    with pytest.raises(BatchError, match=r"fewer than the 2 devices of stage 0 of replica 0"):
        load(Samples(12), 1, plan_of([(1, [[1, 1]])], num_micro_batch=2))


def test_a_batch_with_too_few_rows_for_all_micro_batches_is_divided_into_fewer() -> None:
    plan = plan_of([(1, [[1]]), (1, [[1]])], num_micro_batch=4)
    assert len(load(Samples(12), 6, plan)) == 2
    assert len(load(Samples(19), 16, plan)) == 2


def test_a_replica_without_rows_reads_the_first_to_see_their_form() -> None:
    plan = plan_of([(1, [[1]]), (1, [[1]])], num_micro_batch=4)
    assert [len(each) for each in values(load(Samples(17), 16, plan, 1))] == [8, 1]
    assert values(load(Samples(17), 16, plan, 1))[-1] == values(load(Samples(17), 16, plan, 0))[-1]
    last = list(load(Samples(18), 16, plan_of([(1, [[1, 1]]), (1, [[1]])]), 2, whole_batches=True))[-1]
    assert last.tolist() == [16, 17] and recognized(last).origin.rows == ((0, 2),)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(BatchError, match="the dataset has 5 samples, fewer than one batch of 8"):
        load(Samples(5), 8, drop_last=True)
    with pytest.raises(BatchError, match="at least 1"):
        load(Samples(5), 0)
    with pytest.raises(BatchError, match="global_batch_size=None is not at least 1"):
        load(Samples(5), None)
    for name in ("sampler", "batch_sampler"):
        with pytest.raises(BatchError, match=f"does not take {name}=\n.*Subset.* or pass batches of a DataLoader with this {name}="):
            load(Samples(5), 2, **{name: [1, 2]})
    with pytest.raises(BatchError, match="iterable dataset"):
        load(Stream(5), 2, shuffle=True)


def test_streams_are_read_by_all_and_kept_in_part() -> None:
    assert values(load(Stream(11), 8, FIVE_THREE, 1)) == [[5, 6, 7], [10]]
    assert values(load(Stream(11), 8, FIVE_THREE, 1, drop_last=True)) == [[5, 6, 7]]
    assert values(load(Stream(9), 8, FIVE_THREE, 1)) == [[5, 6, 7], [8]]
    with pytest.raises(TypeError):
        len(load(Stream(9), 8))


class Pairs(Samples):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "y": index}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read.append(len(indices))
        return [self[index] for index in indices]


def test_samples_are_fetched_together_and_collated() -> None:
    dataset = Pairs(8)
    batch = next(iter(load(dataset, 8, FIVE_THREE, 1)))
    assert dataset.read == [1, 1, 3] and batch["x"].shape == (3, 2) and batch["y"].tolist() == [5, 6, 7]
    assert next(iter(load(dataset, 8, collate=len))) == 8


class Named(NamedTuple):
    x: Tensor
    y: Tensor


def as_named(rows: list[dict[str, Any]]) -> Named:
    batch = default_collate(rows)
    return Named(batch["x"], batch["y"])


@dataclass
class Record:
    x: Tensor
    y: Tensor


COLLATES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a mapping": default_collate,
    "another mapping": lambda rows: UserDict(default_collate(rows)),
    "a tuple": lambda rows: tuple(default_collate(rows).values()),
    "a named tuple": as_named,
    "a dataclass": lambda rows: Record(**default_collate(rows)),
}


@pytest.mark.parametrize("kind", COLLATES)
def test_a_batch_is_the_users_own_and_pickles_as_such(kind: str) -> None:
    collate = COLLATES[kind]
    (batch,) = load(Pairs(8), 8, FIVE_THREE, 1, collate=collate)
    assert type(batch) is type(collate([Pairs(1)[0]]))
    pickled = pickle.dumps(batch)
    assert b"whale" not in pickled and type(pickle.loads(pickled)) is type(batch)
    assert recognized(batch).data is batch and recognized(batch).origin.rows == ((5, 8),)
    assert recognized(pickle.loads(pickled)) is not batch  # a copy is nobody's


class Whole(nn.Linear):
    def forward(self, batch: Record) -> Tensor:
        return super().forward(batch.x)


class ByName(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(("kind", "loss"), [(Whole, lambda output, batch: (output * batch.y[:, None]).mean()), (ByName, nn.MSELoss())])
def test_a_dataclass_trains_evaluates_and_predicts(kind: type[nn.Module], loss: Any) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return kind(2, 1)

    def collate(rows: list[dict[str, Any]]) -> Record:
        batch = Record(**default_collate(rows))
        return Record(batch.x, batch.y.float()[:, None] if kind is ByName else batch.y)

    model, samples = made(), Pairs(8)
    engine = whale.parallelize(made(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0), batch=collate([samples[0], samples[1]]))
    for batch in engine.loader(samples, global_batch_size=4, collate=collate):
        batch.x = batch.x / 8
        output = model(batch if kind is Whole else batch.x)
        expected = loss(output, batch.y if kind is ByName else batch).item()
        assert float(engine.step(batch)) == pytest.approx(expected) and float(engine.evaluate(batch)) == pytest.approx(expected)
        torch.testing.assert_close(engine.predict(batch), output)


def replaced_in_place(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, value in batch.items():
        batch[name] = value * 2
    return batch


CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "as it is": lambda batch: batch,
    "one replaced": lambda batch: {**batch, "x": batch["x"] * 2},
    "all replaced in it": replaced_in_place,
    "one left": lambda batch: {"y": batch["y"]},
    "one beside": lambda batch: batch | {"mask": torch.ones(3)},
    "another form": lambda batch: tuple(batch.values()),
    "deeper": lambda batch: {"inputs": [batch["x"]], "y": batch["y"] + 1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_batch_is_known(change: str) -> None:
    loader = load(Pairs(16), 8, FIVE_THREE, 1)
    for number, batch in enumerate(loader):
        assert loader.in_hand is not None
        given = CHANGES[change](batch)
        known = recognized(given, [loader.in_hand])
        assert known.data is given and known.origin.start["row"] == 8 * number and not known.mixed


def test_what_has_nothing_of_a_loader_in_it_is_a_global_batch() -> None:
    everywhere = torch.ones(3)  # as large as the rows, by chance
    loader = load(Pairs(16), 8, FIVE_THREE, 1, collate=lambda rows: {**default_collate(rows), "weights": everywhere})
    kept = list(loader)
    assert loader.in_hand is None
    replaced = {name: value.clone() for name, value in kept[0].items()}
    shared = {"x": torch.ones(3, 2), "weights": everywhere}
    assert recognized(replaced) is replaced and recognized(shared) is shared
    assert [recognized(batch).mixed for batch in kept] == ["", ""]


def test_a_batch_of_two_batches_is_refused() -> None:
    first, second = load(Pairs(16), 8, FIVE_THREE, 1)
    with pytest.raises(BatchError, match=r"batch\['x'\]: epoch 0, row 0, .*; batch\['y'\]: epoch 0, row 8, "):
        recognized({"x": first["x"], "y": second["y"]}).check(FIVE_THREE, 1)
    recognized({"x": first["x"], "y": second["y"].clone()}).check(FIVE_THREE, 1)


def test_rows_are_those_that_were_given() -> None:
    (batch,) = load(Pairs(8), 8, FIVE_THREE, 1)
    recognized(batch).check_rows(3)
    with pytest.raises(BatchError, match=r"has 2 rows now, not the 3 that it was made with .* rows 5:8 of 8"):
        recognized(batch).check_rows(2)


def test_a_batch_of_another_plan_serves_where_it_has_the_rows() -> None:
    (batch,), (whole,) = load(Pairs(8), 8, FIVE_THREE, 1), load(Pairs(8), 8, FIVE_THREE, 1, whole_batches=True)
    recognized(batch).check(plan_of([(6, [[1]]), (2, [[1]])]), 1)
    recognized(whole).check(SOLO, 0)
    with pytest.raises(BatchError, match=r"of 8 rows it has 5:8, needed: 0:8"):
        recognized(batch).check(SOLO, 0)


def test_a_batch_that_is_let_go_of_leaves_nothing_behind() -> None:
    loader = load(Pairs(16), 8)
    gone = weakref.ref(loader)
    for batch in loader:
        kept = weakref.ref(batch["x"])
        break
    del batch, loader
    assert gone() is None and kept() is None


class Augmented(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read.append(len(indices))
        return [{"x": torch.rand(2) + random.random()} for _ in indices]


def test_samples_that_are_fetched_together_draw_numbers_of_their_own() -> None:
    whole = next(iter(load(Augmented(8), 8)))["x"]
    torch.testing.assert_close(next(iter(load(Augmented(8), 8, FIVE_THREE, 1)))["x"], whole[5:])
    assert len(whole.unique()) == whole.numel()


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_workers_read_the_same_rows(kind: type) -> None:
    workers = 2 if kind is Samples else 1
    assert values(load(kind(20), 8, FIVE_THREE, 1, num_workers=workers)) == values(load(kind(20), 8, FIVE_THREE, 1))


@given(plans(), st.integers(1, 40))
@at_most(100)
def test_rows_are_checked_for_all_ranks_at_once(plan: Plan, num_rows: int) -> None:
    def refuses(rank: int) -> bool:
        try:
            rank_rows(plan, rank, num_rows)
        except BatchError:
            return True
        return False

    assert fits(plan, num_rows) == (not any(refuses(rank) for rank in range(len(plan.devices))))


def test_equal_replicas_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[int] = []
    real = Stage.row_intervals
    monkeypatch.setattr(Stage, "row_intervals", lambda self, *rows: divided.append(1) or real(self, *rows))
    cut = (Shard(BATCH, (1, 1)),)
    stages = [Stage(0, ("t",), (), VirtualDevice((f"a{n}", f"b{n}")), (1,), (), split=2, shards=cut) for n in range(300)]
    pipeline = Pipeline("1f1b", 2, (0,))
    replicas = tuple(Replica(index, 1, pipeline, (stage,), ()) for index, stage in enumerate(stages))
    devices = tuple(device for stage in stages for device in stage.virtual_device.devices)
    check_rows(Plan("m", "c", devices, (), (), replicas, (), 8), 2400)
    assert len(divided) == 1


class Kept:
    """A training from a loader of rank 0 of two."""

    def __init__(self, **options: Any) -> None:
        self.data = DataPosition(cast(EngineState, SimpleNamespace(position=None)))
        self.training, self.others = (self.load(length, **options) for length in (32, 16))

    def load(self, length: int, **options: Any) -> Loader:
        loader = load(Samples(length), 8, FIVE_THREE, **options)
        self.data.add(loader)
        return loader

    def use(self, batch: Any) -> RankBatch:
        return cast(RankBatch, self.data.recognized(batch))

    def step(self, batch: Any) -> str:
        self.data.feed(self.use(batch).origin)
        return self.data.needed


def test_a_batch_that_may_come_again_needs_the_plan_that_divided_it() -> None:
    run = Kept()
    for _ in range(2):
        for batch in run.training:
            assert not run.step(batch)
            for other in run.others:
                run.use(other)
            assert not run.data.needed, "what a loop leaves behind"
    kept = next(iter(run.others))
    assert "holds another batch of engine.loader than the last one it trained on (epoch 8, row 0)" in run.data.needed
    del kept
    assert not run.data.needed
    ahead = list(run.training)
    assert run.step(ahead[-2])
    del ahead, batch
    batch = next(iter(run.training))
    assert not run.step(batch)
    run.use(batch)
    assert "again after training on it" in run.data.needed


def test_the_last_batch_of_an_epoch_that_was_drawn_ahead_needs_the_plan() -> None:
    run = Kept()
    *_, before, last = run.training
    del _
    assert run.step(before)
    del before
    assert not run.step(last)


def test_batches_with_all_rows_need_no_plan() -> None:
    run = Kept(whole_batches=True)
    kept = list(run.training)
    assert not run.step(kept[0]) and not run.step(kept[0])
