"""The captures of one model: the training's, the others when first used, those of batches of other sizes and of other plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast

from torch import nn

from whale.api.mode import CapturedMode, ModeName, structure_for
from whale.api.rank_batch import RankBatch
from whale.capture import BatchDims, BatchStructure, check_batch_dims
from whale.capture.exporting.near_values import NearValues, Seen
from whale.comm import World, together
from whale.config.sections import RuntimeSettings
from whale.errors import BatchError, CaptureError, first_few, warn
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.precision import Precision
from whale.planning.explain.mixing import mixed_apart, warn_of_mixing
from whale.progress import progress
from whale.units import listed

FIRST_SECONDS = 60.0
"""After the first step, in which the model is not traced again."""


class RetraceBudget:
    """The time of one engine for tracing again: what traces have taken, and the next would take, stays under a share of its time.

    Rank 0 decides: its answer travels with the report that all ranks exchange in each call, and holds from the next call on.

    Args:
        settings: when the model is traced again, and the share.

    Attributes:
        is_off, is_always: whether it is never, or in each call, traced again.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self.is_off, self.is_always = settings.retrace == "off", settings.retrace == "always"
        self._share = 0.0 if self.is_off else settings.retrace_share
        self._began: float | None = None
        self._spent = self._expected = 0.0

    def begin(self) -> None:
        """Notes the first step."""
        if self._began is None:
            self._began = time.monotonic()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a capture: the next trace may take as long."""
        start = time.monotonic()
        yield
        self._expected = max(self._expected, time.monotonic() - start)

    @contextmanager
    def tracing_again(self) -> Iterator[None]:
        """Around a trace that the budget pays."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._expected = time.monotonic() - start
            self._spent += self._expected

    @property
    def num_affordable(self) -> int:
        """Traces that can be paid now."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        if elapsed < FIRST_SECONDS or not self._share:
            return 0
        return int((self._share * elapsed - self._spent) / max(self._expected, 1e-3))


@dataclass
class _Mode:
    """The captures of one mode."""

    base: CapturedMode  # the first
    then: Seen  # the values near the model when it was made
    read: frozenset[str]  # paths of the places that captures of the mode have read
    others: list[_Other] = field(default_factory=list)  # of other sizes and values; the most recently used last
    kinds: list[Seen] = field(default_factory=list)  # values other than the base's, each with its own number
    num_calls: int = 0  # served
    num_checks: int = 0  # traces again


@dataclass(frozen=True, eq=False)
class _Other:
    structure: BatchStructure
    then: Seen
    captured: CapturedMode


class Modes:
    """The model in its modes.

    Args:
        model, loss: the user's.
        batch: the example.
        world: this process among its peers; all ranks capture together.
        settings: how many captures each mode keeps besides the first, when the model is traced again to check them.
        batch_dims: which tensors of the batch have rows, where sizes do not show it.
        precision: the types of ops; None for those of the model.

    Attributes:
        model: as given.
        train: the captured training.
        precision: as given.
        budget: of this rank, for tracing again.

    Raises:
        CaptureError: the model cannot be captured, or ranks have captured different ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        batch: Any,
        world: World,
        settings: RuntimeSettings,
        batch_dims: BatchDims | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.model, self._loss, self._example, self._world, self._num_sizes = model, loss, batch, world, settings.num_sizes
        self._batch_dims, self.precision = batch_dims, precision
        self.budget = RetraceBudget(settings)
        self._made = partial(CapturedMode, device=world.device.type, precision=precision)
        self._modes: dict[ModeName, _Mode] = {}
        self._near = NearValues(model, loss)
        self._warned: set[str] = set()
        if batch_dims:
            check_batch_dims(batch, batch_dims)
        self.train = self._capture("train", batch)
        self._made = partial(self._made, read_as=self.train.graph.read_as)

    def __getitem__(self, name: ModeName) -> CapturedMode:
        return self._modes[name].base

    def ensure(self, name: ModeName, batch: Any, like: BatchStructure | None = None) -> CapturedMode:
        """The first capture of a mode, made where it is missing; all ranks of the world call it.

        Args:
            name: of the mode.
            batch: the batch to come, of which one rank may have no rows.
            like: as of `fitting`.

        Raises:
            CaptureError: as `Modes`.
        """
        if name not in self._modes:
            self._capture(name, _data(batch), like)
        return self._modes[name].base

    def structure(self, name: ModeName, batch: Any) -> BatchStructure:
        """The structure of a batch of which this rank has rows: like the mode's first, or like the last one with the same parts.

        Raises:
            BatchError: the batch is not like the example.
        """
        data = _data(batch)
        if name not in self._modes:
            return structure_for(data, self._example, self._batch_dims)
        mode = self._modes[name]
        known = [mode.base.structure, *(other.structure for other in reversed(mode.others))]
        like = next((each for each in known if each.has_parts_of(data)), None)
        if like is None:
            like = mode.base.structure if name == "train" else structure_for(data, self._example, self._batch_dims)
        return like.like(data)

    def fitting(
        self, name: ModeName, batch: Any, forget: Callable[[str], None], like: BatchStructure | None = None, num_affordable: int = 0
    ) -> CapturedMode:
        """The capture of a mode that serves a batch of this rank; a new one where its sizes are new, or values near the model have changed.

        Except in training, also where it has other parts (labels, say) than those before. Where the budget pays for it, the model is traced
        again and compared. No other rank takes part.

        Args:
            name: of a mode with a first capture.
            batch: the batch to come, of which this rank may have no rows.
            forget: called with the key of a capture that is dropped for it.
            like: the structure of the batch where this rank has no rows of it; None for that of the first.
            num_affordable: traces that the budget of rank 0 could pay at the last call, equal on all ranks.

        Raises:
            BatchError: the batch is not like the example, or the model cannot be captured for its sizes or parts.
            CaptureError: the model computes something else than was captured.
        """
        mode = self._modes[name]
        structure = (like or mode.base.structure) if _data(batch) is None else self.structure(name, batch)
        captured, is_new = self._fitting(name, structure), False
        if captured is None:
            captured, is_new = self._capture_other(name, structure), True
            if len(mode.others) > self._num_sizes:
                forget(mode.others.pop(0).captured.key)
                self._warn("captures for the least used batches and values are dropped, and made again when they are needed")
        self.budget.begin()
        if not is_new and self._is_due(mode, captured, num_affordable):
            call = f"{name} {mode.num_calls + 1}" if name != "train" else f"step {mode.num_calls + 1}"
            what = f"tracing the model again before {call}, to check that it still computes what was captured"
            mode.num_checks += 1
            with self.budget.tracing_again(), progress(what, on_first=self._world.rank == 0):
                captured.check_again(call)
        mode.num_calls += 1
        return captured

    def _is_due(self, mode: _Mode, captured: CapturedMode, num_affordable: int) -> bool:
        """Whether the model is traced again before a call: where the budget pays for one trace, for modes with the fewest, else for two."""
        if self.budget.is_off or captured.is_untraceable:
            return False
        if self.budget.is_always or captured.differs:
            return mode.num_calls > 0
        has_fewest = mode.num_checks == min(each.num_checks for each in self._modes.values())
        return num_affordable >= (1 if has_fewest else 2)

    def _fitting(self, name: ModeName, structure: BatchStructure) -> CapturedMode | None:
        """A capture that is there, for these sizes and the values of now."""
        mode, trains = self._modes[name], name == "train"
        if structure == mode.base.structure and not mode.then.changed(mode.read, trains=trains):
            return mode.base
        for other in mode.others:
            if other.structure == structure and not other.then.changed(mode.read, trains=trains):
                mode.others.remove(other)
                mode.others.append(other)
                return other.captured
        return None

    def _capture(self, name: ModeName, batch: Any, like: BatchStructure | None = None) -> CapturedMode:
        given = None if batch is not None else like
        structure = together(self._world, lambda: given or structure_for(batch, self._example, self._batch_dims))
        with self.budget.capturing():
            captured = together(self._world, lambda: self._first(name, structure))
        _compare_captures(None if batch is None else captured, self._world)
        captured.then = self._near.kept(captured.program.reads)
        self._modes[name] = _Mode(captured, self._near.seen(captured.program.reads), captured.program.reads)
        return captured

    def _first(self, name: ModeName, structure: BatchStructure) -> CapturedMode:
        try:
            return self._made(self.model, structure, self._loss, name)
        except CaptureError as error:
            if name == "train" or not (parts := self.train.structure.other_parts(structure)):
                raise
            raise CaptureError(f"{_of_parts(parts)}: {error.message}", where=error.where, hint=error.hint) from None

    def _capture_other(self, name: ModeName, structure: BatchStructure) -> CapturedMode:
        """A capture for other sizes or parts than the first capture's, or for other plain values."""
        mode, trains = self._modes[name], name == "train"
        changed, first = first_few(mode.then.changed(mode.read, trains=trains)), mode.base.structure
        sizes, parts = first.other_sizes(structure), first.other_parts(structure)
        if parts:
            fault = _of_parts(parts)
        if sizes:
            fault = f"the model cannot be captured for a batch of other sizes or constants ({sizes})"
            self._warn(
                "a batch has other sizes or constants than the example's: the model is captured for each, which takes as long as the first "
                "time"
            )
        if changed:
            fault = f"the model cannot be captured for plain values that changed ({changed})"
            self._warn_of_values(changed)
        try:
            number = f" {self._number(mode, trains)}" if changed else ""
            key = f"{name}{number}: {'; '.join(filter(None, (parts, sizes)))}"
            with self.budget.capturing():
                captured = self._made(self.model, structure, self._loss, name, key=key)
        except CaptureError as error:
            raise BatchError(f"{fault}: {error.message}", where=error.where, hint=error.hint) from None
        if changed:
            self._near = NearValues(self.model, self._loss)  # with what new objects and functions keep
        captured.then = self._near.kept(captured.program.reads)
        mode.read |= captured.program.reads
        mode.others.append(_Other(structure, self._near.seen(mode.read), captured))
        return captured

    def _number(self, mode: _Mode, trains: bool) -> int:
        """A number for the values of now, one for all sizes."""
        for number, then in enumerate(mode.kinds, start=1):
            if not then.changed(mode.read, trains=trains):
                return number
        mode.kinds.append(self._near.seen(mode.read))
        return len(mode.kinds)

    def _warn_of_values(self, changed: str) -> None:
        if self._world.rank == 0 and "values" not in self._warned:
            self._warned.add("values")
            warn(
                f"plain values that the model or its loss reads changed since the capture ({changed}): the model is captured for each, "
                "which takes as long as the first time; put what changes often into the batch, as a tensor"
            )

    def _warn(self, text: str) -> None:
        if self._world.rank == 0 and text not in self._warned:
            self._warned.add(text)
            advice = "pad to a few lengths (pad_to_multiple_of of a collator) or set runtime.num_sizes"
            warn(f"{text} (runtime.num_sizes: {self._num_sizes} are kept); {advice}")


