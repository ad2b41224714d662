"""What is made of measured times: slow devices are found within 20 steps, and noise is taken for none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.ir.health import PERSISTENT, WINDOW, Busy, Health

PREDICTED = (0.02, 0.03, 0.05)
DEVICES = ("a", "b", "c")


def windows(times: Callable[[int], Busy], num_steps: int) -> Iterator[tuple[int, list[tuple[int, Busy]]]]:
    """Per step, the last steps that are looked at."""
    steps = [(number, times(number)) for number in range(1, num_steps + 1)]
    for number in range(1, num_steps + 1):
        yield number, steps[max(0, number - WINDOW) : number]


def scaled(*factors: float, level: float = 1.0) -> Busy:
    return tuple(level * factor * seconds for factor, seconds in zip(factors, PREDICTED, strict=True))


@given(st.integers(0, 2), st.floats(1.3, 8.0), st.floats(0.1, 10.0), st.integers(0, 10_000))
def test_a_device_that_becomes_slow_is_found_and_found_to_be_fast_again(place: int, factor: float, level: float, seed: int) -> None:
    """Whatever all predictions are wrong by, and with noise of a tenth."""
    noise, since, until = random.Random(seed), 21, 61

    def times(number: int) -> Busy:
        slow = [factor if each == place and since <= number < until else 1.0 for each in range(3)]
        return scaled(*(each * noise.lognormvariate(0, 0.03) for each in slow), level=level)

    health, found = None, dict[int, Health]()
    for number, window in windows(times, 100):
        health = found[number] = Health.of(window, DEVICES, PREDICTED, {}, health)
    assert not found[since - 1].slow and not found[since - 1].deviates
    (slow,) = found[since + PERSISTENT].slow
    assert slow.device == DEVICES[place] and slow.deviates and abs(slow.slow_since - since) <= 2
    assert found[until - 1].slowdowns[DEVICES[place]] == pytest.approx(factor, rel=0.1)
    assert not found[until + PERSISTENT].slow


@pytest.mark.parametrize("num_devices", [2, 4, 16])
def test_noise_is_no_slowness(num_devices: int) -> None:
    """500 steps with noise of a tenth in each time, and every twentieth thrice as long."""
    for seed in range(5):
        noise = random.Random(seed)
        devices, predicted = tuple(map(str, range(num_devices))), (0.1,) * num_devices

        def times(number: int, noise: random.Random = noise, num: int = num_devices) -> Busy:
            return tuple(0.1 * noise.lognormvariate(0, 0.1) * (3 if noise.random() < 0.05 else 1) for _ in range(num))

        for _, window in windows(times, 500):
            health = Health.of(window, devices, predicted, {})
            assert not health.deviates and not health.slow


def test_a_plan_that_was_made_for_slow_devices_is_left_when_they_are_fast_again() -> None:
    steps = [(number, scaled(1.0, 1.0, 1.0)) for number in range(WINDOW)]
    as_assumed = Health.of(steps, DEVICES, PREDICTED, {"a": 2.0, "b": 2.0, "c": 6.0})
    assert not as_assumed.deviates and as_assumed.slowdowns == {"a": 2.0, "b": 2.0, "c": 6.0}
    assert [each.device for each in as_assumed.slow] == ["c"], "it is slow, as the plan knows"
    worse = Health.of([(number, scaled(1.0, 1.0, 2.0)) for number in range(WINDOW)], DEVICES, PREDICTED, {"a": 3.0, "b": 3.0, "c": 3.0})
    assert worse.slowdowns == {"a": 3.0, "b": 3.0, "c": 6.0}, "by the figures of the cluster, as those that were given"
    steps = [(number, scaled(1.0, 1.0, 1 / 3)) for number in range(WINDOW)]
    lifted = Health.of(steps, DEVICES, PREDICTED, {"c": 3.0}, as_assumed)
    assert lifted.deviates and lifted.slowdowns == {"a": 1.0, "b": 1.0, "c": 1.0} and not lifted.slow


def test_the_faster_of_two_is_the_measure() -> None:
    steps = [(number, (0.02, 0.09)) for number in range(WINDOW)]
    first, second = Health.of(steps, ("a", "b"), (0.02, 0.03), {}).devices
    assert (first.slowdown, second.slowdown) == (1.0, pytest.approx(3.0)) and second.slow_since == 0


def test_the_text_form() -> None:
    assert "nothing measured" in str(Health())
    steps = [(number, (0.02, 0.09)) for number in range(WINDOW)]
    text = str(Health.of(steps, ("a", "b"), (0.02, 0.03), {}))
    assert "b (rank 1): computes 90 ms in a step (spread 0%), predicted 30 ms: 3 x" in text and "slow since step 0" in text
