"""Names for axes, from what ops say of them: no model's or module's name is ever looked for.

The first that applies:
1. ``batch``;
2. the word that a rule has for it (``heads``, ``vocabulary``, ``channels``), under the path that its modules share:
   ``transformer.h.0.attn.heads``;
3. the first parameter that has it, and the dimension there: ``transformer.h.0.mlp.c_fc.weight:1``;
4. the first tensor that has it: ``input_ids:1``.

Where one dimension is a product of several axes, a name made from it ends in ``.0``, ``.1`` ... from the outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from whale.axes.atoms import Dim
from whale.axes.checks import Checker
from whale.axes.outcome import Dims, Outcome
from whale.ir.graph import ModelGraph, Op
from whale.ir.plan import BATCH

_WORD = re.compile(r"[a-z]{3,}(_[a-z]+)*$")


def name_axes(
    graph: ModelGraph, outcomes: Mapping[str, Outcome], parameters: Mapping[str, Dims], batch: Dim, checker: Checker
) -> dict[int, str]:
    """A unique name per leaf, the batch first, the others in the order in which the graph meets them."""
    words = _words(graph, outcomes, checker)
    places = _first_places(((name, dims) for name, dims in parameters.items()), checker)
    met = _first_places(
        ((_tensor_name(op), dims) for op in graph.ops if op.name in outcomes for dims in outcomes[op.name].results), checker
    )
    names: dict[int, str] = {}
    taken: set[str] = set()
    rows = {leaf for leaf, _ in checker.met(batch)}
    for leaf in sorted(met, key=lambda leaf: leaf not in rows):
        name = BATCH if leaf in rows else words.get(leaf) or places.get(leaf) or met[leaf]
        names[leaf] = _unused(name, taken)
        taken.add(names[leaf])
    return names


def _tensor_name(op: Op) -> str:
    return op.name if op.kind == "call" else op.target


def _first_places(tensors: Iterable[tuple[str, Dims]], checker: Checker) -> dict[int, str]:
    """Per leaf, the first tensor and dimension that has it."""
    found: dict[int, str] = {}
    for name, dims in tensors:
        for index, dim in enumerate(dims):
            leaves = checker.met(dim)
            for number, (leaf, _) in enumerate(leaves):
                if leaf not in found:
                    found[leaf] = f"{name}:{index}" + (f".{number}" if len(leaves) > 1 else "")
    return found


def _words(graph: ModelGraph, outcomes: Mapping[str, Outcome], checker: Checker) -> dict[int, str]:
    """Per leaf, the first word that a rule has for it, under the common path of the modules where it has that word."""
    words: dict[int, str] = {}
    modules: dict[int, list[str]] = {}
    for op in graph.ops:
        for letter in outcomes[op.name].letters if op.name in outcomes else ():
            if not _WORD.match(letter.name):
                continue
            leaves = checker.met(letter.dim)
            for number, (leaf, _) in enumerate(leaves):
                word = letter.name + (f".{number}" if len(leaves) > 1 else "")
                if words.setdefault(leaf, word) == word:
                    modules.setdefault(leaf, []).append(op.module)
    return {leaf: ".".join(part for part in (common_path(modules[leaf]), word) if part) for leaf, word in words.items()}


def common_path(modules: Sequence[str]) -> str:
    """The dotted path that all of these share: ``h.0.attn`` and ``h.1.attn`` share ``h``."""
    first, *rest = (module.split(".") for module in dict.fromkeys(modules))
    length = len(first)
    for path in rest:
        length = next((index for index in range(min(length, len(path))) if path[index] != first[index]), min(length, len(path)))
    return ".".join(first[:length])


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
