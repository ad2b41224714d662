"""Plain values that the code of a model and its loss reads beside tensors: attributes, globals, what a closure holds.

A capture has them as they were, so a weight of the loss that a script raises from epoch to epoch, or a dropout that it turns off,
would stay at its first value. Which names the code reads is told by its compiled form:

    alpha = 0.1                                  def loss(output, batch):
    class Model(nn.Module):                          return alpha * rest(output) + cfg.beta
        def forward(self, x): self.scale ...
                                                 found: alpha, cfg.beta, Model.scale
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from whale.capture.exporting.attributes import OF_EVERY_MODULE
from whale.capture.source import is_users
from whale.errors import first_few

Values = tuple[object, ...]
"""What was read at one moment, one per place; comparable."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_MOST_ITEMS = 64
"""Of a list or dict whose items are looked at."""
_CALLED = frozenset({"forward", "__call__"})
_LIBRARIES = tuple({sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")})


class _Unknown:
    """Stands for all that is not compared."""

    def __repr__(self) -> str:
        return "another object"


_UNKNOWN = _Unknown()


class _TheObject:
    """A tensor or a function, compared by whether it is the same one."""

    def __init__(self, value: Tensor | Callable[..., Any]) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheObject) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return "a tensor" if isinstance(self._value, Tensor) else getattr(self._value, "__qualname__", "a function")


@dataclass(frozen=True)
class _Place:
    """Where a value is kept: a key of a namespace, or a variable of a closure.

    Attributes:
        label: as the user may call it.
        holder: the namespace; a cell holds one value.
        key: in it.
    """

    label: str
    holder: Mapping[str, object] | CellType
    key: str

    def value(self) -> object:
        """What it holds now, in a form that can be compared."""
        return _comparable(self.held())

    def held(self) -> object:
        """The object itself; nothing that can be put back where there is none."""
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.key, _UNKNOWN)
        return self.holder.cell_contents if self.is_set else _UNKNOWN

    def put(self, value: object) -> None:
        """Puts back what `held` gave."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.own, dict):
            self.own[self.key] = value

    @property
    def own(self) -> object:
        """The namespace itself, without the defaults of a class behind it."""
        return self.holder.maps[0] if isinstance(self.holder, ChainMap) else self.holder

    @property
    def is_set(self) -> bool:
        """Whether a variable of a closure has a value yet."""
        return self.holder != CellType()


class PlainValues:
    """The plain values that a model and a loss read: found once, read at any time.

    Args:
        model: whose modules' attributes are read, and the globals of their code where it is the user's.
        loss: the user's; None for a loss that is the model's.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        modules = list(model.modules())
        finder = _Finder(frozenset(map(id, modules)))
        finder.find(model, type(model).__name__, frozenset())
        finder.find(loss, type(loss).__name__, frozenset())
        self.generators, self.functions = finder.generators, finder.functions
        self._places = [*finder.places.values(), *_forwards(modules)]
        self._flags = len(self._places)
        self._places += [
            _Place(f"{name or type(model).__name__}.training", vars(module), "training") for name, module in model.named_modules()
        ]
        self._model = model
        self._namespaces = frozenset(id(vars(module)) for module in modules)

    def now(self, known: Values = (), *, trains: bool) -> Values:
        """The values at this moment.

        Args:
            known: of an earlier one, whose training flags stand where those of now do not count.
            trains: whether training flags count; those of a model that is in evaluation mode as a whole do not.
        """
        if trains and self._model.training:
            return tuple([place.value() for place in self._places])
        return (*[place.value() for place in self._places[: self._flags]], *known[self._flags :])

    def outside(self) -> Kept:
        """What places that are not of the model's modules hold at this moment."""
        return Kept([place for place in self._places if id(place.own) not in self._namespaces])

    def differing(self, then: Values, now: Values) -> str:
        """What has changed, in words."""
        return _differing(self._places, then, now)


def _differing(places: Sequence[_Place], then: Values, now: Values) -> str:
    found = [f"{place.label}: {a!r}, now {b!r}" for place, a, b in zip(places, then, now, strict=False) if a != b]
    return first_few(found)


