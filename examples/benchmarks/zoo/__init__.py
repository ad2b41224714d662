"""Models that were not written for Whale, tiny and with random weights: a file per library."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from zoo.entry import Entry
from zoo.torchvision_operators import declare_missing

declare_missing()

LIBRARIES = {
    "torch": ("torch_text", "torch_vision", "torch_other", "torch_sequences", "torch_structures", "torch_pairs"),
    "transformers": ("transformers_text", "transformers_vision", "transformers_speech", "transformers_rarer"),
    "torchvision": ("torchvision_models",),
    "timm": ("timm_models",),
    "diffusers": ("diffusers_models",),
    "peft": ("peft_models",),
}
"""The files of each library; each has a tuple ENTRIES."""


@cache
def entries_of(library: str) -> dict[str, Entry]:
    """The models of a library, by name."""
    found = {entry.name: entry for file in LIBRARIES[library] for entry in import_module(f"zoo.{file}").ENTRIES}
    odd = [name for name in found if name.partition("/")[0] != library]
    assert not odd, odd
    return found


def entry_of(name: str) -> Entry:
    """The entry of a name, ``library/model``."""
    return entries_of(name.partition("/")[0])[name]
