"""The captures of one model: the training's, the others when first asked for, those of batches of other sizes and of other plain values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, cast

from torch import nn

from whale.api.mode import CapturedMode, ModeName, structure_for
from whale.capture import BatchDims, BatchStructure, check_batch_dims
from whale.capture.exporting.plain_values import PlainValues, Values
from whale.comm import World, together
from whale.errors import BatchError, CaptureError, warn
from whale.ir.graph import ModelGraph
from whale.runtime.execute.batch.rank_batch import RankBatch
from whale.units import listed


class Modes:
    """The model in its modes.

    Args:
        model: the user's model.
        loss: the user's loss.
        batch: the example.
        world: this process among its peers; all ranks capture together.
        num_sizes: captures that are kept of each mode beside the first.
        batch_dims: which tensors of the batch have rows, where that is not plain from their sizes.

    Attributes:
        model: as given.
        train: the captured training.

    Raises:
        CaptureError: the model cannot be captured, or ranks have captured different ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        batch: Any,
        world: World,
        num_sizes: int,
        batch_dims: BatchDims | None = None,
    ) -> None:
        self.model, self._loss, self._example, self._world, self._num_sizes = model, loss, batch, world, num_sizes
        self._batch_dims = batch_dims
        self._found: dict[ModeName, CapturedMode] = {}
        self._others: dict[ModeName, dict[tuple[BatchStructure, Values], CapturedMode]] = {}
        self._plain = PlainValues(model, loss)
        self._values: dict[ModeName, Values] = {}
        self._numbers: dict[Values, int] = {}
        self._warned: set[str] = set()
        if batch_dims:
            check_batch_dims(batch, batch_dims)
        self.train = self._capture("train", batch)

    def __getitem__(self, name: ModeName) -> CapturedMode:
        return self._found[name]

    def ensure(self, name: ModeName, batch: Any) -> CapturedMode:
        """The capture of a mode, made if it is not there yet; all ranks of the world call it.

        Args:
            name: of the mode.
            batch: the batch to come, of which one rank may have no rows.

        Raises:
            CaptureError: as `Modes`.
        """
        if name not in self._found:
            self._capture(name, batch.data if isinstance(batch, RankBatch) else batch)
        return self._found[name]

    def fitting(self, name: ModeName, batch: Any, forget: Callable[[str], None]) -> CapturedMode:
        """The capture of a mode that serves a batch of this rank's; one more where its sizes are new, or plain values have changed.

        No other rank takes part.

        Args:
            name: of a mode that is there.
            batch: the batch to come, of which this rank may have no rows.
            forget: called with the key of a capture that is dropped for it.

        Raises:
            BatchError: the batch is not like the example, or the model cannot be captured for its sizes.
        """
        base, known = self._found[name], self._values[name]
        data = batch.data if isinstance(batch, RankBatch) else batch
        structure = base.structure if data is None else base.structure.like(data)
        values = self._plain.now(known, trains=name == "train")
        if structure is base.structure and values == known:
            return base
        others = self._others.setdefault(name, {})
        found = others.pop((structure, values), None) or self._capture_other(name, structure, values)
        others[structure, values] = found  # the last one is the one used last
        if len(others) > self._num_sizes:
            forget(others.pop(next(iter(others))).key)
            self._warn("the model has been captured for so many sizes and values that the least used are dropped, and captured again")
        return found

    def _capture(self, name: ModeName, batch: Any) -> CapturedMode:
        def make() -> CapturedMode:
            return CapturedMode(self.model, structure_for(batch, self._example, self._batch_dims), self._loss, name)

        captured = together(self._world, make)
        _compare_captures(None if batch is None else captured.graph, self._world)
        self._found[name], self._values[name] = captured, self._plain.now(trains=name == "train")
        return captured

    def _capture_other(self, name: ModeName, structure: BatchStructure, values: Values) -> CapturedMode:
        """A capture for other sizes than the example's, or for other plain values than those of the first capture."""
        base = self._found[name]
        sizes, changed = base.structure.differing(structure), self._plain.differing(self._values[name], values)
        if sizes:
            rule = f"the model takes batches of these sizes ({sizes})"
            self._warn("a batch has other sizes than the example's, and the model is captured anew for each, as slowly as the first time")
        if changed:
            rule = f"a model is captured anew for plain values that have changed since ({changed})"
            self._warn_of_values(changed)
        try:
            number = f" {self._numbers.setdefault(values, len(self._numbers) + 1)}" if changed else ""
            return CapturedMode(self.model, structure, self._loss, name, key=f"{name}{number}: {sizes}")
        except CaptureError as error:
            raise BatchError(f"{rule}: {error.message}", where=error.where, hint=error.hint) from None

    def _warn_of_values(self, changed: str) -> None:
        if self._world.rank == 0 and "values" not in self._warned:
            self._warned.add("values")
            warn(
                f"plain values that the model or its loss reads have changed since the capture ({changed}), and the model is captured "
                "anew for each, as slowly as the first time; what changes often is best a tensor of the batch"
            )

    def _warn(self, text: str) -> None:
        if self._world.rank == 0 and text not in self._warned:
            self._warned.add(text)
            advice = "pad to a few lengths (pad_to_multiple_of of a collator) or set runtime.num_sizes"
            warn(f"{text} (runtime.num_sizes: {self._num_sizes} are kept); {advice}")


def _compare_captures(graph: ModelGraph | None, world: World) -> None:
    """Fails before anything is sent where ranks captured different models; None for a rank without a batch of its own."""
    prints = world.gather_objects(None if graph is None else graph.fingerprint)
    first = next(rank for rank, fingerprint in enumerate(prints) if fingerprint is not None)
    odd = [rank for rank, fingerprint in enumerate(prints) if fingerprint not in (None, prints[first])]
    if not odd:
        return
    texts = world.gather_objects(None if graph is None or world.rank not in (first, odd[0]) else [str(op) for op in graph.ops])
    pairs = zip_longest(cast(list[str], texts[first]), cast(list[str], texts[odd[0]]), fillvalue="nothing")
    mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("the same ops", "the same ops, of another form"))
    raise CaptureError(
        f"every rank must capture the same model ({listed('rank', odd)} unlike rank {first}: {theirs} in place of {mine})",
        hint="build the model, its scopes and the example batch's shapes the same on every rank. Code that iterates over a set does so in "
        "another order in each process unless PYTHONHASHSEED is set, as whale run does",
    )
