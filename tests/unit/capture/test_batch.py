"""The structure of batches: names, rows, and what a later batch may change."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from whale.capture import BatchStructure, check_batch_dims
from whale.errors import BatchError


def example(rows: int = 4) -> dict[str, Any]:
    return {"ids": torch.zeros(rows, 3, dtype=torch.long), "input": torch.zeros(rows), "scale": 2.0, "table": torch.zeros(7, 2)}


def test_rows_are_the_most_common_size() -> None:
    structure = BatchStructure.of(example())
    assert structure.example_rows == 4
    assert {leaf.name: leaf.has_rows for leaf in structure.inputs} == {"ids": True, "input_1": True, "table": False}
    assert structure.rows(example(9)) == 9


def test_order_of_keys_and_kind_of_mapping_do_not_matter() -> None:
    structure = BatchStructure.of(example())
    other = UserDict(reversed(example(2).items()))
    assert list(structure.leaves(other)) == ["ids", "input_1", "table"]


def test_names_are_identifiers_and_unique() -> None:
    batch = {"a": [torch.zeros(2), {"b-c": torch.zeros(2)}], "a_0": torch.zeros(2), "num_rows": torch.zeros(2)}
    assert [leaf.name for leaf in BatchStructure.of(batch).inputs] == ["a_0", "a_1_b_c", "a_1", "num_rows_1"]
    assert [leaf.name for leaf in BatchStructure.of((torch.zeros(2), torch.zeros(2))).inputs] == ["input_0", "input_1"]
    assert [leaf.name for leaf in BatchStructure.of(torch.zeros(2)).inputs] == ["input_0"]


def test_unflatten_puts_constants_back() -> None:
    batch = example()
    structure = BatchStructure.of(batch)
    again = structure.unflatten(list(structure.leaves(batch).values()))
    assert list(again) == list(batch) and again["scale"] == 2.0 and again["ids"] is batch["ids"]


@dataclass(frozen=True, slots=True)
class Record:
    ids: torch.Tensor
    scale: float
    length: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.ids.sum(1))


def test_a_dataclass_is_its_fields() -> None:
    batch = Record(torch.ones(4, 3), 2.0)
    structure = BatchStructure.of(batch)
    assert list(structure.leaves(batch)) == ["ids", "length"] and structure.with_rows(9).record is Record
    again = structure.unflatten(list(structure.leaves(batch).values()))
    assert type(again) is Record and again.ids is batch.ids and again.length is batch.length and again.scale == 2.0
    with pytest.raises(BatchError, match=r"batch\['ids'\] is torch.int64, torch.float32 in the example"):
        structure.leaves(Record(torch.ones(4, 3).long(), 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(4, 5, dtype=torch.long)}, r"shape \[4, 5\], not the example's \[rows, 3\]"),
        ({"ids": torch.zeros(4, 3)}, "is torch.float32, torch.int64 in the example"),
        ({"ids": 3}, "is int, a tensor in the example"),
        ({"scale": 3.0}, r"is 3.0, the constant 2.0 in the example"),
        ({"scale": 2}, r"is 2, the constant 2.0 in the example"),
        ({"input": torch.zeros(5)}, r"\['ids'\]: 4, \['input'\]: 5"),
        ({"more": 1}, r"not in the example: batch\['more'\]"),
        ({"table": torch.zeros(6, 2)}, r"shape \[6, 2\], not the example's \[7, 2\]"),
    ],
)
def test_what_a_later_batch_may_not_change(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchStructure.of(example()).leaves(example() | change)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(BatchError, match="2 faults"):
        BatchStructure.of(example()).leaves(example() | {"scale": 3.0, "ids": 3})


def test_sizes_that_leave_the_batch_open() -> None:
    batch = {"codebook": torch.zeros(16, 4), "x": torch.zeros(8, 4)}
    with pytest.raises(BatchError) as caught:
        BatchStructure.of(batch)
    assert str(caught.value) == (
        "cannot tell which tensors have rows: their first dimensions differ (batch['codebook']: 16, batch['x']: 8)\n"
        "  hint: say which have rows: batch_dims={NAME: 0, OTHER: None}"
    )


@pytest.mark.parametrize("stated", [{"x": 0}, {"codebook": None}, {"['x']": 0}, {"x": 0, "codebook": None}])
def test_stated_rows(stated: dict[str | int, int | None]) -> None:
    structure = BatchStructure.of({"codebook": torch.zeros(16, 4), "x": torch.zeros(8, 4)}, batch_dims=stated)
    assert structure.example_rows == 8 and [leaf.has_rows for leaf in structure.parts] == [False, True]
    assert [leaf.shape for leaf in structure.with_rows(11).parts] == [(16, 4), (11, 4)]


def test_a_tensor_as_large_as_the_batch_may_be_whole() -> None:
    batch = ({"x": torch.zeros(4, 3), "weights": torch.zeros(4)}, torch.zeros(4))
    assert [leaf.has_rows for leaf in BatchStructure.of(batch).parts] == [True, True, True]
    structure = BatchStructure.of(batch, batch_dims={"[0]['weights']": None})
    assert [leaf.has_rows for leaf in structure.parts] == [True, False, True]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"y": 0}, "batch_dims= names 'y', which is not a tensor of the batch .*'codebook', 'x'"),
        ({"x": 1}, "(?s)batch_dims.'x'. is 1, not 0, or None.*transpose it in forward"),
    ],
)
def test_statements_that_cannot_be(stated: dict[str | int, int | None], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        check_batch_dims({"codebook": torch.zeros(16, 4), "x": torch.zeros(8, 4)}, stated)


def test_stated_rows_must_agree() -> None:
    with pytest.raises(BatchError, match=r"different numbers of rows .\['a'\]: 16, \['x'\]: 8"):
        BatchStructure.of({"a": torch.zeros(16, 4), "x": torch.zeros(8, 4)}, batch_dims={"a": 0, "x": 0})


@pytest.mark.parametrize("batch", [{}, {"ids": [torch.zeros(2, 3)]}, {"ids": {"a": torch.zeros(2, 3)}}, [torch.zeros(2, 3)]])
def test_a_batch_of_the_same_keys_may_have_other_parts(batch: Any) -> None:
    structure = BatchStructure.of({"ids": torch.zeros(4, 3)})
    assert not structure.has_parts_of(batch)
    with pytest.raises(BatchError, match="the batch has other parts than the example batch"):
        structure.leaves(batch)
    with pytest.raises(BatchError, match="the batch has other parts than the example batch"):
        BatchStructure.of(torch.zeros(4, 3)).leaves({})
