"""Captures kept on disk for the next start of the same script.

    key     what is known before a capture: versions, arguments, modules, shapes, ties, scopes, globals, the batch
    head    what the capture has read: contents of values near the model and the loss, environment variables, source files
    body    the `ModelGraph` and the nodes of its program

A file is used if its key matches and everything in its head is unchanged. Other changes (a file that is read, an iterator) are found
when the model is traced again after the first step. A capture that depends on values without comparable contents is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import platform
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from whale.capture.batch import BatchStructure
from whale.capture.exporting.held_values import MISSING
from whale.capture.exporting.near_values import NearValues
from whale.capture.exporting.refusals import check_model
from whale.capture.exporting.side_effects import VARIABLE
from whale.capture.flat.sizes import check_memory, holdings
from whale.capture.program import CapturedProgram
from whale.capture.scopes import default_scope
from whale.capture.source import is_of_a_library
from whale.capture.tagging import parameter_tags, tag_of
from whale.errors import CaptureError
from whale.ir.graph import ModelGraph
from whale.ir.writes import written_buffers

MOST_BYTES = 2**28  # of all files in a folder; the least recently used go first
_MOST_VALUES, _MOST_BYTES_OF_VALUE = 20_000, 2**26  # limits of values that are compared
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_DEEPEST = 12


def folder_of(setting: str | None) -> Path | None:
    """Where captures are kept (``runtime.capture_cache``); None for ``off``."""
    if setting == "off":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.path.expanduser(setting)) if setting is not None else Path(cache) / "whale"


class _NotComparable(Exception):
    """A value has no contents that can be compared with those in the next process."""


@dataclass(frozen=True)
class KeptCapture:
    """The place on disk for the capture of a model (`near`) and batch (`structure`)."""

    folder: Path  # for all captures
    near: NearValues
    structure: BatchStructure
    key: str  # digest of the model, the arguments of the capture and the versions

    @staticmethod
    def of(folder: Path, near: NearValues, loss: object, structure: BatchStructure, *arguments: object) -> KeptCapture | None:
        """The place; None for a model with too many values that cannot be compared."""
        try:
            key = _digest(_key_lines(near, loss, structure, arguments))
        except Exception:  # whatever the user's own objects raise: not comparable
            return None
        return KeptCapture(folder, near, structure, key)

    def find(self) -> tuple[ModelGraph, CapturedProgram] | None:
        """The kept capture of an unchanged model. Raises ValueError: a file cannot be read; it is removed."""
        for path in self._paths():
            with contextlib.suppress(OSError), path.open("rb") as file:
                if (found := self._read(path, file)) is not None:
                    return found
        return None

    def _read(self, path: Path, file: Any) -> tuple[ModelGraph, CapturedProgram] | None:
        owner = os.fstat(file.fileno())
        if owner.st_uid != os.getuid() or owner.st_mode & 0o022:  # unpickling runs what the file says
            return None
        try:
            head: _Head = pickle.load(file)
            if not self._is_as_then(head):
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, of its own trees
                graph, nodes, fields = pickle.load(file)
            model = self.near.model
            check_model(model)
            held = holdings(model)
            check_memory(held, {each.name for each in held.parameters if each.trainable} | written_buffers(graph).keys())
            constants = fields.pop("tensors")
            program = CapturedProgram(_graph_of(nodes), {**held.tensors, **constants}, self.structure, reads=head.reads, **fields)
        except (OSError, CaptureError):  # what a model must not hold, the capture reports
            return None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
        with contextlib.suppress(OSError):
            os.utime(path)
        return graph, program

    def _is_as_then(self, head: _Head) -> bool:
        try:
            return head.values == self._values(head.reads) and head.files == _stamps(head.files)
        except Exception:  # as in `of`; a file is gone
            return False

    def keep(self, graph: ModelGraph, program: CapturedProgram) -> None:
        """Writes a capture, if all of it can be written."""
        held = holdings(self.near.model).tensors
        constants = {name: tensor for name, tensor in program.tensors.items() if name not in held}
        if program.outputs is not None or any(tensor.device.type != "cpu" for tensor in constants.values()):
            return
        fields = {
            "tensors": constants,
            "sources": program.sources,
            "own_loss": program.own_loss,
            "warnings": program.warnings,
        }
        try:
            values = self._values(program.reads)
            head = _Head(program.reads, values, _stamps(_files(), before=_start()))
            body = _pickled((graph, _nodes_of(program.graph), fields))
        except Exception:  # as in `of`, or what does not pickle
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{self.key}-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(pickle.dumps(head) + body)
                os.replace(name, self.folder / f"{self.key}-{values}.capture")
            except OSError:
                os.unlink(name)
                raise
            _make_room(self.folder)

    def drop(self) -> None:
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.key}-*.capture"))

    def _values(self, reads: Iterable[str]) -> str:
        return _digest(f"{path} = {self._value(path)}" for path in sorted(reads))

    def _value(self, path: str) -> str:
        if path.startswith(VARIABLE):
            return repr(os.environ.get(path.removeprefix(VARIABLE)))
        try:
            return _comparable(self.near.places[path].read() if path in self.near.places else MISSING, self.near)
        except _NotComparable:
            modules = [name for name in accumulate(path.split("."), "{}.{}".format) if name in sys.modules]
            if modules and is_of_a_library(str(getattr(sys.modules[modules[-1]], "__file__", ""))):
                return ""  # of an installed class, which keeps what its own files make
            raise


@dataclass(frozen=True)
class _Head:
    reads: frozenset[str]
    values: str
    files: Mapping[str, object]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def _key_lines(near: NearValues, loss: object, structure: BatchStructure, arguments: tuple[object, ...]) -> Iterable[str]:
    """What is known of a capture before it is made, one item per line."""
    if near.generators:
        raise _NotComparable  # the state of a generator is unknown
    yield repr(_stamps([__file__]))
    yield repr((torch.__version__, sys.version, platform.machine(), sys.argv, os.getcwd(), torch.get_default_dtype(), default_scope()))
    yield repr([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")])
    yield repr((structure, arguments))
    yield _comparable(loss, near)
    names: dict[int, str] = {}
    for path, module in near.model.named_modules(remove_duplicate=False):
        kind = type(module)
        yield repr((path, kind.__module__, kind.__qualname__, module.training, tag_of(module)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            first = names.setdefault(id(tensor), f"{path}.{name}")
            yield repr((name, first, None if tensor is None else _form(tensor)))
    yield repr(sorted(parameter_tags(near.model).items()))
    yield repr(sorted({_file_of(function) for function in near.functions}))
    yield from _of_names(near, [function for function in near.functions if not is_of_a_library(_file_of(function))])


def _of_names(near: NearValues, functions: list[FunctionType]) -> Iterable[str]:
    """Values of the names in functions that are not near objects: globals, those of modules, those of functions among them."""
    seen = set(functions)
    pending = list(functions)
    while pending:
        function = pending.pop(0)
        names = function.__code__.co_names
        held = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for module in [each for each in held.values() if isinstance(each, ModuleType)]:
            if not is_of_a_library(getattr(module, "__file__", None) or sys.executable):
                held |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
        for name, value in held.items():
            with contextlib.suppress(_NotComparable):
                yield f"{name} = {_comparable(value, near)}"
            if isinstance(value, FunctionType) and value not in seen and not is_of_a_library(value.__code__.co_filename):
                seen.add(value)
                pending.append(value)


def _file_of(function: FunctionType) -> str:
    """The file of a function; for generated code, as of dataclasses, that of its module."""
    file = function.__code__.co_filename
    found = file if os.path.isfile(file) else getattr(sys.modules.get(function.__module__), "__file__", None)
    if found is None:
        raise _NotComparable  # it was typed in
    return str(found)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor).__name__, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type, tensor.requires_grad


def _comparable(value: Any, near: NearValues, depth: int = 0, left: list[int] | None = None) -> str:
    """A value by its contents, equal in each process; `_NotComparable` if they are not plain, or too many."""
    left = [_MOST_VALUES] if left is None else left
    left[0] -= 1
    inside = partial(_comparable, near=near, depth=depth + 1, left=left)
    kind = type(value)
    named = f"{kind.__module__}.{kind.__qualname__}"
    if depth > _DEEPEST or left[0] < 0:
        raise _NotComparable
    if isinstance(value, Enum):
        return f"{named}.{value.name}"
    if value is MISSING or isinstance(value, PurePath):
        return f"{named} {value!r}"
    if isinstance(value, _PLAIN):
        return f"{named} {next(base for base in _PLAIN if isinstance(value, base)).__repr__(value)}"  # type: ignore[call-arg]
    if isinstance(value, (set, frozenset)):
        return f"{named} {sorted(map(inside, value))}"
    if isinstance(value, (list, tuple, deque)):
        return f"{named} {list(map(inside, value))}"
    if isinstance(value, dict):
        return f"{named} {[(inside(key), inside(each)) for key, each in value.items()]}"
    if isinstance(value, Tensor):  # a parameter is no constant
        return f"{named} {_form(value)} {'' if isinstance(value, nn.Parameter) else _contents(value)}"
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{named} {value.dtype} {value.shape} {_digest_of(value)}"
    if isinstance(value, ReferenceType):
        return f"{named} {inside(value())}"
    if isinstance(value, partial):
        return f"{named} {inside((value.func, value.args, value.keywords))}"
    if isinstance(value, MethodType):
        return f"{named} {inside((value.__func__, value.__self__))}"
    if isinstance(value, FunctionType):
        kept = () if near.follows(value) else ([cell.cell_contents for cell in value.__closure__ or ()], value.__defaults__)
        return f"{value.__module__}.{value.__qualname__} at {value.__code__.co_filename}:{value.__code__.co_firstlineno} {inside(kept)}"
    if isinstance(value, (type, BuiltinFunctionType, ModuleType)):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, (classmethod, staticmethod, property)):
        return f"{named} {inside(value.fget if isinstance(value, property) else value.__func__)}"
    if near.follows(value) or kind is object:
        return named  # what it keeps are places, too
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        return f"{named} {inside(vars(value))}"
    raise _NotComparable


def _contents(tensor: Tensor) -> str:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        raise _NotComparable
    return _digest_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _digest_of(array: Any) -> str:
    if array.nbytes > _MOST_BYTES_OF_VALUE:
        raise _NotComparable
    return hashlib.sha256(array.tobytes()).hexdigest()


# ---- source files ----------------------------------------------------------------------------------------------------


def _files() -> list[str]:
    """The files of all loaded modules: a superset of those that the trace passed."""
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(path for path in found if path and os.path.isfile(path))


def _start() -> float:
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _stamps(paths: Iterable[str], before: float | None = None) -> dict[str, object]:
    """What changes when files change: contents of the user's own, size and time of libraries. `_NotComparable`: newer than `before`."""
    found: dict[str, object] = {}
    for path in paths:
        if is_of_a_library(path):
            state = os.stat(path)
            found[path] = state.st_size, state.st_mtime_ns
        elif before is not None and os.stat(path).st_mtime > before:
            raise _NotComparable
        else:
            found[path] = hashlib.sha256(Path(path).read_bytes()).digest()
    return found


