"""The user's batch as a pytree: which leaves are tensors, which carry rows, and what every later batch must match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.errors import BatchError, WhaleError, raise_faults
from whale.ir.graph import NUM_ROWS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BatchDims = Mapping[str | int, int | None]  # per tensor, by key or whole path (``['inputs']['x']``), 0 if it has rows, else None

_CONSTANTS = (type(None), bool, int, float, str)
_LEAVES = frozenset((Tensor, *_CONSTANTS))


@dataclass(frozen=True)
class Leaf:
    path: str  # as the user writes it (``['labels']``, ``[0]``)
    name: str | None  # of its input op; None for a constant, whose `value` is set and whose dtype is None
    shape: tuple[int, ...] = ()  # in the example; dimension 0 is the number of rows if `has_rows`
    dtype: torch.dtype | None = None
    has_rows: bool = False
    value: object = None

    @property
    def sizes(self) -> tuple[object, ...]:
        """The shape, with ``rows`` for the batch dimension."""
        return ("rows", *self.shape[1:]) if self.has_rows else self.shape

    def with_value(self, constant: object) -> Leaf:
        """The leaf with another constant of its type: text, a number, a flag."""
        return replace(self, value=constant) if type(constant) is type(self.value) and constant != self.value else self

    def sized_as(self, tensor: Tensor) -> Leaf:
        """The leaf with the sizes of a tensor, except the rows."""
        shape = (*self.shape[:1], *tensor.shape[1:]) if self.has_rows else tuple(tensor.shape)
        return self if shape == self.shape else replace(self, shape=shape)


@dataclass(frozen=True)
class BatchStructure:
    """How a batch is flattened into `parts` and rebuilt by `spec`."""

    spec: pytree.TreeSpec
    parts: tuple[Leaf, ...]
    example_rows: int  # rows of the example batch
    record: type | None = None  # the dataclass of the batch, whose fields `spec` describes; None for any other batch

    @staticmethod
    def of(batch: object, least_rows: int = 2, batch_dims: BatchDims | None = None) -> BatchStructure:
        """Reads the structure of an example batch.

        Args:
            batch: the example, of at least `least_rows` rows.
            batch_dims: which tensors have rows, where their sizes leave it open.

        Raises:
            BatchError: no tensor, too few rows, a leaf that is neither tensor nor constant, or an ambiguous batch dimension.
        """
        leaves, spec = pytree.tree_flatten_with_path(plain(batch))
        _check_leaves(leaves)
        stated = [_stated(path, batch_dims or {}) for path, _ in leaves]
        rows = _example_rows(leaves, stated, least_rows)
        names = fx.Graph()  # its placeholders are named as those of the captured graph will be
        names.placeholder(NUM_ROWS)
        parts = [_describe(path, leaf, rows, own, names) for (path, leaf), own in zip(leaves, stated, strict=True)]
        return BatchStructure(spec, tuple(parts), rows, type(batch) if is_record(batch) else None)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        return tuple(part for part in self.parts if part.name is not None)

    def with_rows(self, num_rows: int) -> BatchStructure:
        parts = (replace(part, shape=(num_rows, *part.shape[1:])) if part.has_rows else part for part in self.parts)
        return replace(self, parts=tuple(parts), example_rows=num_rows)

    def like(self, batch: object) -> BatchStructure:
        """The structure with the sizes and constants of `batch`, at the example's number of rows. Raises BatchError if more differs."""
        found = self._by_path(batch)
        parts = tuple(part.with_value(found[part.path]) if part.name is None else part for part in self.parts)
        raise_faults([fault for part in parts if (fault := _mismatch(part, found[part.path])) is not None])
        parts = tuple(part if part.name is None else part.sized_as(found[part.path]) for part in parts)
        return self if parts == self.parts else replace(self, parts=parts)

    def has_parts_of(self, batch: object) -> bool:
        """Whether a batch has the same paths as the example, whatever the leaves are."""
        tree = plain(batch)
        if self._is_level(tree) or pytree.tree_flatten(tree)[1] == self.spec:
            return True
        return {pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]} == {part.path for part in self.parts}

    def other_parts(self, other: BatchStructure) -> str:
        """Parts that only one of two structures has, for a message."""
        ours, theirs = ({part.path: part for part in each.parts} for each in (self, other))
        found = [f"without batch{path}" for path in ours if path not in theirs]
        found += [f"with batch{path}, {_shape(part.sizes)}" for path, part in theirs.items() if path not in ours]
        return "; ".join(found)

    def other_sizes(self, other: BatchStructure) -> str:
        """Parts whose sizes or constants differ in another structure, for a message."""
        ours = {part.path: part for part in self.parts}
        pairs = [(ours[now.path], now) for now in other.parts if now.path in ours]
        found = [
            f"batch{part.path} is {_shape(now.sizes)}, the example's {_shape(part.sizes)}" for part, now in pairs if part.sizes != now.sizes
        ]
        found += [f"batch{part.path} is {now.value!r}, the example's {part.value!r}" for part, now in pairs if part.value != now.value]
        return ", ".join(found)

    def leaves(self, batch: object) -> dict[str, Tensor]:
        """The tensors of a batch by the names of their input ops. Raises BatchError if anything but the rows differs from the example."""
        found = self._by_path(batch)
        faults = [
            fault for part in self.parts if (fault := _mismatch(part, found[part.path]) or _size_fault(part, found[part.path])) is not None
        ]
        raise_faults(faults)
        self._rows(found)
        return {part.name: found[part.path] for part in self.inputs if part.name is not None}

    def rows(self, batch: object) -> int:
        """The number of rows of a batch. Raises BatchError: its tensors disagree, or its structure is not the example's."""
        return self._rows(self._by_path(batch))

    def unflatten(self, tensors: list[Tensor]) -> Any:
        """The batch with these tensors, in the order of `inputs`."""
        remaining = iter(tensors)
        batch = pytree.tree_unflatten([part.value if part.name is None else next(remaining) for part in self.parts], self.spec)
        if self.record is None:
            return batch
        made: Any = object.__new__(self.record)
        for name, value in batch.items():
            object.__setattr__(made, name, value)  # of frozen ones too; __post_init__ has run when the user made the batch
        return made

    def _by_path(self, batch: object) -> dict[str, Any]:
        tree = plain(batch)
        if self._is_level(tree):
            return {path: tree[key] for key, path in self._level.items()}
        leaves, spec = pytree.tree_flatten(tree)
        if spec == self.spec:  # nearly always; paths take ten times as long
            return {part.path: leaf for part, leaf in zip(self.parts, leaves, strict=True)}
        found = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]}
        expected = {part.path for part in self.parts}
        if set(found) != expected:
            missing, extra = sorted(expected - set(found)), sorted(set(found) - expected)
            raise BatchError(
                f"the batch has other parts than the example batch (missing: {_listed(missing)}; not in the example: {_listed(extra)})"
            )
        return found

    @cached_property
    def _level(self) -> dict[object, str]:
        """The path of each key where the batch is a dict of leaves; empty for any other batch."""
        made = pytree.tree_unflatten(range(len(self.parts)), self.spec)
        is_level = type(made) is dict and all(isinstance(place, int) for place in made.values())
        return {key: self.parts[place].path for key, place in made.items()} if is_level else {}

    def _is_level(self, tree: object) -> bool:
        """Whether a batch is a dict of leaves with the example's keys: nearly always, and known without flattening it."""
        return type(tree) is dict and len(tree) > 0 and tree.keys() == self._level.keys() and _LEAVES.issuperset(map(type, tree.values()))

    def _rows(self, found: Mapping[str, Any]) -> int:
        sizes = {part.path: found[part.path].shape[0] for part in self.parts if part.has_rows}
        if len(set(sizes.values())) > 1:
            listing = ", ".join(f"{path}: {size}" for path, size in sizes.items())
            raise BatchError(
                f"tensors of the batch have different numbers of rows ({listing})",
                hint=AS_LARGE_AS_THE_BATCH,
            )
        return int(next(iter(sizes.values())))


