"""What a plain step does each time and a captured one only while it is captured: draws beside torch's, and notes kept outside the model.

    lam = np.random.beta(1, 1)                  drawn once; every step mixes by the same
    self.calls += 1                             of a loss that is an object: counted once

What `forward` keeps in attributes of the model is found by `whale.capture.exporting.attributes`, which can tell state from notes.
"""

from __future__ import annotations

import dis
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from whale.capture.exporting.plain_values import PlainValues
from whale.capture.source import is_users, line_in
from whale.errors import first_few


@dataclass
class Once:
    """What was found, as warnings."""

    warnings: tuple[str, ...] = ()


@contextmanager
def done_once(model: nn.Module, loss: Callable[..., Any] | None) -> Iterator[Once]:
    """Looks at what captures inside it leave behind; plain values are put back, so that the next capture finds what they found."""
    plain, found = PlainValues(model, loss), Once()
    generators = [*_global_generators(), *plain.generators.values()]
    states = [_state(generator) for generator in generators]
    kept = plain.outside()
    try:
        yield found
    finally:
        written = kept.put_back()
        drawn = any(_state(generator) != state for generator, state in zip(generators, states, strict=True))
        texts = [_text_of_draws(plain)] if drawn else []
        texts += [_text_of_writes(written)] if written else []
        found.warnings = tuple(texts)


def _text_of_draws(plain: PlainValues) -> str:
    lines = list(dict.fromkeys(line for function in plain.functions for line in _drawing_lines(function)))
    places = f" ({first_few([*lines, *plain.generators])})" if lines or plain.generators else ""
    return (
        f"random numbers of Python and NumPy are drawn while the model is captured and never again{places}: each step has the same; draw "
        "them with torch, as tensors (torch.rand(())), or in the data set, as a tensor of the batch"
    )


def _text_of_writes(written: str) -> str:
    return (
        "what a loss keeps in plain values, or a model in globals and closures, is written while it is captured and never again: each step "
        f"starts from what was there before ({written}); write it in the script, between steps, or keep it in a buffer of the model"
    )


def _global_generators() -> list[Any]:
    numpy = sys.modules.get("numpy.random")
    return [random, *([] if numpy is None else [numpy])]


def _state(generator: Any) -> object:
    """The state of a generator of Python's, or of NumPy's older or newer ones; comparable."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return pickle.dumps(generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state)


def _drawing_lines(function: FunctionType) -> Iterator[str]:
    """Lines on which code names a source of random numbers other than torch."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells if cell != CellType()}}
    for code in _codes(function.__code__):
        number, of_numpy = code.co_firstlineno, False
        for step in dis.get_instructions(code):
            number = step.starts_line or number
            value = known.get(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None
            names_random = of_numpy and step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "random"
            of_numpy = isinstance(value, ModuleType) and value.__name__ == "numpy"
            if (names_random or _draws(value)) and is_users(code.co_filename):
                yield str(line_in(code, number))


def _draws(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in ("random", "numpy.random")
    owner = value if getattr(value, "__self__", None) is None else getattr(value, "__self__", None)
    return isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
