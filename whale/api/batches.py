"""A batch as the user gives it, taken apart into the tensors that programs read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whale.api.inference import usable
from whale.capture import BatchStructure
from whale.runtime.execute.batch.batch_view import BatchView
from whale.runtime.execute.batch.rank_batch import RankBatch


def view_of(structure: BatchStructure, batch: Any) -> BatchView:
    """The tensors of a batch, by the input ops that read them.

    Args:
        structure: of the captured mode.
        batch: the global batch in the user's form, or a `RankBatch` of a loader.

    Raises:
        BatchError: it is not of the example's form.
    """
    with_rows = frozenset(part.name for part in structure.inputs if part.has_rows and part.name is not None)
    if isinstance(batch, RankBatch):
        leaves = {} if batch.data is None else _leaves(structure, batch.data)
        return BatchView(leaves, with_rows, batch.num_rows, batch.rows, is_own=True)
    leaves = _leaves(structure, batch)
    num_rows = leaves[next(iter(with_rows))].shape[0]
    return BatchView(leaves, with_rows, num_rows, ((0, num_rows),))


def _leaves(structure: BatchStructure, batch: Any) -> dict[str, Tensor]:
    return {name: usable(leaf) for name, leaf in structure.leaves(batch).items()}