def _make_room(folder: Path) -> None:
    """Removes the least recently used captures beyond `MOST_BYTES`."""
    states = sorted(((path.stat(), path) for path in folder.glob("*-*.capture")), key=lambda pair: -pair[0].st_mtime_ns)
    for path, total in zip((path for _, path in states), accumulate(state.st_size for state, _ in states), strict=True):
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


# ---- programs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NodeRef:
    """A reference to the result of a node."""

    name: str


_Node = tuple[str, str, Any, Any, Any, torch.dtype | None]


def _nodes_of(graph: fx.Graph) -> list[_Node]:
    def plain(argument: Any) -> Any:
        return map_aggregate(argument, lambda each: _NodeRef(each.name) if isinstance(each, fx.Node) else each)  # type: ignore[arg-type, return-value]

    return [(node.op, node.name, node.target, plain(node.args), plain(node.kwargs), _type_of(node)) for node in graph.nodes]


def _type_of(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if node.op == "placeholder" and isinstance(value, Tensor) else None


def _graph_of(nodes: Iterable[_Node]) -> fx.Graph:
    graph, made = fx.Graph(), dict[str, fx.Node]()

    def with_nodes(argument: Any) -> Any:
        return map_aggregate(argument, lambda each: made[each.name] if isinstance(each, _NodeRef) else each)

    for op, name, target, args, kwargs, dtype in nodes:
        node = graph.create_node(op, target, with_nodes(args), with_nodes(kwargs), name)
        if node.name != name:
            raise ValueError(f"%{name} is called %{node.name}")
        if dtype is not None:
            node.meta["val"] = torch.empty(0, dtype=dtype, device="meta")
        made[name] = node
    return graph


def _operator(name: str, overload: str) -> Any:
    namespace, _, rest = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), rest), overload)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value._schema.name, value._overloadname)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise _NotComparable
        return NotImplemented


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
