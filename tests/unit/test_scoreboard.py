"""The scoreboard of published runs (examples/benchmarks/runs.py, simulator.py): its scores, on figures made by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

from figure import Figure
from picks import by_blocks, by_chance, calibrated, missed, picks, repeats
from runs import Run, a100_runs, simulate, written
from simulator import Result, constant_mfu_error, page, rank_correlation, score

RUN = Run(2, 64, 4, 32, 128, "A100-80GB", 2, 8, "infiniband-hdr", "50 GB/s", 8, written(1, 2, 1, 2), 0.01)


def result(seconds: float, predicted: float | None, fitted: bool = False) -> Result:
    return Result(replace(RUN, seconds=seconds), predicted, 1e9, 8e10, fitted, "" if predicted else "no room")


def test_a_run_is_simulated_as_it_is_written() -> None:
    found = simulate(RUN)
    assert sum(len(each.devices) for each in found.devices) == 2
    assert found.step_seconds >= 4 * 2 * 3 * 10 * 60e-6 / 2, "the host starts tens of kernels in each pass"
    peak = found.devices[0].peak
    assert peak.optimizer == 3 * 2 * peak.weights
    assert peak.gradients == (1 + 2) * peak.weights, "those in float16, and copies in float32 while the optimizer steps"


def test_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    names = "gpus,global_batch,micro_batch,hidden,heads,layers,sequence,tensor,data,pipeline,iteration_ms"
    file.write_text(f"{names}\n8,16,2,64,4,6,32,2,1,4,250\n")
    (run,) = a100_runs(file)
    assert run.seconds == 0.25 and run.plan["split"] == 2 and run.plan["num_stages"] == 4 and run.plan["blocks"] == "even"
    assert str(run) == "6 x 64, t2 d1 p4 b2, blocks"


def test_scores() -> None:
    results = [result(1.0, 1.1, fitted=True), result(2.0, 1.0), result(4.0, 4.0), result(1.0, None)]
    found = score(results)
    assert (found["rows"], found["refused"], found["over_memory"]) == (4, 1, 0)
    assert found["mean_error"] == pytest.approx((0.1 + 0.5) / 3)
    assert found["mean_error_fitted"] == pytest.approx(0.1) and found["mean_error_tested"] == pytest.approx(0.25)
    assert found["worst_error"] == -0.5
    assert found["worst_loss_of_picks"] == 1.0, "the one of 2 s is predicted best, and 1 s was possible"
    assert rank_correlation([1, 2, 3], [1, 5, 9]) == pytest.approx(1.0) and rank_correlation([1], [1]) is None
    assert constant_mfu_error([RUN, RUN]) < 0.05
    text = page({"16 T4": results}, {"16 T4": found}, "command")
    assert "| 16 T4 | 4 | 1 |" in text and "-50.0%" in text


def of_depth(layers: int, stages: int, rows: int) -> Result:
    """A run whose block takes 1 s for a row, and the rest of the last stage 3 s for a micro-batch."""
    run = replace(RUN, layers=layers, plan=written(1, 2, stages, rows))
    micro_batches = run.batch // 2 // rows
    return Result(replace(run, seconds=(micro_batches + stages - 1) * layers / stages * rows + 3 * micro_batches), None, 1e9, 8e10, False)


def test_predictions_are_set_right_by_runs_of_other_depths() -> None:
    runs = [of_depth(layers, stages, rows) for layers in (4, 8, 12) for stages in (1, 2) for rows in (1, 2)]
    results = [replace(each, predicted=each.run.seconds * (0.7 if each.run.plan["micro_batch_rows"] == 1 else 1.5)) for each in runs]
    assert any(pick.loss > 0.03 for pick in picks(results))
    for found in (calibrated(results), by_blocks(results)):
        assert [each.predicted for each in found] == pytest.approx([each.run.seconds for each in results])
        assert all(pick.loss == 0 for pick in picks(found))
    alone = results[:4]
    assert calibrated(alone) == by_blocks(alone) == alone, "no other depth was measured"


def test_misses_are_told() -> None:
    other = replace(result(2.0, 1.0).run, plan=written(2, 1, 1, 4))
    rows = list(missed({"16 T4": list(picks([result(1.0, 1.1), Result(other, 1.0, 1e9, 8e10, False)]))}))
    assert rows[2:] == ["| t2 d1 p1 b4 | 2 x 64 | 2 | 8 | 2.000 s | -50% | t1 d2 p1 b2 | 1.000 s | +10% | 100.0% |"]


def test_what_noise_there_is() -> None:
    more = replace(RUN, num_devices=4, batch=16, plan=written(1, 4, 1, 2), seconds=0.0101)
    assert repeats([RUN, more]) == pytest.approx([-0.005, 0.005], rel=0.01)
    assert repeats([RUN, replace(more, batch=8)]) == [], "another number of micro-batches"
    assert by_chance([result(1.0, 1.0), result(2.0, 2.0)], 1e-6) == (1.0, 0.0)


def test_a_bound_is_told_as_one() -> None:
    assert str(Figure("a", 2.0, 2.2)) == "| a | 2 | 2.2 | +10.0% |"
    assert str(Figure("a", 2.0, 1.9, "up to")) == "| a | up to 2 | 1.9 | -5.0% |"
    assert str(Figure("a", None, 0.5)) == "| a | - | 0.5 | - |", "nothing to set beside it"


@pytest.mark.slow
def test_tensors_may_be_made_to_cross_whole() -> None:
    plan = written(8, 1, 2, 2)
    split = replace(RUN, hidden=512, heads=8, sequence=512, num_devices=16, plan=plan)
    assert simulate(split, scatters=False).step_seconds > simulate(split).step_seconds
