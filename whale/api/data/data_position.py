"""Where the data of a training goes on: the position of the loader that feeds its steps, in a checkpoint and back.

An engine may have several loaders, for validation too. The position that is saved is where the batch ends that the last step was
given; what the loader has handed out since, and no step took, is read again. One that was read from a checkpoint is taken up by that
loader; in a script that has not stepped yet, by the first that was made, or will be, of the same samples in the same order. The next
step then has to be fed by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from whale.api.data.loader import Loader
from whale.api.data.row_source import RowSource
from whale.errors import CheckpointError
from whale.ir.plan import Plan
from whale.runtime.execute.batch.rank_batch import RankBatch
from whale.runtime.state.engine_state import EngineState


class DataPosition:
    """The loaders of one engine.

    Attributes:
        state: its `position` is one that was read, until a step has been fed from there.
    """

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._made: list[weakref.ref[Loader]] = []  # a script may make one for every epoch
        self._feeding: Loader | None = None
        self._fed: Mapping[str, int] | None = None
        self._resumed: Loader | None = None

    @property
    def now(self) -> Mapping[str, int] | None:
        """Where the data goes on after the steps done, whatever the loader has handed out beside; None for the start."""
        if self.state.position is not None or self._feeding is None:
            return self.state.position
        return self._feeding.placed or self._fed

    def add(self, loader: Loader) -> None:
        """Takes in a loader that was just made."""
        self._made = [weakref.ref(each) for each in (*self._loaders(), loader)]
        self._hand_out()

    def feed(self, batch: object) -> None:
        """States what the next step is given.

        Raises:
            CheckpointError: a position has been read, and the batch is of a loader that does not go on from there.
        """
        if not isinstance(batch, RankBatch) or not isinstance(batch.source, Loader):
            return
        source, read = batch.source, self.state.position
        if read is not None and source.placed is None:
            self._check_goes_on(source, batch, read)
        self._feeding, self._fed, self.state.position = source, batch.stop, None
        source.placed = None

    def _check_goes_on(self, source: Loader, batch: RankBatch, read: Mapping[str, int]) -> None:
        """Finds that a batch of a loader is not the one that follows a position which has been read."""
        if source is not self._resumed:
            source.check(read)
            raise CheckpointError(
                "training goes on with the loader that has taken up the checkpoint's data position, the first that was made of the "
                f"same samples (the batch comes from another, at epoch {source.epoch})",
                hint="make the loader of the training before others, or start an epoch with set_epoch",
            )
        if batch.start != read:
            raise CheckpointError(
                f"training goes on where the checkpoint's data does (there: {_told(read)}; the batch: {_told(batch.start)})",
                hint="after engine.load begin another iteration over the loader, and leave out no batch; or start an epoch with set_epoch",
            )

    def check(self, position: Mapping[str, int]) -> None:
        """Finds that a position is not one of the training's loader before anything is done with it.

        Raises:
            CheckpointError: it is of other samples, or of another order.
        """
        if self._feeding is not None:
            self._feeding.check(position)

    def resume(self) -> None:
        """Takes up the position that has been read, if one has."""
        self._resumed = None
        for loader in self._loaders():
            loader.placed = None
        self._hand_out()

    def divided(self, plan: Plan, rank: int | None) -> list[tuple[Loader, RowSource]]:
        """The loaders that the script still has, with what they would read from under another plan.

        Raises:
            BatchError: a loader's batches are too small for it.
        """
        return [(loader, loader.divided(plan, rank)) for loader in self._loaders()]

    def _loaders(self) -> list[Loader]:
        """Those that the script still has, as they were made."""
        return [loader for each in self._made if (loader := each()) is not None]

    def _hand_out(self) -> None:
        read = self.state.position
        if read is None or self._resumed is not None:
            return
        candidates = self._loaders() if self._feeding is None else [self._feeding]
        self._resumed = next((loader for loader in candidates if loader.mismatch(read) is None), None)
        if self._resumed is not None:
            self._resumed.position = read


def _told(position: Mapping[str, int]) -> str:
    return f"epoch {position['epoch']}, row {position['row']}"
