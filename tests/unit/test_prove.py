"""What `make gpu` runs: within its minutes, in order, and each expectation can be missed."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu import prove
from tests.gpu.prove import CHECKS, PART_SECONDS, Check, run


def test_each_part_takes_ten_minutes_at_most_and_all_forty() -> None:
    seconds = {check.part: sum(each.seconds for each in CHECKS if each.part == check.part) for check in CHECKS}
    assert list(seconds) == sorted(seconds)
    assert max(seconds.values()) <= PART_SECONDS and len(seconds) <= 4
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "good", "bad", "said"),
    [
        ("eager", {"ratio": 1.0}, {"ratio": 0.99}, "below 1.0: case 0.990"),
        ("compiled", {"ratio": 1.2}, {"ratio": 0.8}, "below 1.0: case 0.800"),
        ("zero", {"whale_bytes": 96, "plan_bytes": 100}, {"whale_bytes": 106, "plan_bytes": 100}, "the plan's: case +6.0%"),
        ("kernels", {"whale_kernels": 9, "peer_kernels": 5}, {"whale_kernels": 10, "peer_kernels": 5}, "case +5"),
    ],
)
def test_what_is_not_as_expected_is_said(name: str, good: dict[str, float], bad: dict[str, float], said: str, tmp_path: Path) -> None:
    (check,) = (check for check in CHECKS if check.name == name)
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"device": "H100", "case": good}))
    assert check.judge("", figures) is None
    figures.write_text(json.dumps({"device": "H100", "case": bad}))
    assert said in (check.judge("", figures) or "")


def test_a_gpu_skips_nothing() -> None:
    text = "SKIPPED [2] tests/gpu/test_recording.py:58: the stand-in device does not count bytes\n3 passed, 2 skipped"
    with mock.patch.object(prove, "num_gpus", return_value=1):
        assert "1 skipped" in (prove.nothing_skipped(text, Path()) or "")
        assert prove.nothing_skipped("3 passed", Path()) is None


def test_a_check_is_run_or_said_not_to_be(tmp_path: Path) -> None:
    def of(command: str, **more: object) -> tuple[str, str]:
        return run(Check("check", 1, 20, ("-c", command), "something", **more), tmp_path)

    with mock.patch.object(prove, "num_gpus", return_value=0):
        assert of("print('done')") == ("ok", "done")
        assert of("raise SystemExit('broken')")[0] == "FAILED"
        assert of("pass", judge=prove.as_fast_as_torch)[0] == "FAILED", "no figures"
        assert of("pass", num_gpus=2) == ("not run", "needs 2 GPUs, here are 0")
        assert of("pass", modules=("a_module_that_is_not_here",)) == ("not run", "no module a_module_that_is_not_here")
