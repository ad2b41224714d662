"""The order of actions of one rank, with what follows from it for every step alike: worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from whale.ir.schedule import Action, Kind

_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
_KEEPS = _BACKWARD | {Kind.SEND_FORWARD, Kind.SEND_BACKWARD}


@dataclass(frozen=True)
class ActionOrder:
    """What a rank does in a step.

    Attributes:
        actions: in turn.
    """

    actions: tuple[Action, ...]

    @cached_property
    def named(self) -> tuple[tuple[Action, str], ...]:
        """The actions, each with its text."""
        return tuple((action, str(action)) for action in self.actions)

    @cached_property
    def after_forward(self) -> Mapping[int, frozenset[Kind]]:
        """Per stage, what happens to each of its micro-batches after the forward, receives aside."""
        found: dict[int, frozenset[Kind]] = {}
        for action in self.actions:
            if action.stage is not None:
                found[action.stage] = found.get(action.stage, frozenset()) | ({action.kind} & _KEEPS)
        return found

    @cached_property
    def recomputed(self) -> frozenset[tuple[int | None, int | None]]:
        """Stages and micro-batches whose forward runs again."""
        return frozenset((action.stage, action.micro_batch) for action in self.actions if action.kind is Kind.RECOMPUTE)

    @cached_property
    def last_backward(self) -> Mapping[int | None, Action]:
        """Per stage, the action after which its gradients are final."""
        return {action.stage: action for action in self.actions if action.kind in _BACKWARD}
