"""The loss scale on the host and on the device, by any rule."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from whale.runtime.state.scaling import LossScale, LossScaling, ScaleRule

LOSS = torch.zeros(())
RULES = st.builds(ScaleRule, st.sampled_from([2.0**40, 2.0**126]), st.none() | st.integers(1, 4), st.integers(1, 3))


def scales(rule: ScaleRule, verdicts: list[bool]) -> list[LossScale]:
    """The scale of each step, and of the next one."""
    found = [LossScale(rule.first)]
    for is_finite in verdicts:
        found.append(found[-1].after(rule, is_finite=is_finite))
    return found


@at_most(40)
@given(RULES, st.lists(st.booleans(), max_size=24))
def test_the_device_goes_as_the_host_does(rule: ScaleRule, verdicts: list[bool]) -> None:
    scaling = LossScaling(rule)
    for number, (is_finite, expected) in enumerate(zip(verdicts, scales(rule, verdicts), strict=False)):
        assert float(scaling.on(torch.device("cpu"))) == expected.value
        scaling.update(number, LOSS, torch.full((), float(not is_finite)))
    assert scaling.scale == scales(rule, verdicts)[-1]
    assert float(scaling.on(torch.device("cpu"))) == scaling.scale.value


def test_as_a_grad_scaler() -> None:
    assert [scale.value for scale in scales(ScaleRule(8.0, growth_steps=2), [True, True, True, False, True, True])] == [
        8.0, 8.0, 16.0, 16.0, 8.0, 8.0, 16.0,
    ]  # fmt: skip


def test_hysteresis_is_full_again_when_the_scale_has_doubled() -> None:
    rule = ScaleRule(8.0, growth_steps=2, hysteresis=2)
    assert [scale.value for scale in scales(rule, [False, False, False, True, True, False, False])] == [
        8.0, 8.0, 4.0, 2.0, 2.0, 4.0, 4.0, 2.0,
    ]  # fmt: skip


def test_a_fixed_scale_stays_also_after_a_checkpoint_of_another() -> None:
    scaling = LossScaling(ScaleRule(128.0, growth_steps=None))
    scaling.take(is_finite=False)
    assert scaling.scale.value == 128.0 and scaling.was_skipped
    scaling.restore(LossScale(2.0))
    assert scaling.scale.value == 128.0
