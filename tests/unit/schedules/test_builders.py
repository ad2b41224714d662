"""Every builder in every small shape: exact orders as defined, verified, with the peak that is promised."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.config import SCHEDULES
from whale.errors import ConfigError
from whale.ir.schedule import COMPUTE, Kind, Schedule
from whale.schedules import (
    BUILDERS,
    build,
    count_in_flight,
    forward_only,
    insert_communication,
    most_held,
    placement,
    verify,
)
from whale.schedules.execution import Edges, execute
from whale.schedules.of_plan import leave_out
from whale.schedules.orders import ScheduleShape, group_by_group, num_vacant, round_robin, with_sync_and_step


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(BUILDERS)))
    num_ranks, num_micro_batch = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    chunks = draw(st.integers(1, 4)) if BUILDERS[name].chunks is None else 1
    group = draw(st.integers(min(num_ranks, num_micro_batch), num_micro_batch + 2)) if BUILDERS[name].takes_group else None
    return build(name, num_ranks=num_ranks, num_micro_batch=num_micro_batch, num_chunks=chunks, group_size=group)


@given(schedules())
def test_built_schedules_are_complete_deadlock_free_and_as_large_as_promised(schedule: Schedule) -> None:
    verify(schedule)
    counted = count_in_flight(schedule)
    exact = schedule.name != "interleaved" or schedule.num_micro_batch % schedule.num_ranks == 0
    assert all(found == promised if exact else found <= promised for found, promised in zip(counted, schedule.peak_in_flight, strict=True))


@given(schedules())
def test_as_many_weight_gradients_wait_as_promised(schedule: Schedule) -> None:
    counts = {"num_micro_batch": schedule.num_micro_batch, "num_chunks": schedule.num_stages // schedule.num_ranks}
    _, promised = most_held(schedule.name, num_ranks=schedule.num_ranks, **counts)
    for actions, most in zip(schedule.ranks, promised, strict=True):
        waiting, peak = Counter[int | None](), 0
        for action in actions:
            waiting[action.stage] += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHT)
            peak = max(peak, waiting[action.stage])
        assert peak == most


@given(schedules(), st.data())
def test_any_may_leave_out_its_last_micro_batches(schedule: Schedule, data: st.DataObject) -> None:
    pairs = tuple(pairwise(range(schedule.num_stages)))
    whole = insert_communication(schedule, pairs)
    left = data.draw(st.integers(1, schedule.num_micro_batch))
    short = leave_out(whole, pairs, left)
    verify(short, pairs)
    assert str(leave_out(whole, pairs, schedule.num_micro_batch)) == str(replace(whole, peak_in_flight=()))
    for before, after in zip(whole.ranks, short.ranks, strict=True):
        computed = [action for action in before if action.kind in COMPUTE and action.micro_batch in range(left)]
        assert [action for action in after if action.kind in COMPUTE] == computed


@given(schedules())
def test_text_form_is_reversible(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@given(schedules())
def test_each_stage_syncs_right_after_its_last_backward_and_the_step_is_last(schedule: Schedule) -> None:
    backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    for rank, actions in enumerate(schedule.ranks):
        assert actions[-1].kind is Kind.STEP
        for stage in schedule.stages_of(rank):
            last = max(at for at, action in enumerate(actions) if action.stage == stage and action.kind in backward)
            assert (actions[last + 1].kind, actions[last + 1].stage) == (Kind.SYNC, stage)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_promise_and_placement_without_building(name: str) -> None:
    schedule = build(name, num_ranks=3, num_micro_batch=6)
    assert most_held(name, num_ranks=3, num_micro_batch=6)[0] == schedule.peak_in_flight
    assert placement(name, num_ranks=3) == schedule.stage_rank


@pytest.mark.parametrize(("num_ranks", "num_micro_batch"), [(1, 1), (2, 5), (4, 8), (4, 2), (8, 30)])
def test_promised_peaks_are_the_stated_ones(num_ranks: int, num_micro_batch: int) -> None:
    p, m = num_ranks, num_micro_batch

    def peaks(name: str, **more: int) -> tuple[int, ...]:
        return build(name, num_ranks=p, num_micro_batch=m, **more).peak_in_flight

    assert peaks("gpipe") == (m,) * p
    assert peaks("1f1b") == tuple(min(p - s, m) for s in range(p))
    assert peaks("eager_1f1b") == tuple(min(2 * (p - s) - 1, m) for s in range(p))
    assert peaks("aiao", num_chunks=3) == (3 * m,) * p
    assert peaks("aiao_early_loss", num_chunks=3) == (3 * m,) * (p - 1) + (2 * m + 1,)
    assert peaks("zb_h1") == (min(p, m),) * p
    assert peaks("zb_h2") == (min(2 * p - 1, m),) * p
    assert max(peaks("zb_v")) == 2 * min(p, m)  # in chunks: half of that in stages
    for g in (p, 2 * p, max(p, m)):
        wanted = tuple(min(2 * (p - r - 1) + 2 * g + 1, 3 * m) for r in range(p))
        assert peaks("interleaved", num_chunks=3, group_size=g) == wanted
    shifted = list(peaks("1f1b"))
    if p > 1 and m > 2:
        shifted[-2] += 1
    assert peaks("shifted_critical_path") == tuple(shifted)


def test_interleaved_takes_turns_by_groups() -> None:
    schedule = build("interleaved", num_ranks=2, num_micro_batch=4, num_chunks=2, group_size=2)
    forwards = [str(action) for action in schedule.ranks[1] if action.kind is Kind.FORWARD]
    backwards = [str(action) for action in schedule.ranks[1] if action.kind is Kind.BACKWARD]
    assert forwards == ["1F0", "1F1", "3F0", "3F1", "1F2", "1F3", "3F2", "3F3"]
    assert backwards == ["3B0", "3B1", "1B0", "1B1", "3B2", "3B3", "1B2", "1B3"]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), st.integers(0, 12))
def test_interleaved_departs_from_its_table_only_where_that_would_deadlock(p: int, v: int, m: int, more: int) -> None:
    shape = ScheduleShape(p, m, v, min(p, m) + more)
    literal = tuple(with_sync_and_step(group_by_group(shape, rank)) for rank in range(p))
    by_table = Schedule("table", m, round_robin(shape), literal)
    stuck = bool(execute(by_table, Edges.of(by_table, None)).stuck)
    built = build("interleaved", num_ranks=p, num_micro_batch=m, num_chunks=v, group_size=shape.group_size)
    assert stuck == (num_vacant(shape) > 0) == (built.ranks != literal)


def test_interleaving_needs_groups_of_min_ranks_micro_batches() -> None:
    for num_micro_batch, group in ((8, 3), (3, 2)):
        with pytest.raises(ConfigError, match=f"group size {group} is too small .*at least {min(4, num_micro_batch)}"):
            build("interleaved", num_ranks=4, num_micro_batch=num_micro_batch, num_chunks=2, group_size=group)


def test_the_configuration_knows_every_builder() -> None:
    assert sorted(SCHEDULES) == sorted(BUILDERS)


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match=r"schedule '1b1f' is not one of .*1f1b"):
        build("1b1f", num_ranks=2, num_micro_batch=2)
    with pytest.raises(ConfigError, match="2 faults") as caught:
        build("gpipe", num_ranks=0, num_micro_batch=0)
    assert "has 0 ranks" in str(caught.value) and "has 0 micro-batches" in str(caught.value)
    with pytest.raises(ConfigError, match=r"chunks: 2 cannot be used with schedule 1f1b, which has 1 chunk"):
        build("1f1b", num_ranks=2, num_micro_batch=2, num_chunks=2)
    with pytest.raises(ConfigError, match=r"group size 4 cannot be used with .*interleaved"):
        build("aiao", num_ranks=2, num_micro_batch=4, group_size=4)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 5))
def test_forward_only_on_any_placement(stage_rank: list[int], num_micro_batch: int) -> None:
    edges = [(source, target) for source in range(len(stage_rank)) for target in range(source + 1, len(stage_rank))]
    schedule = forward_only(3, num_micro_batch, stage_rank)
    verify(schedule, edges if len(set(stage_rank)) == 1 else None)
    verify(insert_communication(schedule, edges), edges)
    assert count_in_flight(schedule) == (0, 0, 0)
    assert all(action.kind is Kind.FORWARD for actions in schedule.ranks for action in actions)


GOLDEN_SHAPES = {
    "gpipe": {},
    "1f1b": {},
    "eager_1f1b": {},
    "interleaved": {"num_chunks": 2},
    "aiao": {"num_chunks": 2},
    "aiao_early_loss": {"num_chunks": 2},
    "zb_h1": {},
    "zb_h2": {},
    "zb_v": {},
    "recompute_early": {},
    "last_no_recompute": {},
    "shifted_critical_path": {},
}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_golden_text(name: str, golden) -> None:  # type: ignore[no-untyped-def]
    schedule = build(name, num_ranks=3, num_micro_batch=6, **GOLDEN_SHAPES[name])
    edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    golden(f"schedules/{name}.txt", f"{schedule}\n\nwith communication\n{insert_communication(schedule, edges)}")


def test_computations_are_the_same_with_communication() -> None:
    for name in BUILDERS:
        schedule = build(name, num_ranks=4, num_micro_batch=7)
        talking = insert_communication(schedule, [(stage, stage + 1) for stage in range(schedule.num_stages - 1)])
        for before, after in zip(schedule.ranks, talking.ranks, strict=True):
            assert [a for a in before if a.kind in COMPUTE] == [a for a in after if a.kind in COMPUTE]
