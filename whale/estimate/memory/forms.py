"""Copies of tensors in another form (whole, or another shard) that a split group makes for some ops.

forward    from its first user to its last, or kept for the backward pass; of a sum, each device's own term
backward   where it is not kept, remade: with its segment, or for the ops that need it
           its gradient, from its last user to its first: then it becomes one of the shard
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

PerOp = NDArray[np.float64]
"""Bytes that are alive while each op of a stage runs."""


@dataclass(frozen=True, slots=True)
class BridgedTensor:
    """A form of a tensor on one device."""

    users: tuple[str, ...]  # the ops of the stage that read it, in order; of a term of a sum, the op that makes it
    keepers: tuple[str, ...]  # ops whose backward passes need it
    num_bytes: float
    is_kept: bool  # whether it is alive from the forward pass on
    has_gradient: bool  # whether a gradient of this form returns, and becomes another


@dataclass(frozen=True)
class BridgedTensors:
    """The forms that a stage has on one device; `segments` are the recomputed runs of its ops."""

    all: tuple[BridgedTensor, ...]
    ops: Sequence[str]
    segments: Sequence[Sequence[str]] = ()

    @cached_property
    def forward(self) -> PerOp:
        """In a forward pass, besides those that are kept."""
        return self._between((self._at[form.users[0]], self._at[form.users[-1]], form) for form in self.all if not form.is_kept)

    @cached_property
    def remade(self) -> PerOp:
        """In a backward pass, those that were remade."""
        made = (form for form in self.all if form.keepers and not form.is_kept)
        return self._between((self._at[form.users[0]], self._last[form.users[0]] or self._at[form.keepers[-1]], form) for form in made)

    @cached_property
    def gradients(self) -> PerOp:
        """In a backward pass, their gradients."""
        return self._between((self._at[form.users[0]], self._at[form.users[-1]], form) for form in self.all if form.has_gradient)

    @cached_property
    def freed(self) -> PerOp:
        """In a backward pass, those that were kept and have been freed."""
        return self._between((0, self._at[form.users[0]] - 1, form) for form in self.all if form.is_kept)

    @cached_property
    def _at(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.ops)}

    @cached_property
    def _last(self) -> Mapping[str, int]:
        """Per op, the index of the last op of its segment; 0 outside segments."""
        return dict.fromkeys(self.ops, 0) | {name: self._at[segment[-1]] for segment in self.segments for name in segment}

    def _between(self, spans: Iterable[tuple[int, int, BridgedTensor]]) -> PerOp:
        found = np.zeros(len(self.ops))
        for first, last, form in spans:
            found[first : last + 1] += form.num_bytes
        return found