class Kept:
    """What places hold, to be put back.

    Args:
        places: to look at.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        self._held = [place.held() for place in places]
        self._values = self._now()

    def put_back(self) -> str:
        """Puts back what has been replaced since; says what has been written."""
        now = self._now()
        for place, held in zip(self._places, self._held, strict=True):
            if held is not _UNKNOWN and place.held() is not held:
                place.put(held)
        return _differing(self._places, self._values, now)

    def _now(self) -> Values:
        return tuple(place.value() for place in self._places)


def _forwards(modules: Sequence[nn.Module]) -> list[_Place]:
    """Where modules and their classes have `forward`, which a script may replace."""
    classes = {type(module): f"{type(module).__name__}.forward" for module in modules}
    found = [_Place(f"{type(module).__name__}.forward", vars(module), "forward") for module in modules]
    return found + [_Place(label, vars(kind), "forward") for kind, label in classes.items()]


@dataclass
class _Finder:
    """Walks from objects to the places that their code reads, by the names in it.

    Attributes:
        modules: ids of the model's modules, whose buffers are looked at elsewhere.
        places: found so far.
        generators: of random numbers, by what the code calls them.
        functions: whose code was read.
    """

    modules: frozenset[int] = frozenset()
    places: dict[tuple[int, str], _Place] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    functions: list[FunctionType] = field(default_factory=list)
    _seen: dict[tuple[int, frozenset[str]], object] = field(default_factory=dict)

    def find(self, value: object, label: str, names: frozenset[str]) -> None:
        """Finds what is read of a value that code holds.

        Args:
            value: a function, a module, an object with attributes; of all else nothing is read.
            label: what the code calls it.
            names: that the code reads, of whatever.
        """
        if isinstance(value, (*_PLAIN, Tensor, type)) or (id(value), names) in self._seen:
            return
        self._seen[id(value), names] = value  # kept, so that its id stays its own
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, Random) or type(value).__module__.startswith("numpy.random"):
            self.generators[label] = value
        elif isinstance(value, MethodType):
            self.find(value.__func__, label, frozenset())
            self._object(value.__self__, type(value.__self__).__name__, _names(value.__func__.__code__))
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self.find(each, label, names)
        elif isinstance(value, ModuleType):
            if _is_own(getattr(value, "__file__", None) or "<none>"):
                self._namespace(vars(value), f"{label}.", names)
        elif hasattr(value, "__dict__"):
            self._object(value, label, names | _CALLED)

    def _object(self, value: object, label: str, names: frozenset[str]) -> None:
        kind: Any = type(value)
        names, functions = _reached(kind, names)
        self._namespace(vars(value), f"{label}.", names)
        if isinstance(value, nn.Module) and id(value) not in self.modules:
            self._namespace(value._buffers, f"{label}.", names)
        defaults = _defaults(kind)
        for name in sorted(names & defaults.keys() - vars(value).keys()):
            self._place(ChainMap(vars(value), defaults), name, f"{label}.{name}", names)  # may be overlaid later
        for function in functions:
            self.find(function, label, frozenset())
        for child in value.children() if isinstance(value, nn.Module) else ():
            self.find(child, type(child).__name__, names)

    def _function(self, function: FunctionType) -> None:
        inner = inspect.unwrap(function)
        if inner is not function:
            self.find(inner, function.__name__, frozenset())
        self.functions.append(function)
        names = _names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._place(cell, name, name, names)
        if _is_own(function.__code__.co_filename):
            self._namespace(function.__globals__, "", names)

    def _namespace(self, held: Mapping[str, object], prefix: str, names: frozenset[str]) -> None:
        for name in sorted(names & held.keys() - OF_EVERY_MODULE):
            self._place(held, name, f"{prefix}{name}", names)

    def _place(self, holder: Mapping[str, object] | CellType, key: str, label: str, names: frozenset[str]) -> None:
        place = _Place(label, holder, key)
        if place.value() is not _UNKNOWN:
            self.places.setdefault((id(holder), key), place)
            if isinstance(place.held(), _FUNCTIONS):
                self.find(place.held(), label, names)
        elif not isinstance(holder, CellType):
            self.find(holder[key], label, names)
        elif place.is_set:
            self.find(holder.cell_contents, label, names)


def _comparable(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (Tensor, *_FUNCTIONS)):
        return _TheObject(value)
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        return _all_comparable(value)
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return _all_comparable([item for pair in value.items() for item in pair])
    return _UNKNOWN


def _all_comparable(values: Sequence[object]) -> object:
    found = tuple(map(_comparable, values))
    return _UNKNOWN if any(each is _UNKNOWN for each in found) else found


@cache
def _reached(kind: Any, names: frozenset[str]) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    """The methods of a class that code with these names may call, and all names that they read, too."""
    pending, functions = set(names), []
    methods = _methods(kind)
    read = set(names)
    while pending:
        called = [function for name in pending & methods.keys() for function in methods[name]]
        functions += called
        pending = {name for function in called for name in _names(function.__code__)} - read
        read |= pending
    return frozenset(read), tuple(functions)


@cache
def _methods(kind: Any) -> dict[str, list[FunctionType]]:
    """The functions of a class by name, its bases' too, but those of every module."""
    found: dict[str, list[FunctionType]] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items() if base not in (nn.Module, object) else ():
            inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(inner, FunctionType):
                found.setdefault(name, []).append(inner)
    return found


@cache
def _defaults(kind: Any) -> dict[str, object]:
    """Plain values that a class of the user's gives to its objects."""
    own = [base for base in kind.__mro__ if _is_own(getattr(sys.modules.get(base.__module__), "__file__", None) or "<none>")]
    held = {name: value for base in reversed(own) for name, value in vars(base).items() if isinstance(value, (*_PLAIN, list, tuple))}
    return {name: value for name, value in held.items() if not name.startswith("__")}


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Names that code reads as globals or attributes, with the code inside it."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inside)


@cache
def _is_own(file: str) -> bool:
    """Whether code is a script's or a package's of the user, not an installed library's."""
    return is_users(file) and not file.startswith(_LIBRARIES)
