"""The zoo's judgement of a run, and the page of its results (examples/benchmarks/models.py)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.world import RankFailure
from tests.reference import Run
from whale.axes.operators import entry_of
from whale.errors import CaptureError, RuntimeFault

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

from zoo.cell import Cell
from zoo.cells import failed, judged
from zoo.page import page

OPERATORS = Path(__file__).parents[1] / "golden" / "zoo_operators.txt"
WITHOUT_ENTRY = {"masked_select": "values decide how many it finds"}


def test_operators_of_the_zoo_have_entries() -> None:
    """Of all that the captured models of torch and transformers there call; all axes of one that has no entry are whole."""
    missing = []
    for target in OPERATORS.read_text().split():
        _, packet, overload = target.split(".")
        tags = getattr(getattr(torch.ops.aten, packet), overload).tags
        if entry_of(target, torch.Tag.pointwise in tags).axes is None:
            missing.append(packet)
    assert missing == sorted(WITHOUT_ENTRY)


PLAIN = Run([1.0, 0.5], {"w": torch.ones(3)}, {"w": torch.ones(3)})
OTHER = replace(PLAIN, state={"w": torch.tensor([1.0, 1.0, 1.1])})


def test_equal_numbers_are_exact_with_or_without_a_warning() -> None:
    assert judged([(PLAIN, []), (PLAIN, ["rows are mixed"])], PLAIN, 1e-5).kind == "exact"


def test_other_numbers_are_warned_of_or_wrong() -> None:
    warned = judged([(PLAIN, ["rows are\n  mixed"]), (OTHER, [])], PLAIN, 1e-5)
    assert (warned.kind, warned.reason) == ("warned", "rows are mixed")
    wrong = judged([(PLAIN, []), (OTHER, [])], PLAIN, 1e-5)
    assert (wrong.kind, wrong.reason) == ("WRONG", "w on rank 1 differs by 0.1")


def test_what_is_not_a_number_is_wrong() -> None:
    assert judged([(replace(PLAIN, losses=[1.0, float("nan")]), [])], PLAIN, 1e-5).kind == "WRONG"


def test_a_gradient_that_the_plain_loop_lacks_is_zero_or_wrong() -> None:
    gradients = {"w": torch.ones(3), "unused": torch.zeros(2)}
    assert judged([(replace(PLAIN, gradients=gradients), [])], PLAIN, 1e-5).kind == "exact"
    gradients["unused"] = torch.ones(2)
    assert judged([(replace(PLAIN, gradients=gradients), [])], PLAIN, 1e-5).kind == "WRONG"


def test_a_gradient_that_no_rank_has_is_wrong() -> None:
    found = judged([(replace(PLAIN, gradients={}), ["rows are mixed"])], PLAIN, 1e-5)
    assert (found.kind, found.reason) == ("WRONG", "no rank has the gradients of w")


ERROR = CaptureError("one graph (two found)", where="/home/me/model.py:7", hint="write one")
LOST = RuntimeFault("rank 0 is gone")


@pytest.mark.parametrize(
    ("errors", "kind", "reason"),
    [
        ({0: ERROR, 1: LOST}, "refused", "one graph (two found) (at model.py:7)"),
        ({0: LOST, 1: LOST}, "refused", "rank 0 is gone"),
        ({0: LOST, 1: RuntimeFault("rank 1 is gone")}, "raised", "rank 1: RuntimeFault: rank 1 is gone"),
        ({0: KeyError("x"), 1: LOST}, "raised", "KeyError: 'x'"),
        ({0: None}, "raised", "not done after 9 s"),
    ],
)
def test_an_error_of_whale_is_a_refusal_and_any_other_is_not(errors: dict[int, BaseException | None], kind: str, reason: str) -> None:
    texts = {rank: "not done after 9 s" if error is None else f"{type(error).__name__}: {error}" for rank, error in errors.items()}
    cell = failed(RankFailure(errors, texts))
    assert (cell.kind, cell.reason) == (kind, reason)


def test_the_page_has_the_shares_the_reasons_and_the_table() -> None:
    refused = Cell("refused", "no a|b")
    rows = {"timm/b": {"data parallel": refused, "split": refused}, "torch/a": {"data parallel": Cell("exact"), "split": Cell("exact")}}
    text = page(rows)
    assert "Of 2 models 1 (50%) just work under every plan: exact, or," in text
    assert "\n1 models (50%) are exact under all four plans; of 4 cells 2 (50%) are.\n" in text
    assert "| split | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| timm/b | all | refused | no a\\|b |" in text
    assert text.index("| torch/a | exact | exact |") < text.index("| timm/b | refused | refused |")