def tensors_of(batch: object) -> dict[str, Tensor]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(plain(batch))[0] if isinstance(leaf, Tensor)}


def _listed(paths: list[str]) -> str:
    return ", ".join(f"batch{path}" for path in paths) or "none"


def is_record(batch: object) -> TypeGuard[DataclassInstance]:
    """Whether a batch is a dataclass that is not registered as a pytree node (`torch.utils._pytree.register_dataclass`)."""
    return is_dataclass(batch) and not isinstance(batch, (type, Mapping)) and type(batch) not in pytree.SUPPORTED_NODES


AS_LARGE_AS_THE_BATCH = "for a tensor without rows that is as long as the batch (class weights) give batch_dims={'weights': None}"


def plain(batch: object) -> Any:
    """A mapping as a dict, a dataclass as a dict of its fields: torch has no pytree node for other mappings, such as tokenizers return."""
    if type(batch) is dict:
        return batch
    if is_record(batch):
        return {each.name: getattr(batch, each.name) for each in fields(batch)}
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _check_leaves(leaves: list[tuple[Any, Any]]) -> None:
    faults: list[WhaleError] = [
        BatchError(
            f"batch{pytree.keystr(path)} is {type(leaf).__name__}, not a tensor or a constant",
            hint="pass tensors, numbers, text or None in dicts, tuples and lists, or in the fields of a dataclass that is the batch",
        )
        for path, leaf in leaves
        if not isinstance(leaf, (Tensor, *_CONSTANTS))
    ]
    faults += [
        _not_dense(pytree.keystr(path), form) for path, leaf in leaves if isinstance(leaf, Tensor) and (form := form_of(leaf)) != "dense"
    ]
    faults += [_with_gradient(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    raise_faults(faults)
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 0 for _, leaf in leaves):
        raise BatchError("the batch has no tensor whose dimension 0 is the rows")


def form_of(tensor: Tensor) -> str:
    """``dense``, or the layout of a tensor whose rows are not strided: ``nested``, ``sparse_coo`` ..."""
    return "nested" if tensor.is_nested else "dense" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _not_dense(path: str, form: str) -> BatchError:
    return BatchError(
        f"batch{path} is {form}, not a dense tensor",
        hint="call to_dense(), or pad it (to_padded_tensor), before the step; indices and values may be passed as two tensors",
    )


def _with_gradient(path: str, tensor: Tensor) -> BatchError:
    made = "was marked so" if tensor.grad_fn is None else f"comes from {tensor.grad_fn.name().removesuffix('Backward0')}"
    return BatchError(
        f"batch{path} requires a gradient, which would be lost (it {made})",
        hint="detach it; or make the layers that computed it part of the model, so that they are trained too",
    )


def check_batch_dims(batch: object, batch_dims: BatchDims) -> None:
    """Checks that every name in `batch_dims` is a tensor of the batch, and every dimension is 0 or None."""
    paths = [path for path, _ in pytree.tree_flatten_with_path(plain(batch))[0]]
    known = {name for path in paths for name in _names(path)}
    faults: list[WhaleError] = []
    for name, dim in batch_dims.items():
        if name not in known:
            shown = ", ".join(sorted({repr(_names(path)[len(path) > 1]) for path in paths}))  # of a nested one all of its way
            faults.append(BatchError(f"batch_dims= names {name!r}, which is not a tensor of the batch ({shown})"))
        elif dim is not None and (isinstance(dim, bool) or dim != 0):
            hint = "put the batch first where the loader collates, and transpose it in forward"
            faults.append(BatchError(f"batch_dims[{name!r}] is {dim!r}, not 0, or None for a tensor without rows", hint=hint))
    raise_faults(faults)


def _names(path: Any) -> tuple[object, ...]:
    """The key and the whole path of a leaf."""
    first = path[0] if path else None
    return (getattr(first, "key", getattr(first, "idx", getattr(first, "name", ""))), pytree.keystr(path))


def _stated(path: Any, batch_dims: BatchDims) -> bool | None:
    """Whether `batch_dims` gives a leaf rows, or none; None where it says nothing."""
    found = [batch_dims[name] for name in _names(path) if name in batch_dims]  # type: ignore[index]
    return found[-1] is not None if found else None


def _example_rows(leaves: list[tuple[Any, Any]], stated: list[bool | None], least_rows: int) -> int:
    """The number of rows: that of the tensors stated to have rows, else the most frequent one among tensors with nothing stated."""
    tensors = [(path, leaf, own) for (path, leaf), own in zip(leaves, stated, strict=True) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    stated_sizes = {pytree.keystr(path): leaf.shape[0] for path, leaf, own in tensors if own}
    if len(set(stated_sizes.values())) > 1:
        listing = ", ".join(f"{path}: {size}" for path, size in stated_sizes.items())
        raise BatchError(f"tensors of the batch have different numbers of rows ({listing})")
    sizes = {pytree.keystr(path): leaf.shape[0] for path, leaf, own in tensors if own is None}
    counts = Counter(stated_sizes.values() or sizes.values()).most_common()
    if not counts:
        raise BatchError("the batch has no tensor with rows: batch_dims= gives None for all")
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        listing = ", ".join(f"batch{path}: {size}" for path, size in sizes.items())
        raise BatchError(
            f"cannot tell which tensors have rows: their first dimensions differ ({listing})",
            hint="say which have rows: batch_dims={NAME: 0, OTHER: None}",
        )
    rows = counts[0][0]
    if rows < least_rows:
        raise BatchError(
            f"the example batch has {rows}; it needs at least {least_rows} rows",
            hint="a single row looks like a dimension of size one; later batches may have any number of rows",
        )
    return int(rows)


def _describe(path: Any, leaf: object, rows: int, stated: bool | None, names: fx.Graph) -> Leaf:
    text = pytree.keystr(path)
    if not isinstance(leaf, Tensor):
        return Leaf(text, None, value=leaf)
    words = [re.sub(r"\W", "_", str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))) for key in path]
    name = "_".join(words) if words and not words[0][:1].isdigit() else "_".join(["input", *(words or ["0"])])
    name = names.placeholder(name).name  # unique, and no word of Python: "input" becomes "input_1"
    has_rows = leaf.dim() > 0 and leaf.shape[0] == rows and stated is not False
    return Leaf(text, name, tuple(leaf.shape), leaf.dtype, has_rows)


