"""The captures of one model: the training's, and the others when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from whale.api.mode import CapturedMode, ModeName, example_like
from whale.capture import BatchDims, check_batch_dims
from whale.comm import World, together
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.runtime.execute.rank_batch import RankBatch


class Modes:
    """The model in its modes.

    Args:
        model: the user's model.
        loss: the user's loss.
        batch: the example.
        world: this process among its peers; all ranks capture together.
        batch_dims: which tensors of the batch have rows, where that is not plain from their sizes.

    Attributes:
        model: as given.
        train: the captured training.

    Raises:
        CaptureError: the model cannot be captured, or ranks have captured different ones.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, batch: Any, world: World, batch_dims: BatchDims | None = None
    ) -> None:
        self.model, self._loss, self._world, self._batch_dims = model, loss, world, batch_dims
        if batch_dims:
            check_batch_dims(batch, batch_dims)
        self.train = together(world, lambda: CapturedMode(model, batch, loss, "train", batch_dims))
        _compare_captures(self.train.graph, world)
        self._found: dict[ModeName, CapturedMode] = {"train": self.train}

    def __getitem__(self, name: ModeName) -> CapturedMode:
        return self._found[name]

    def ensure(self, name: ModeName, batch: Any) -> CapturedMode:
        """The capture of a mode, made if it is not there yet; all ranks of the world call it.

        Args:
            name: of the mode.
            batch: the batch to come, of which one rank may have no rows.
        """
        if name not in self._found:
            example = example_like(batch.data if isinstance(batch, RankBatch) else batch, self.train.example, self._batch_dims)
            self._found[name] = together(self._world, lambda: CapturedMode(self.model, example, self._loss, name, self._batch_dims))
        return self._found[name]


def _compare_captures(graph: ModelGraph, world: World) -> None:
    """Fails before any group is made where ranks captured different models."""
    prints = world.gather_objects(graph.fingerprint)
    odd = [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]
    if odd:
        raise CaptureError(
            f"every rank must capture the same model (ranks {odd} differ from rank 0)",
            hint="build the model, its scopes and the example batch's shapes the same on every rank; no random structure",
        )
