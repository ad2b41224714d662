"""What a runtime needs of a captured mode (train, eval or predict) of the model, whoever captured it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import fx

from whale.ir.graph import ModelGraph


class Captured(Protocol):
    """A captured mode."""

    @property
    def graph(self) -> ModelGraph:
        """The captured model as a value."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of this many rows."""
