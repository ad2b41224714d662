"""What a plain step does each time and a captured one only while it is captured: draws beside torch's, and notes kept outside the model.

    lam = np.random.beta(1, 1)                  drawn once; every step mixes by the same
    self.calls += 1                             of a loss that is an object: counted once

What `forward` keeps in attributes of the model is found by `whale.capture.exporting.attribute_access`, which can tell state from notes.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whale.capture.exporting.near_values import Kept, NearValues, of_globals
from whale.errors import first_few


class Once:
    """What the calls of a capture leave behind, put back after each, so that the next finds what it found.

    Args:
        near: the model and its loss.
        seed: of the generators of Python and NumPy that all share: traces of one seed draw alike, whatever the script has drawn.

    Attributes:
        drawn: the generators that were drawn from.
        written: what was written to closures, classes, globals and objects of the loss.
    """

    def __init__(self, near: NearValues, seed: int = 0) -> None:
        self._near, self._seed = near, seed
        self.drawn: tuple[str, ...] = ()
        self.written: tuple[str, ...] = ()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Around one call of the model and its loss."""
        numpy = sys.modules.get("numpy.random")
        shared = {"random": random, **({} if numpy is None else {"numpy.random": numpy})}
        generators = {**shared, **self._near.generators}
        states = {name: _state(generator) for name, generator in generators.items()}
        for generator in shared.values():
            generator.seed(self._seed)
        began = {name: pickle.dumps(_state(generator)) for name, generator in generators.items()}
        kept = Kept([*self._near.places.values(), *of_globals(self._near.functions)])
        try:
            yield
        finally:
            self.written = tuple(kept.put_back())
            self.drawn = tuple(name for name, generator in generators.items() if pickle.dumps(_state(generator)) != began[name])
            for name, generator in generators.items():
                _set_state(generator, states[name])

    def warnings(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """What is said of them.

        Args:
            lines: where other draws make another graph.
        """
        return (*([_text_of_draws(self.drawn, lines)] if self.drawn else []), *([_text_of_writes(self.written)] if self.written else []))


def _text_of_draws(drawn: tuple[str, ...], lines: tuple[str, ...]) -> str:
    return (
        "random numbers of Python and NumPy are drawn while the model is captured and never again "
        f"({first_few([*lines, *drawn])}): each step has the same; draw them with torch, as tensors (torch.rand(())), or in the data set, "
        "as a tensor of the batch"
    )


def _text_of_writes(written: tuple[str, ...]) -> str:
    return (
        "what a loss keeps in plain values, or a model in globals and closures, is written while it is captured and never again: each step "
        f"starts from what was there before ({first_few(written)}); write it in the script, between steps, or keep it in a buffer of "
        "the model"
    )


def _state(generator: Any) -> Any:
    """The state of a generator of Python's, or of NumPy's older or newer ones."""
    for name in ("getstate", "get_state"):
        if hasattr(generator, name):
            return getattr(generator, name)()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    for name in ("setstate", "set_state"):
        if hasattr(generator, name):
            getattr(generator, name)(state)
            return
    generator.bit_generator.state = state
