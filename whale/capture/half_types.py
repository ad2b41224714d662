"""The graph of a model whose half-precision type each device chooses, captured on a device that has chosen one.

on a V100    linear(float16) -> float16[b, 8]    ``aten.to.dtype(%x, dtype:float16)``
on an A100   linear(bfloat16) -> bfloat16[b, 8]
as a value   linear(HALF) -> HALF[b, 8]          equal on both; each rank's program stays in its own type
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from whale.errors import CaptureError, raise_faults
from whale.ir.graph import Argument, ModelGraph, Op
from whale.ir.precision import HALF, HALVES


@contextmanager
def limits_noted(own: str) -> Iterator[set[str]]:
    """Notes the limits of a type (`torch.finfo`) that code reads inside, by name."""
    noted, info_of, dtype = set[str](), torch.finfo, getattr(torch, own)

    class Noting:
        """Stands for what `torch.finfo` makes of the type."""

        def __getattr__(self, name: str) -> Any:
            noted.add(name)
            return getattr(info_of(dtype), name)

    class Info(type):
        """So that `isinstance(found, torch.finfo)` holds inside as outside."""

        def __call__(cls, *of: Any, **named: Any) -> Any:
            return Noting() if (*of, *named.values()) == (dtype,) else info_of(*of, **named)

        def __instancecheck__(cls, found: object) -> bool:
            return isinstance(found, (info_of, Noting))

    stand_in = Info("finfo", (), {})
    readers = [each for each in [*sys.modules.values()] if each is not torch and getattr(each, "__dict__", {}).get("finfo") is info_of]
    with ExitStack() as patched:
        for module in (torch, *readers):  # the others by ``from torch import finfo``
            patched.enter_context(mock.patch.object(module, "finfo", stand_in))
        yield noted


def for_any_device(graph: ModelGraph, own: str, limits: Collection[str]) -> ModelGraph:
    """The graph with `HALF` in place of this device's half-precision type.

    Args:
        graph: as captured.
        own: the type of this device.
        limits: of the type that the model reads.

    Raises:
        CaptureError: the model names a half-precision type itself, which the devices could not choose.
    """
    raise_faults(list(_stated(graph, own)))

    def settled(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(settled, argument))
        return f"dtype:{HALF}" if argument == f"dtype:{own}" else argument

    def described(op: Op) -> Op:
        return replace(
            op,
            args=tuple(map(settled, op.args)),
            kwargs=tuple((name, settled(value)) for name, value in op.kwargs),
            outputs=tuple(replace(spec, dtype=HALF) if spec.dtype == own else spec for spec in op.outputs),
        )

    parameters = tuple(replace(each, read_as=HALF) if each.read_as == own else each for each in graph.parameters)
    ops = tuple(map(described, graph.ops))
    return replace(graph, ops=ops, parameters=parameters, half_by_device=True, half_limits=tuple(sorted(limits)))


def _stated(graph: ModelGraph, own: str) -> Iterator[CaptureError]:
    """Half-precision types that the model has whatever the device."""
    hint = "set precision.dtype to bf16 or fp16, one type for all devices; or leave the type to it: x.to(y.dtype), model.float()"
    for each in graph.parameters:
        if each.spec.dtype in HALVES:
            yield CaptureError(
                f"precision.dtype: half lets each device choose its half-precision type, but {each.kind} {each.name} is {each.spec.dtype}",
                hint=hint,
            )
    others = {dtype for dtype in HALVES if dtype != own}
    for op in graph.ops:
        if op.kind != "parameter" and (odd := next((spec.dtype for spec in op.outputs if spec.dtype in others), None)):
            yield CaptureError(
                f"precision.dtype: half lets each device choose its half-precision type, {own} here, but %{op.name} ({op.target}) is {odd} "
                "everywhere",
                where=op.where,
                hint=hint,
            )
            return
