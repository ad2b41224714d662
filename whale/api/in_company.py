"""Verbs that all ranks call together: one that fails on this rank alone does not leave the others waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from whale.runtime.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="HasRuntime")


class HasRuntime(Protocol):
    """What a plan is at work for."""

    runtime: Runtime


def in_company(verb: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Tells the other ranks at once where a verb ends in an error that they know nothing of (`whale.comm.World.in_company`)."""

    @functools.wraps(verb)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.runtime.roster.world.in_company():
            return verb(self, *args, **kwargs)

    return call
