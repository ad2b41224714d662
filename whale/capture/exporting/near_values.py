"""Values near a model and its loss, compared in each step: what their modules, objects, classes and functions hold.

    self.scale, self.parts[0], drop.p, part.training    attributes of modules, of the loss, of objects in them
    Net.scale, Net.forward                              their classes
    lambda output, batch: weight * mean(output)         closures, defaults, arguments of `functools.partial`
    layer.register_forward_hook(...)                    hooks
    FACTOR, options.factor, settings.FACTOR             plain globals, and plain attributes of global objects, classes and modules
    os.environ["FACTOR"]                                environment variables

The capture notes which attributes and variables are read (`whale.capture.exporting.side_effects`). Of globals those count whose names
stand in the user's code that `forward`, the loss and the hooks reach by names. Changes further away (iterators, items of large lists,
attributes of attributes of globals) are found when the model is traced again (`whale.capture.comparing`).
"""

from __future__ import annotations

import argparse
import copy
import dis
import functools
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, compress
from operator import call, getitem, is_not
from random import Random, SystemRandom
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from whale.capture.exporting.held_values import MISSING, HeldItems, HeldValues, in_columns
from whale.capture.source import is_of_a_library

VARIABLE = "os.environ."
"""Prefix of an environment variable's path."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_NO_NAMESPACE: dict[str, Any] = {}
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, deque, set, frozenset)
_MOST_ITEMS = 64  # of a container or NumPy array whose contents are compared
_DEEPEST = 3  # nesting of objects that is followed


@dataclass(frozen=True, eq=False)
class _TheObject:
    """An object without contents to compare: compared by identity."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        if isinstance(self.value, Tensor):
            return "a tensor"
        return getattr(self.value, "__qualname__", f"another {type(self.value).__name__}")


def comparable(value: object, depth: int = 0) -> object:
    """A snapshot that can be compared: the contents of a small value, else the object itself."""
    if value is MISSING or isinstance(value, _PLAIN):
        return value
    inside = functools.partial(comparable, depth=depth + 1)
    if isinstance(value, functools.partial):
        return "partial", *map(inside, (value.func, value.args, value.keywords))
    if depth < _DEEPEST and isinstance(value, (set, frozenset)) and len(value) <= _MOST_ITEMS:
        return frozenset(map(inside, value))
    if depth < _DEEPEST and isinstance(value, _SEQUENCES) and len(value) <= _MOST_ITEMS:
        return tuple(map(inside, value))
    if depth < _DEEPEST and isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return tuple((inside(key), inside(item)) for key, item in value.items())
    if _is_numpys(value) and getattr(value, "size", _MOST_ITEMS + 1) <= _MOST_ITEMS and not isinstance(value, type):
        array: Any = value
        return str(array.dtype), array.tolist() if array.ndim == 0 else tuple(array.ravel().tolist())
    return _TheObject(value)


def are_same(then: object, now: object) -> bool:
    """Whether two comparable values are equal; NaN equals itself."""
    return then is now or then == now


@dataclass(frozen=True)
class NearPlace:
    path: str  # unique, and equal in each process and each walk
    label: str  # as the user may call it
    read: Callable[[], object]  # gives the value, or `MISSING`
    write: Callable[[object], None]  # sets it
    key: tuple[int, str] | None = None  # id of the namespace and attribute whose reads are noted; None if the value always counts
    is_of_model: bool = False  # whether a module of the model holds it
    is_flag: bool = False  # whether it is a module's training flag
    entry: tuple[Mapping[str, Any], str] | None = None  # the namespace, and the name in it, whose value `read` gives; None for others
    is_of_hooks: bool = False  # whether `entry` has all hooks of a module, of which `read` gives the user's


