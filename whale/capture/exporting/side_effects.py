"""What a plain step does each time and a captured one only during capture: random draws outside torch, and state of later calls.

    lam = np.random.beta(1, 1)                  drawn once; every step mixes by the same
    self.calls += 1                             of a loss that is an object: counted once
    self.state = f(self.state, x)               of a module: each step starts from the first value

During a capture each attribute near the model has a descriptor on the object's class. So attributes that the code never reads may change
from step to step (``trainer.num_steps``) without a new capture. An attribute that is read before it is written, and changes, is state.
Values for others (``self.last_attention = ...``) or for the same call (``self.mask = ...; ... self.mask``) are written first.
"""

from __future__ import annotations

import inspect
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from whale.capture.exporting.held_values import MISSING
from whale.capture.exporting.near_values import OF_EVERY_MODULE, VARIABLE, NearValues, Noted, Snapshot, are_same, comparable, of_globals
from whale.capture.source import is_of_a_library, user_line
from whale.errors import CaptureError, first_few
from whale.ir.scope import SourceLine


class SideEffects:
    """Restores what the calls of a capture change after each call, so that all start alike.

    The global generators of Python and NumPy get `seed`: traces of one seed draw alike, whatever the script has drawn.
    """

    def __init__(self, near: NearValues, seed: int = 0, carried: tuple[Left, ...] = ()) -> None:
        self._near, self._seed, self._carried = near, seed, carried
        self.left: tuple[Left, ...] = ()  # what the model's last call may have left for its next
        self.tables: tuple[Left, ...] = ()  # what it has made in attributes, and its next call may look for
        self.beside: tuple[Left, ...] = ()  # these, and the plain values next to them: what the next call begins with
        self.moved: tuple[str, ...] = ()  # the plain values of `carried` that it has changed
        self.carried_on: tuple[Left, ...] = ()  # `carried`, as it has left them
        self.drawn: tuple[str, ...] = ()  # the generators that were drawn from
        self.written: tuple[str, ...] = ()  # changes of closures, classes, globals and objects of the loss

    @contextmanager
    def undone(self) -> Iterator[Snapshot]:
        """Around one call of the model and its loss, which starts with what is `carried` from an earlier one."""
        numpy = sys.modules.get("numpy.random")
        shared = {"random": random, **({} if numpy is None else {"numpy.random": numpy})}
        generators = {**shared, **self._near.generators}
        states = {name: _state(generator) for name, generator in generators.items()}
        for generator in shared.values():
            generator.seed(self._seed)
        began = {name: pickle.dumps(_state(generator)) for name, generator in generators.items()}
        kept = Snapshot([*self._near.places.values(), *of_globals(self._near.functions)])
        for each in self._carried:
            each.put()
        try:
            yield kept
        finally:
            self.written = tuple(kept.restore())
            self.drawn = tuple(name for name, generator in generators.items() if pickle.dumps(_state(generator)) != began[name])
            for name, generator in generators.items():
                _set_state(generator, states[name])

    def note(self, left: tuple[Left, ...], tables: tuple[Left, ...]) -> None:
        """Takes what a call has left, before it is undone."""
        self.left, self.tables, self.moved = left, tables, tuple(each.name for each in self._carried if each.has_moved)
        self.carried_on = tuple(now for each in self._carried for now in each.of_now())

    def warnings(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """The warnings; `lines` are those where other draws give another graph."""
        return (*([_text_of_draws(self.drawn, lines)] if self.drawn else []), *([_text_of_writes(self.written)] if self.written else []))


def _text_of_draws(drawn: tuple[str, ...], lines: tuple[str, ...]) -> str:
    return (
        f"random numbers of Python and NumPy are drawn only during capture ({first_few([*lines, *drawn])}): each step uses the "
        "same numbers; draw them with torch, as tensors (torch.rand(())), or in the data set, as a tensor of the batch"
    )


def _text_of_writes(written: tuple[str, ...]) -> str:
    return (
        "plain values that the loss writes, or the model in globals and closures, are written only during capture: each step "
        f"starts from the values at capture ({first_few(written)}); write them in the script, between steps, or keep them in a buffer of "
        "the model"
    )


def _state(generator: Any) -> Any:
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


_OF_ENVIRON = (os.environ.get.__func__.__code__.co_filename, os.getenv.__code__.co_filename)  # type: ignore[attr-defined]
_Key = tuple[int, str]
_PLAIN = (bool, int, float, str, Tensor, type(None))
_REGISTERS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_HOOKS = tuple(name for name in sorted(OF_EVERY_MODULE) if name.endswith("_hooks"))


class AttributeAccess:
    """Reads and writes of the attributes of near objects."""

    def __init__(self, near: NearValues) -> None:
        self._near = near
        self._read: set[_Key] = set()
        self._variables: set[str] = set()
        self._first: dict[_Key, object] = {}
        self._written: dict[_Key, tuple[dict[str, Any], SourceLine | None]] = {}
        self._missed: set[_Key] = set()  # attributes that the call has looked for in vain before it wrote them

    @contextmanager
    def noted(self) -> Iterator[None]:
        placed = [(kind, name, vars(kind).get(name, MISSING)) for kind, names in self._near.noted.items() for name in names]
        placed = [(kind, name, own) for kind, name, own in placed if self._place(kind, name)]
        get = type(os.environ).__getitem__

        def variable(environ: Any, name: str) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in _OF_ENVIRON:
                frame = frame.f_back
            if not is_of_a_library(frame.f_code.co_filename):
                self._variables.add(f"{VARIABLE}{name}")
            return get(environ, name)

        try:
            with mock.patch.object(type(os.environ), "__getitem__", variable):
                yield
        finally:
            for kind, name, own in placed:
                if own is not MISSING:
                    setattr(kind, name, own)
                elif isinstance(vars(kind).get(name), Noted):
                    delattr(kind, name)

    def _place(self, kind: type, name: str) -> bool:
        default = inspect.getattr_static(kind, name, MISSING)
        if hasattr(type(default), "__set__"):
            return False
        try:
            setattr(kind, name, _Noted(self, name, default))
        except (TypeError, AttributeError):  # a class that takes no attributes: all of its objects' count
            self._read |= {place.key for place in self._near.places.values() if place.key is not None and place.key[1] == name}
            return False
        return True

    def begin(self) -> None:
        self._first, self._written, self._missed = {}, {}, set()

    @property
    def read(self) -> frozenset[str]:
        """The paths that count: places that were read or cannot be noted, and environment variables."""
        places = self._near.places.values()
        return frozenset(self._variables) | {place.path for place in places if place.key is None or place.key in self._read}

    def handed_on(self, is_known: Callable[[Tensor], bool], *, has_new_hooks: bool) -> tuple[str, ...]:
        """What the call has read, changed and left for the next, as ``Encoder.state at model.py:12``.

        Tensors made from plain numbers (`is_known`) are tables, made once; a flag may record that hooks were registered.
        """
        found = []
        for (owner, name), (held, line) in self._written.items():
            label, is_of_model = self._near.owners.get(owner, ("", False))
            before, now = self._first.get((owner, name), MISSING), held.get(name, MISSING)
            if not is_of_model or before is MISSING or not isinstance(now, _PLAIN):
                continue
            is_same = now is before or (type(now) is type(before) and not isinstance(now, Tensor) and now == before)
            is_made_once = (before is None and (not isinstance(now, Tensor) or is_known(now))) or (has_new_hooks and isinstance(now, bool))
            if not is_same and not is_made_once:
                found.append(f"{label}.{name} at {line}" if line is not None else f"{label}.{name}")
        return tuple(dict.fromkeys(found))

    def made(self) -> tuple[KeptTensor, ...]:
        """The tensors in attributes of the model that the call has looked for in vain, and then made for the next."""
        return tuple(
            KeptTensor(f"{self._near.owners[key[0]][0]}.{key[1]}", line, tensor, False, is_attribute=True, owner=key[0])
            for key, (held, line) in self._written.items()
            if key in self._missed and key[0] in self._near.owners
            for tensor in pytree.tree_leaves(held.get(key[1]))
            if isinstance(tensor, Tensor)
        )

    def left(self, before: Iterable[Fresh]) -> tuple[tuple[Left, ...], tuple[Left, ...]]:
        """Attributes of the model that are new after the call: plain ones that it has looked for, and those whose reads are not noted; and
        those with tensors that it has written.
        """
        left, tables = list[Left](), list[Left]()
        for each in before:
            for name in sorted(each.live.keys() - each.names):
                key, label = (id(each.live), name), self._near.owners.get(id(each.live), ("model", True))[0]
                for new in Left.of(f"{label}.{name}", id(each.live), partial(_itself, each.live), name):
                    if key not in self._written or (key in self._missed and not new.tensors):
                        left.append(new)
                    elif new.tensors:
                        tables.append(new)
        return tuple(left), tuple(tables)

    def misses(self, held: dict[str, Any], name: str) -> None:
        if (id(held), name) not in self._written:
            self._missed.add((id(held), name))

    def reads(self, held: dict[str, Any], name: str, value: object) -> None:
        key = id(held), name
        self._read.add(key)
        if key not in self._written:
            self._first.setdefault(key, value)

    def writes(self, held: dict[str, Any], name: str) -> None:
        self._written[id(held), name] = held, user_line()


class _Noted(Noted):
    """A descriptor that notes accesses to an attribute of a class's objects, with the class's own value as default."""

    def __init__(self, access: AttributeAccess, name: str, default: Any) -> None:
        self._access, self._name, self.default = access, name, default

    def __get__(self, instance: Any, owner: type) -> Any:
        held = {} if instance is None else _namespace(instance)
        value = held.get(self._name, MISSING)
        if value is MISSING and self.default is not MISSING:
            is_bound = hasattr(type(self.default), "__get__")
            value = self.default.__get__(instance, owner) if is_bound else self.default
        if value is MISSING:
            if instance is not None:
                self._access.misses(held, self._name)
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}", name=self._name, obj=instance)
        if instance is not None:
            self._access.reads(held, self._name, value)
        return value

    def __set__(self, instance: Any, value: object) -> None:
        held = _namespace(instance)
        self._access.writes(held, self._name)
        held[self._name] = value

    def __delete__(self, instance: Any) -> None:
        del _namespace(instance)[self._name]


