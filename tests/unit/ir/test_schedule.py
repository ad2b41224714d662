"""Schedules: the text form is reversible and wrong text is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.schedule import Action, Kind, Schedule, format_actions, parse_actions
from whale.ir.serialization import from_json, to_json

numbers = st.integers(0, 99)
actions = st.one_of(
    st.builds(Action, st.sampled_from([kind for kind in Kind if kind not in (Kind.SYNC, Kind.LOSS, Kind.STEP)]), numbers, numbers),
    st.builds(Action, st.just(Kind.SYNC), numbers),
    st.sampled_from([Action(Kind.LOSS), Action(Kind.STEP)]),
)
schedules = st.builds(
    Schedule,
    st.from_regex(r"[a-z0-9_]{1,9}", fullmatch=True),
    st.integers(1, 99),
    st.lists(numbers, min_size=1, max_size=5).map(tuple),
    st.lists(st.lists(actions, max_size=9).map(tuple), max_size=4).map(tuple),
)


@given(actions)
def test_actions_read_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(actions).map(tuple))
def test_lines_read_back(line: tuple[Action, ...]) -> None:
    assert parse_actions(format_actions(line)) == line


@given(schedules)
def test_schedules_read_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert from_json(Schedule, to_json(schedule)) == schedule


@pytest.mark.parametrize("text", ["", "F", "0F", "F0", "0X0", "STEP0", "0STEP", "SYNC", "0SYNC1", "0F0 ", "-1F0", "0SEND0"])
def test_words_that_are_no_actions(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("schedule x, 2 micro-batches", "line 1"),
        ("schedule x, 2 micro-batches, stages on ranks 0\nrank 1: STEP", "line 2: expected 'rank 0: ...'"),
        ("schedule x, 2 micro-batches, stages on ranks 0\nrank 0: STEP 0G0", "line 2: '0G0' is not an action"),
    ],
)
def test_texts_that_are_no_schedules(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


@given(st.text())
def test_any_text_is_a_schedule_or_a_value_error(text: str) -> None:
    for read in (Schedule.parse, Action.parse, parse_actions):
        with suppress(ValueError):
            read(text)


def test_stages_of_a_rank() -> None:
    schedule = Schedule("v", 1, (0, 1, 1, 0), ((), ()))
    assert (schedule.num_stages, schedule.stages_of(0), schedule.stages_of(1)) == (4, (0, 3), (1, 2))