class Seen:
    """The values of places at one moment."""

    def __init__(self, model: nn.Module, places: Iterable[NearPlace]) -> None:
        self._model = model
        self._held = [(place, value, comparable(value) if _may_change(value) else None) for place in places for value in (place.read(),)]
        self._read: frozenset[str] = frozenset()
        self._watched = _Watched([])

    def changed(self, read: frozenset[str], *, trains: bool) -> list[str]:
        """Changes since in the places `read`, for a message; training flags count if `trains` and the model is in training mode."""
        if read is not self._read:
            self._read, self._watched = read, _Watched([each for each in self._held if each[0].path in read])
        found = []
        for place, value, inside in self._watched.suspects(counts_flags=trains and self._model.training):
            then, after = comparable(value) if inside is None else inside, comparable(place.read())
            if not are_same(then, after):
                found.append(f"{place.label}: {then!r}, now {after!r}")
        return found


_Held = tuple[NearPlace, object, object]
"""A place, its value, and that as `comparable` where it may change and be the same object."""


class _Watched:
    """Places that are compared in each step, all by identity first."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self._held = held
        self._others: list[int] = []  # where identity says nothing
        self._with_items: list[int] = []
        entries, flags = list[tuple[int, Mapping[str, Any], str, object]](), list[tuple[int, Mapping[str, Any], str, object]]()
        hooks, reads, containers = [], [], list[Any]()
        for number, (place, value, inside) in enumerate(held):
            entered = [] if inside is None else _containers(value) if comparable(value) == inside else None
            if place.entry is not None and place.is_of_hooks and value == ():
                hooks.append((number, *place.entry))
            elif place.is_of_hooks or entered is None:
                self._others.append(number)
            elif place.entry is None:
                reads.append((number, place.read, value))
            else:
                (flags if place.is_flag else entries).append((number, *place.entry, value))
            if entered:
                self._with_items.append(number)
                containers += entered
        self._entries, self._flags, self._contents = HeldValues(entries), HeldValues(flags), HeldItems(containers, _MOST_ITEMS)
        self._hooks, self._reads = in_columns(hooks, 3), in_columns(reads, 3)

    def suspects(self, *, counts_flags: bool) -> list[_Held]:
        """What may have changed, in order."""
        numbers, namespaces, names = self._hooks
        found = [*self._others, *self._entries.differing(), *compress(numbers, map(dict.get, namespaces, names))]
        numbers, reads, values = self._reads
        found += compress(numbers, map(is_not, map(call, reads), values))
        if counts_flags:
            found += self._flags.differing()
        if not self._contents.are_same():
            found += self._with_items
        return [self._held[number] for number in sorted(set(found))]


def _containers(value: object, depth: int = 0) -> list[Any] | None:
    """The containers whose items `comparable` compares, however deep; None where other contents count."""
    if isinstance(value, functools.partial) or _is_numpys(value) or (isinstance(value, dict) and type(value) is not dict):
        return None
    if depth == _DEEPEST or not isinstance(value, (*_SEQUENCES, dict)):
        return []
    found: list[Any] = [value]
    items = chain(value, value.values()) if isinstance(value, dict) else value
    for item in items if len(value) <= _MOST_ITEMS else ():
        inner = _containers(item, depth + 1)
        if inner is None:
            return None
        found += inner
    return found


def _may_change(value: object) -> bool:
    """Whether a value may change and be the same object."""
    if isinstance(value, (tuple, frozenset)):
        return len(value) <= _MOST_ITEMS and any(map(_may_change, value))
    return isinstance(value, (*_SEQUENCES, dict, functools.partial)) or _is_numpys(value)


def _is_numpys(value: object) -> bool:
    return type(value).__module__ == "numpy"


class NearValues:
    """The places near a model and its loss (None: the model's own)."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self.model = model
        self.places: dict[str, NearPlace] = {}  # by path
        self.generators: dict[str, Any] = {}  # of random numbers, by what the code calls them
        self.functions: list[FunctionType] = []  # of the user's, whose closures and defaults are among the places
        self.noted: dict[type, set[str]] = {}  # per class, the attributes of its objects whose reads can be noted
        self.owners: dict[int, tuple[str, bool]] = {}  # by id of a namespace: the object's label, whether it is a module of the model
        self._seen: dict[int, object] = {}
        self._methods: dict[str, list[FunctionType]] = {}  # of the user's classes, by name
        self._of_model = frozenset(id(vars(module)) for module in model.modules())
        for name, module in model.named_modules():
            label = name or type(model).__name__
            self._add(f"model.{name}.training", f"{label}.training", vars(module), "training", is_flag=True)
        self._find(model, "model", type(model).__name__, 0)
        self._find(loss, "loss", type(loss).__name__, 0)
        for place in self._globals_read():
            self.places[place.path] = place
        for held in _globals(self.functions):
            self.generators |= {name: value for name, value in held.items() if _is_generator(value)}

    def seen(self, read: Iterable[str]) -> Seen:
        """The values of now; of environment variables, of those whose paths have been read."""
        return Seen(self.model, [*self.places.values(), *_variables(read)])

    def kept(self, read: Iterable[str]) -> Snapshot:
        """The values of now of the places `read`, to be restored."""
        return Snapshot([*(self.places[path] for path in read if path in self.places), *_variables(read)])

    # ---- the walk --------------------------------------------------------------------------------------------

    def _find(self, value: object, path: str, label: str, depth: int) -> None:
        if isinstance(value, (*_PLAIN, Tensor, ModuleType)) or id(value) in self._seen or depth > _DEEPEST:
            return
        if isinstance(value, type):
            self._kind(value, depth)
            return
        self._seen[id(value)] = value  # kept, so that its id stays its own
        if isinstance(value, FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, MethodType):
            self._find(value.__func__, f"{path}()", label, depth)
            self._find(value.__self__, f"{path}.self", type(value.__self__).__name__, depth)
        elif isinstance(value, functools.partial):
            for name, each in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._find(each, f"{path}.{name}", label, depth)
        elif isinstance(value, (*_SEQUENCES, dict)):
            items = value.values() if isinstance(value, dict) else value
            for number, item in enumerate(items if len(value) <= _MOST_ITEMS else ()):
                self._find(item, f"{path}[{number}]", f"{label}[{number}]", depth + 1)
        elif _is_generator(value):
            self.generators[label] = value
        else:
            self._object(value, path, label, depth)

    def _object(self, value: Any, path: str, label: str, depth: int) -> None:
        kind: Any = type(value)
        if _is_of_a_library(kind) and not isinstance(value, (nn.Module, *_NAMESPACES)):
            return
        held, can_note = getattr(value, "__dict__", _NO_NAMESPACE), not _is_of_a_library(kind)
        is_module = isinstance(value, nn.Module)
        self._kind(kind, depth)
        names = [name for name in {**held, **_class_values(kind)} if not (is_module and name in OF_EVERY_MODULE)]
        if names:
            self.owners[id(held)] = label, id(held) in self._of_model
        for name in names if held is not _NO_NAMESPACE else ():
            self._add(f"{path}.{name}", f"{label}.{name}", held, name, is_noted=can_note and _can_note(kind, name))
            if can_note and _can_note(kind, name):
                self.noted.setdefault(kind, set()).add(name)
        if is_module and can_note and id(held) in self._of_model:  # what `forward` may make: whether it looks for it first is noted
            made = {name for name in _stored(kind) if name not in held and name not in OF_EVERY_MODULE and _can_note(kind, name)}
            self.noted.setdefault(kind, set()).update(made)
            self.owners.setdefault(id(held), (label, True))
        for name in _slots(kind):
            read, write = partial(getattr, value, name, MISSING), partial(setattr, value, name)
            self.places[f"{path}.{name}"] = NearPlace(f"{path}.{name}", f"{label}.{name}", read, write)
        for name in names:
            self._find(held.get(name), f"{path}.{name}", f"{label}.{name}", depth + (0 if is_module else 1))
        if is_module:
            self._module(value, path)

    def _module(self, module: nn.Module, path: str) -> None:
        label = type(module).__name__
        self._add(f"{path}.forward", f"{label}.forward", vars(module), "forward")
        for kind in _HOOKS:
            place, text = f"{path}.{kind}", f"{label}: {kind.strip('_').replace('_', ' ')}"
            read, entry = partial(_hooks, module, kind), (vars(module), kind)
            self.places[place] = NearPlace(place, text, read, lambda _: None, is_of_model=True, entry=entry, is_of_hooks=True)
            for number, hook in enumerate(_hooks(module, kind)):
                self._find(hook, f"{place}.{number}", label, 0)
        if id(vars(module)) not in self._of_model:
            for name in module._buffers:
                self._add(f"{path}.{name}", f"{label}.{name}", module._buffers, name)
        for name, child in module._modules.items():
            self._find(child, f"{path}.{name}", type(child).__name__, 0)

    def _function(self, function: FunctionType, path: str, depth: int) -> None:
        self.functions.append(function)
        self._find(getattr(function, "__wrapped__", None), f"{path}.wrapped", function.__name__, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = f"{path}<{name}>"
            self.places[place] = NearPlace(place, name, partial(_contents, cell), partial(setattr, cell, "cell_contents"))
            self._find(_contents(cell), place, name, depth + 1)
        for name in ("__defaults__", "__kwdefaults__") if function.__defaults__ or function.__kwdefaults__ else ():
            place, label = f"{path}.{name}", f"{function.__name__}: defaults"
            self.places[place] = NearPlace(place, label, partial(getattr, function, name), partial(setattr, function, name))
            self._find(getattr(function, name), place, label, depth + 1)
        for name in vars(function).keys() - {"__wrapped__"}:
            self._add(f"{path}.{name}", f"{function.__name__}.{name}", vars(function), name)

    def _kind(self, kind: Any, depth: int) -> None:
        for base in kind.__mro__:
            if _is_of_a_library(base) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            named = f"{base.__module__}.{base.__qualname__}"
            for name, member in list(vars(base).items()):
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if isinstance(function, FunctionType):
                    self._methods.setdefault(name, []).append(function)
                    self._find(function, f"{named}.{name}()", f"{base.__name__}.{name}", depth)
                if isinstance(function, FunctionType) or _is_value(name, member):
                    path, read, write = f"{named}.{name}", partial(_member, base, name), partial(setattr, base, name)
                    self.places[path] = NearPlace(path, f"{base.__name__}.{name}", read, write, entry=(vars(base), name))

    def _add(self, path: str, label: str, held: dict[str, Any], name: str, *, is_noted: bool = False, is_flag: bool = False) -> None:
        read, write, key = partial(held.get, name, MISSING), partial(_put, held, name), (id(held), name) if is_noted else None
        self.places[path] = NearPlace(path, label, read, write, key, id(held) in self._of_model, is_flag, (held, name))

    def _globals_read(self) -> Iterator[NearPlace]:
        """The plain globals whose names the user's code has, from ``forward``, the loss and the hooks on; methods are followed by name."""
        by_name = {id(each) for name, methods in self._methods.items() if not _is_of_a_call(name) for each in methods}
        pending, seen = [each for each in self.functions if id(each) not in by_name], set[int]()
        while pending:
            function = pending.pop()
            if id(function) in seen or is_of_a_library(function.__code__.co_filename):
                continue
            seen.add(id(function))
            names, held = _names(function.__code__), function.__globals__
            pending += [method for name in names for method in self._methods.get(name, ())]
            for name in names & held.keys():
                value, path = held[name], f"global {held.get('__name__')}.{name}"
                if isinstance(value, FunctionType):
                    pending.append(value)
                elif _is_plain(value):
                    yield _of_namespace(path, name, held, name)
                elif id(value) not in self._seen:
                    yield from _attributes_of_global(value, names, path, name)
                    pending += _functions_in(value, names)


def _is_of_a_call(name: str) -> bool:
    """Whether a method is part of a call without being named there."""
    return name == "forward" or (
        name.startswith("__") and name.endswith("__") and name not in ("__init__", "__new__", "__repr__", "__str__")
    )


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _is_plain(value: object) -> bool:
    return isinstance(value, (*_PLAIN, Enum)) or (type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0)


def _variables(read: Iterable[str]) -> Iterator[NearPlace]:
    return (_of_environment(path.removeprefix(VARIABLE)) for path in read if path.startswith(VARIABLE))


def _of_environment(name: str) -> NearPlace:
    path = f"{VARIABLE}{name}"
    return NearPlace(path, path, partial(os.environ.get, name, MISSING), partial(_put, os.environ, name))


def _of_namespace(path: str, label: str, held: dict[str, Any], name: str) -> NearPlace:
    return NearPlace(path, label, partial(held.get, name, MISSING), partial(_put, held, name), entry=(held, name))


def _attributes_of_global(value: Any, names: set[str], path: str, label: str) -> Iterator[NearPlace]:
    """The plain attributes with these names of a global object, class or module of the user's."""
    if isinstance(value, type):
        if not _is_of_a_library(value):
            for name in names & vars(value).keys():
                if _is_plain(vars(value)[name]):
                    read, write = partial(_member, value, name), partial(setattr, value, name)
                    yield NearPlace(f"{path}.{name}", f"{label}.{name}", read, write, entry=(vars(value), name))
        return
    if isinstance(value, ModuleType):
        is_users = not is_of_a_library(vars(value).get("__file__") or sys.executable)
    else:
        kind: Any = type(value)
        is_users = isinstance(value, _NAMESPACES) or not _is_of_a_library(kind)
    held = getattr(value, "__dict__", _NO_NAMESPACE) if is_users else _NO_NAMESPACE
    for name in names & held.keys():
        if _is_plain(held[name]):
            yield _of_namespace(f"{path}.{name}", f"{label}.{name}", held, name)


def _functions_in(value: Any, names: set[str]) -> Iterator[FunctionType]:
    """The functions with these names of a global module or class."""
    if isinstance(value, (ModuleType, type)):
        found = (vars(value)[name] for name in names & vars(value).keys())
        yield from (each for each in found if isinstance(each, FunctionType))


def of_globals(functions: Iterable[FunctionType]) -> Iterator[NearPlace]:
    """The plain globals of functions: too many to be watched, but a capture restores them."""
    for held in _globals(functions):
        for name, value in held.items():
            if isinstance(value, (*_PLAIN, *_SEQUENCES, dict)) and not name.startswith("__"):
                yield NearPlace(name, name, partial(held.get, name, MISSING), partial(_put, held, name), entry=(held, name))


def _globals(functions: Iterable[FunctionType]) -> list[dict[str, Any]]:
    return list({id(function.__globals__): function.__globals__ for function in functions}.values())


def _is_generator(value: object) -> bool:
    """Whether a value draws random numbers from a state of its own that can be restored."""
    is_numpys = type(value).__module__.startswith("numpy.random") and hasattr(value, "standard_normal")
    return is_numpys or (isinstance(value, Random) and not isinstance(value, SystemRandom))


class Snapshot:
    """The values of places, with the contents of containers, to be restored."""

    def __init__(self, places: Iterable[NearPlace]) -> None:
        self._held = [(place, value, list(_copied(value)), comparable(value)) for place in places for value in (place.read(),)]

    def restore(self) -> list[str]:
        """Restores changed values; returns the changes of all but the model's attributes, for a message."""
        changes = []
        for place, value, contents, then in self._held:
            now = comparable(place.read())
            if are_same(then, now):
                continue
            if not place.is_of_model and then is not None:  # None before: a cache, made once
                changes.append(f"{place.label}: {then!r}, now {now!r}")
            for _, container, before in contents:
                _refill(container, before)
            place.write(value)
        return changes

    def changed_dicts(self) -> Iterator[ChangedDict]:
        """The dicts of the model that are still there and have other items now, also those inside others."""
        for place, value, contents, then in self._held:
            if place.is_of_model and place.entry is not None and place.read() is value and not are_same(then, comparable(value)):
                for path, container, before in contents:
                    if isinstance(container, dict):
                        label = place.label + "".join(f"[{key!r}]" for key in path)
                        yield ChangedDict(label, id(place.entry[0]), partial(_inside, place.read, path), container, before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the places have the values of then."""
        now = Snapshot(place for place, *_ in self._held)
        self.restore()
        try:
            yield
        finally:
            now.restore()


@dataclass(frozen=True)
class ChangedDict:
    label: str
    owner: int  # id of the namespace of the module
    read: Callable[[], Any]
    held: dict[Any, Any]
    before: dict[Any, Any]


def _copied(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """The containers in a value that may change, each behind the keys that lead to it, with a copy."""
    if not isinstance(value, (*_SEQUENCES, dict)) or len(value) > _MOST_ITEMS or len(path) == _DEEPEST:
        return
    if isinstance(value, (list, dict, set, deque)):
        yield path, value, copy.copy(value)
    if not isinstance(value, (set, frozenset)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _copied(item, (*path, key))


def _inside(read: Callable[[], Any], path: tuple[Any, ...]) -> Any:
    return functools.reduce(getitem, path, read())


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(contents)


def _put(held: MutableMapping[str, Any], name: str, value: object) -> None:
    if value is MISSING:
        held.pop(name, None)
    else:
        held[name] = value


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return MISSING


class Noted:
    """Base of the descriptor that stands on a class during a capture; `default` is the class's own value, or `MISSING`."""

    default: Any


def _member(kind: type, name: str) -> object:
    found = vars(kind).get(name, MISSING)
    return found.default if isinstance(found, Noted) else found


def _hooks(module: nn.Module, kind: str) -> tuple[object, ...]:
    """The user's own hooks."""
    hooks = vars(module).get(kind)
    if not hooks:  # of most modules, in every step
        return ()
    return tuple(hook for hook in hooks.values() if not type(hook).__module__.startswith("whale."))


def _slots(kind: Any) -> list[str]:
    bases = [base for base in kind.__mro__ if not _is_of_a_library(base)]
    return [name for base in bases for name, member in vars(base).items() if inspect.ismemberdescriptor(member)]


def _class_values(kind: type) -> dict[str, object]:
    bases = [base for base in reversed(kind.__mro__) if not _is_of_a_library(base)]
    return {name: member for base in bases for name, member in vars(base).items() if _is_value(name, member)}


def _is_value(name: str, member: object) -> bool:
    return not name.startswith("__") and not hasattr(type(member), "__get__") and not name.startswith("_abc_")


def _stored(kind: type) -> frozenset[str]:
    """The names of attributes that the methods of a user's class assign to."""
    return frozenset[str]().union(*(_stored_by(base) for base in kind.__mro__ if not _is_of_a_library(base)))


_STORE = dis.opmap["STORE_ATTR"]


@functools.cache
def _stored_by(base: type) -> frozenset[str]:
    codes = (member.__code__ for member in vars(base).values() if isinstance(member, FunctionType))
    storing = (code for code in codes if _STORE in code.co_code[::2])  # to decode them all takes four times as long
    return frozenset(each.argval for code in storing for each in dis.get_instructions(code) if each.opcode == _STORE)


def _can_note(kind: type, name: str) -> bool:
    """Whether reads of an attribute can be noted: no data descriptor of the class intercepts them, and no metaclass (of enums, say) what
    is set on the class.
    """
    takes_any = type(kind).__setattr__ is type.__setattr__ and type(kind).__delattr__ is type.__delattr__
    return takes_any and not hasattr(type(inspect.getattr_static(kind, name, None)), "__set__")


@functools.cache
def _is_of_a_library(kind: Any) -> bool:
    """Whether a class is torch's, NumPy's, Whale's or Python's own: nobody changes it."""
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "numpy", "whale") or (package in sys.stdlib_module_names and package != "__main__")