def _mismatch(part: Leaf, leaf: object) -> WhaleError | None:
    if part.name is None:
        same = type(leaf) is type(part.value) and leaf == part.value
        hint = "a constant may have other values of its type; each is captured"
        return None if same else BatchError(f"batch{part.path} is {leaf!r}, the constant {part.value!r} in the example", hint=hint)
    if not isinstance(leaf, Tensor):
        return BatchError(f"batch{part.path} is {type(leaf).__name__}, a tensor in the example")
    if (form := form_of(leaf)) != "dense":
        return _not_dense(part.path, form)
    if leaf.requires_grad:
        return _with_gradient(part.path, leaf)
    if leaf.dtype != part.dtype:
        return BatchError(f"batch{part.path} is {leaf.dtype}, {part.dtype} in the example")
    if leaf.dim() != len(part.shape):
        return BatchError(f"batch{part.path} has dimensions {_shape(tuple(leaf.shape))}, not the example's {_shape(part.sizes)}")
    return None


def _size_fault(part: Leaf, leaf: Any) -> WhaleError | None:
    """A fault if a tensor's sizes, except the rows, differ from the example's."""
    if part.name is None or part.sized_as(leaf) is part:
        return None
    return BatchError(f"batch{part.path} has shape {_shape(tuple(leaf.shape))}, not the example's {_shape(part.sizes)}")


def _shape(sizes: tuple[object, ...]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"
