"""The interface of a captured mode (train, eval or predict) of the model, independent of `whale.capture`."""

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
        pass

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of `num_rows` rows."""