def _namespace(instance: object) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(instance, "__dict__")  # a class's own __getattribute__ may read attributes, too
    return found


@dataclass(frozen=True)
class Fresh:
    live: dict[str, Any]
    names: frozenset[str]
    hooks: frozenset[tuple[str, int]]
    registered: Mapping[str, Any]  # copies of the registers of parameters, buffers and modules

    @property
    def new_hooks(self) -> frozenset[tuple[str, int]]:
        """Hooks registered since, each as its attribute and number."""
        return _hooks(self.live) - self.hooks


def fresh(model: nn.Module) -> tuple[Fresh, ...]:
    """What all modules hold before a call: attributes, hooks, parameters, buffers and modules."""
    found = {id(vars(module)): vars(module) for module in model.modules()}  # torch puts several proxies before a shared module
    return tuple(Fresh(live, frozenset(live), _hooks(live), {name: live[name].copy() for name in _REGISTERS}) for live in found.values())


def forget_new(before: Iterable[Fresh]) -> None:
    """Removes what a traced call has added to modules: attributes and buffers (fake tensors), hooks, parameters, modules.

    A call that registers hooks once records that in an attribute; without it the next trace registers them again. A call that registers
    a buffer (a mask, a table) where the last one is missing or too short registers it in each trace.
    """
    for each in before:
        for kind, number in each.new_hooks:
            del each.live[kind][number]
        for name in each.live.keys() - each.names:
            del each.live[name]
        for name, held in each.registered.items():
            each.live[name].clear()
            each.live[name].update(held)


