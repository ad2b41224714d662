"""Simulated = closed form, wherever one exists: integer times, so the comparison is exact."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from whale.estimate import ActionTimes, bubble, simulate
from whale.schedules import build, insert_recompute

ranks, chunks, micro_batches, times = st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), st.integers(1, 9)


def idle(name: str, costs: ActionTimes, p: int, m: int, v: int = 1, g: int | None = None) -> float:
    return bubble(simulate(build(name, num_ranks=p, num_micro_batch=m, num_chunks=v, group_size=g), costs))


@given(ranks, micro_batches, times, times)
def test_one_stage_a_rank(p: int, m: int, forward: int, backward: int) -> None:
    costs = ActionTimes(forward, backward)
    for name in ("gpipe", "1f1b", "eager_1f1b"):
        assert idle(name, costs, p, m) == (p - 1) * (forward + backward)


@given(ranks, micro_batches, times, times, st.integers(0, 9))
def test_eager_forwards_wait_for_the_way_of_a_message_only_while_the_pipeline_fills_and_drains(
    p: int, m: int, forward: int, backward: int, hop: int
) -> None:
    def makespan(name: str) -> float:
        return simulate(build(name, num_ranks=p, num_micro_batch=m), ActionTimes(forward, backward, transfer=hop)).makespan

    eager = makespan("eager_1f1b")
    assert eager <= makespan("1f1b")
    if 2 * hop <= forward + backward:
        assert eager == (m + p - 1) * (forward + backward) + 2 * (p - 1) * hop


@given(ranks, chunks, st.integers(1, 4), st.integers(0, 6), times, times)
def test_interleaved_with_whole_groups(p: int, v: int, num_groups: int, more: int, forward: int, backward: int) -> None:
    g = p + more
    assert idle("interleaved", ActionTimes(forward, backward), p, num_groups * g, v, g) == (p - 1) * (forward + backward)


@given(ranks, chunks, st.integers(0, 16), times, times)
def test_all_in_all_out(p: int, v: int, more: int, forward: int, backward: int) -> None:
    for name in ("aiao", "aiao_early_loss"):
        assert idle(name, ActionTimes(forward, backward), p, p + more, v) == (p - 1) * (forward + backward)


@given(ranks, chunks, st.integers(0, 16), times, times, st.integers(0, 400))
def test_exposed_sync_of_all_in_all_out(p: int, v: int, more: int, forward: int, backward: int, sync: int) -> None:
    # forward, backward and sync are those of one chunk: A = v sync, B = v backward
    m = p + more
    timeline = simulate(build("aiao", num_ranks=p, num_micro_batch=m, num_chunks=v), ActionTimes(forward, backward, sync=sync))
    assert timeline.exposed_sync == max(sync, v * sync - (v - 1) * m * backward)


@given(ranks, st.integers(0, 16), times, times, times)
def test_zero_bubble(p: int, more: int, forward: int, inputs: int, weights: int) -> None:
    assume(weights <= inputs)
    costs = ActionTimes(forward, inputs, weights)
    # F + I - W and F + I - 2 W where W <= F. A smaller F leaves the first stage, its memory full, to wait for the first gradient.
    assert idle("zb_h1", costs, p, p + more) == (p - 1) * (forward + inputs - min(forward, weights))
    if 2 * weights <= forward + inputs:
        assert idle("zb_h2", costs, p, 2 * p - 1 + more) == (p - 1) * (max(inputs - forward, forward + inputs - 2 * weights))


@given(ranks, st.integers(0, 16), times)
def test_zb_v_has_no_bubble_where_all_parts_are_equal(p: int, more: int, time: int) -> None:
    assert idle("zb_v", ActionTimes(time, time, time), p, 2 * p - 1 + more) == 0


@given(st.integers(2, 8), st.integers(3, 24), times, times)
def test_recompute_savings(p: int, m: int, forward: int, more: int) -> None:
    costs = ActionTimes(forward, 2 * forward + more, recompute=forward)
    plain = simulate(insert_recompute(build("1f1b", num_ranks=p, num_micro_batch=m)), costs).makespan
    assert plain == (m + p - 1) * (4 * forward + more)
    for name, saved in (("recompute_early", p - 1), ("last_no_recompute", p + 1), ("shifted_critical_path", p + 2)):
        assert plain - simulate(build(name, num_ranks=p, num_micro_batch=m), costs).makespan == saved * forward
