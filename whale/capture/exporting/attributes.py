"""What `forward` hands on to its next call in plain attributes of modules: a captured model starts each step from what was there first.

Found in two looks. What a capture leaves changed may be state, or a note for somebody else (``self.last_attention = ...``), or kept
for the same call alone (``self.mask = ...; ... self.mask``), or made once (``if self.table is None: self.table = ...``). The source of
the class tells: state is read before it is written anew.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whale.capture.source import line_inside
from whale.errors import first_few
from whale.ir.source import SourceLine

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in sorted(OF_EVERY_MODULE) if name.endswith("_hooks"))
_PLAIN = (bool, int, float, str, Tensor, type(None))


@dataclass(frozen=True)
class Held:
    """The plain attributes of one module at one moment, and the numbers of its hooks: `live` is what it has now."""

    module: nn.Module
    live: dict[str, Any]
    then: Mapping[str, object]
    hooks: frozenset[tuple[str, int]]

    @property
    def new_hooks(self) -> frozenset[tuple[str, int]]:
        """Those that were registered since, each as the attribute that holds it and its number."""
        return _hooks(self.live) - self.hooks


def held_attributes(model: nn.Module) -> tuple[Held, ...]:
    """What modules keep beside parameters, buffers and modules."""
    found = {id(vars(module)): module for module in model.modules()}  # torch puts several proxies before a shared module
    return tuple(Held(module, vars(module), _plain(vars(module)), _hooks(vars(module))) for module in found.values())


def _plain(attributes: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if name not in OF_EVERY_MODULE}


def _hooks(attributes: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((kind, number) for kind in _HOOKS for number in attributes[kind] or ())


def handed_on(before: Sequence[Held]) -> tuple[str, ...]:
    """What a call of `forward` has changed and the next would read, as ``Encoder.state at model.py:12``."""
    has_new_hooks = any(held.new_hooks for held in before)
    found = (
        _told(type(held.module), name, held.then.get(name), is_note_of_hooks=has_new_hooks and isinstance(value, bool))
        for held in before
        for name, value in _plain(held.live).items()
        if isinstance(value, _PLAIN) and not _is_same(held.then.get(name), value)
    )
    return tuple(dict.fromkeys(text for text in found if text))


def forget_new(before: Iterable[Held]) -> None:
    """Takes from modules what a traced call has left in attributes that they had not, tensors without values, and its hooks.

    A call that registers hooks once keeps a note of it in an attribute. Without the note the next trace registers them again.
    """
    for held in before:
        for kind, number in held.new_hooks:
            del held.live[kind][number]
        for name in _plain(held.live).keys() - held.then.keys():
            del held.live[name]


def warning_of(names: tuple[str, ...]) -> str:
    """What is said of them."""
    return (
        "what forward hands on to its next call in plain attributes is kept while the model is captured and never again: each step "
        f"starts from what was there before ({first_few(names)}); register_buffer what is to go on from step to step"
    )


def _is_same(before: object, now: object) -> bool:
    if isinstance(now, Tensor) or type(before) is not type(now):
        return before is now
    return before is now or before == now


def _told(kind: type, name: str, before: object, *, is_note_of_hooks: bool) -> str:
    uses = _uses(kind).get(name)
    if uses is None:  # set from elsewhere; where the call registered hooks, a flag says that these are there
        return "" if is_note_of_hooks else f"{kind.__name__}.{name}"
    line = uses.handed_on_at(is_flag=isinstance(before, bool))
    return "" if line is None else f"{kind.__name__}.{name} at {line}"


@dataclass(frozen=True)
class _Use:
    """A place where `forward`, or a method that it calls, reads or writes an attribute of its module.

    Attributes:
        writes: whether it is written.
        is_guarded: written only where a test of the attribute says so, and not made from what it was.
        line: of the user's.
    """

    writes: bool
    is_guarded: bool
    line: SourceLine | None


@dataclass(frozen=True)
class _Uses:
    """All uses of an attribute, in the order of the code."""

    uses: tuple[_Use, ...]

    def handed_on_at(self, *, is_flag: bool) -> SourceLine | None:
        """Where a value that an earlier call left is written anew; None where no call reads what another left.

        A flag that is set once stands for something else that was done once; another value is then only kept at hand.
        """
        is_read = False
        for use in self.uses:
            if not use.writes:
                is_read = True
            elif not use.is_guarded or is_flag:
                return use.line if is_read else None
        return None


def _uses(kind: type) -> Mapping[str, _Uses]:
    """Per attribute, its uses in `forward`; empty where there is no source."""
    reader = _Reader(kind)
    reader.read("forward")
    return {name: _Uses(tuple(uses)) for name, uses in reader.found.items()}


class _Reader(ast.NodeVisitor):
    """Reads methods in the order in which they run: values before targets, a called method where it is called."""

    def __init__(self, kind: type) -> None:
        self.found: dict[str, list[_Use]] = {}
        self._kind = kind
        self._inside: list[Any] = []
        self._tested: list[frozenset[str]] = []

    def read(self, method: str) -> None:
        """Reads a method, unless it is being read."""
        function = inspect.unwrap(inspect.getattr_static(self._kind, method, None) or object)
        tree = _tree_of(function)
        if tree is None or function in self._inside:
            return
        self._inside.append(function)
        for statement in tree.body:
            self.visit(statement)
        self._inside.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self._write(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._write(node.value, [node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        own = _own_attribute(node.target)
        if own is not None:
            self._note(own, node.target, writes=False)
        self._write(node.value, [node.target], made_from=frozenset() if own is None else frozenset({own}))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._tested.append(frozenset(_own_attributes(node.test)))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        self._tested.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        own = _own_attribute(node)
        if own is None:
            self.generic_visit(node)
        elif inspect.isfunction(inspect.getattr_static(self._kind, own, None)):
            self.read(own)
        else:
            self._note(own, node, writes=isinstance(node.ctx, ast.Store))

    def _write(self, value: ast.expr, targets: list[ast.expr], made_from: frozenset[str] = frozenset()) -> None:
        self.visit(value)
        made_from |= frozenset(_own_attributes(value))
        for target in targets:
            for node in ast.walk(target):
                own = _own_attribute(node)
                if own is not None and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self._note(own, node, writes=True, is_guarded=own not in made_from and any(own in names for names in self._tested))

    def _note(self, name: str, node: ast.AST, *, writes: bool, is_guarded: bool = False) -> None:
        line = line_inside(self._inside[-1], getattr(node, "lineno", 1))
        self.found.setdefault(name, []).append(_Use(writes, is_guarded, line))


def _own_attribute(node: ast.AST) -> str | None:
    """The attribute's name, of ``self.name``."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else None


def _own_attributes(tree: ast.AST) -> Iterator[str]:
    return (own for node in ast.walk(tree) if (own := _own_attribute(node)) is not None)


def _tree_of(function: object) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None