@dataclass(frozen=True)
class Left:
    """A value that a call has put into an attribute, or a dict, of the model; whether the next call reads it is not known."""

    name: str
    owner: int  # id of the namespace of the module
    read: Callable[[], Any]  # gives the namespace or dict, of which torch's export makes copies
    key: Any
    value: Any  # with what makes zeros in place of tensors
    tensors: tuple[Tensor, ...]  # of the call

    @staticmethod
    def of(name: str, owner: int, read: Callable[[], Any], key: Any) -> Iterator[Left]:
        """The value that is there, if it is made of tensors and plain values."""
        value = read()[key]
        leaves = pytree.tree_leaves(value)
        if all(isinstance(leaf, _PLAIN) for leaf in leaves):
            tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
            yield Left(name, owner, read, key, pytree.tree_map_only(Tensor, _zeros, value), tensors)

    def put(self) -> None:
        """Puts it where it was, as no part of a trace."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing(), disable_functional_mode():
            self.read()[self.key] = pytree.tree_map_only(partial, call, self.value)

    def of_now(self) -> Iterator[Left]:
        """What is there now."""
        if self.key in self.read():
            yield from Left.of(self.name, self.owner, self.read, self.key)

    @property
    def has_moved(self) -> bool:
        """Whether a call that began with a plain value has put another one there."""
        return not self.tensors and not are_same(comparable(self.value), comparable(self.read().get(self.key, MISSING)))


def _itself(held: dict[str, Any]) -> dict[str, Any]:
    return held


def _zeros(tensor: Tensor) -> partial[Tensor]:
    """Makes a tensor of the sizes at the example, in the memory of one element."""
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    return partial(_of_one_zero, sizes, tensor.dtype, tensor.device)


def _of_one_zero(sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(sizes)


def left_in(kept: Snapshot) -> Iterator[Left]:
    """What a call has left in dicts of the model's modules."""
    for each in kept.changed_dicts():
        for key in each.held:
            if each.before.get(key, MISSING) is not each.held[key]:
                yield from Left.of(f"{each.label}[{key!r}]", each.owner, each.read, key)