def _data(batch: Any) -> Any:
    """In the user's form; None where this rank has no rows of it."""
    return batch.data if isinstance(batch, RankBatch) else batch


def _of_parts(parts: str) -> str:
    return f"the model cannot be captured for a batch {parts}"


def _compare_captures(captured: CapturedMode | None, world: World) -> None:
    """Raises, before anything is sent, where ranks captured different models; None for a rank without a batch of its own."""
    graph = None if captured is None else captured.graph
    prints = world.gather_objects(None if captured is None else (captured.half_type, captured.graph.fingerprint))
    known = {rank: cast(tuple[str | None, str], found) for rank, found in enumerate(prints) if found is not None}
    first = min(known)
    own_type, own_print = known[first]
    odd = [rank for rank, (_, fingerprint) in known.items() if fingerprint != own_print]
    if not odd:
        return
    other = next((rank for rank in odd if known[rank][0] == own_type), odd[0])  # of one type, the types are not why
    texts = world.gather_objects(
        None if graph is None or world.rank not in (first, other) else [graph.comparable(str(op)) for op in graph.ops]
    )
    pairs = list(zip_longest(cast(list[str], texts[first]), cast(list[str], texts[other]), fillvalue="nothing"))
    place = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
    mine, theirs = [*pairs, ("the same ops", "the same ops with other arguments")][place]
    hint = (
        "build the model, its scopes and the example batch's shapes the same on every rank. A set is iterated in another order in "
        "each process unless PYTHONHASHSEED is set, as whale run does"
    )
    if known[other][0] != own_type:
        hint = (
            f"with precision.dtype: half rank {first} computes in {own_type} and rank {other} in {known[other][0]}, and the model must not "
            "depend on which (if y.dtype == torch.float16; torch.finfo(y.dtype).min / 2, though .min itself may be used): set "
            f"precision.dtype to bf16 or fp16, one type for all devices. If it does not, {hint}"
        )
    raise CaptureError(
        f"ranks captured different models ({listed('rank', odd)}: {theirs}; rank {first}: {mine})",
        where=graph.ops[place].where if graph is not None and place < len(graph.ops) else None,
        hint=hint,
    )


def warn_where_apart(plan: Plan, graph: ModelGraph, world: World) -> None:
    """Warns once, on rank 0, of lines that mix samples which the plan computes separately."""
    if world.rank == 0 and (text := warn_of_mixing(mixed_apart(plan, graph), plan, graph)):
        warn(text)