@dataclass(frozen=True)
class KeptTensor:
    """A buffer that a call registers, or a tensor that it keeps in an attribute that it has made."""

    name: str  # as ``blocks.0.mask``
    where: SourceLine | None
    tensor: Tensor
    is_written: bool  # whether it was written to after it was registered
    is_attribute: bool = False
    owner: int = 0  # of an attribute, id of the module's namespace
    left: Left | None = None  # where it may not be read again


class Registrations:
    """What a call registers in modules: buffers may hold tables that depend on sizes alone; parameters are refused."""

    def __init__(self, before: Iterable[Fresh]) -> None:
        self._before = {id(each.live): each for each in before}
        self._noted: list[tuple[nn.Module, str, Tensor, int, SourceLine | None]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        handle = register_module_buffer_registration_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self._noted.append((module, name, tensor, tensor._version, user_line()))

    def checked(self, model: nn.Module) -> tuple[KeptTensor, ...]:
        """The buffers that are there after the call, and were not before.

        Raises:
            CaptureError: a parameter is registered, too.
        """
        held = {id(tensor) for each in self._before.values() for tensor in each.registered["_buffers"].values()}
        names = {id(module): name for name, module in model.named_modules()}
        for module in model.modules():
            before = self._before.get(id(vars(module)))
            known = {} if before is None else before.registered["_parameters"]
            if added := [name for name, parameter in module._parameters.items() if parameter is not None and name not in known]:
                raise CaptureError(
                    f"forward registers parameter {added[0]} of {type(module).__name__}, which no optimizer would step",
                    hint="make it in __init__, or run the model on one batch before parallelize",
                )
        return tuple(
            KeptTensor(f"{names[id(module)]}.{name}".removeprefix("."), line, tensor, tensor._version != version)
            for module, name, tensor, version, line in self._noted
            if id(module) in names and module._buffers.get(name) is tensor and id(tensor) not in held
        )


def _hooks(attributes: dict[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((kind, number) for kind in _HOOKS for number in attributes[kind] or ())


def warning_of(names: tuple[str, ...]) -> str:
    return (
        "plain attributes that forward writes for its next call are written only during capture: each step starts from the values "
        f"at capture ({first_few(names)}); keep what the next step needs in a buffer (register_buffer)"
    )
