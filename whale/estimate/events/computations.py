"""The actions of one rank as its computations, each with what it waits for and what it sets off.

0RECV_F2 0F2 0SEND_F2 ... 0RECV_B2 0B2 0SYNC STEP
|        |   |
receives |   sends
         computation
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from whale.ir.schedule import COMPUTE, POSTS, RECEIVES, SENDS, Action, Kind


@dataclass
class Computation:
    """A computation, or the STEP at the end.

    Attributes:
        action: what is done.
        posts: receives that are started before it.
        receives: receives that are waited for before it.
        sends: sends that stand behind it.
        synced: stages whose gradients are final after it.
    """

    action: Action
    posts: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)
    sends: list[Action] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


def computations(actions: Iterable[Action]) -> list[Computation]:
    """The computations of a rank in order."""
    found: list[Computation] = []
    posts, receives = list[Action](), list[Action]()
    for action in actions:
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            found.append(Computation(action, posts, receives))
            posts, receives = [], []
        elif action.kind in POSTS:
            posts.append(action)
        elif action.kind in RECEIVES:
            receives.append(action)
        elif action.kind in SENDS:
            found[-1].sends.append(action)
        elif action.kind is Kind.SYNC:
            assert action.stage is not None
            found[-1].synced.append(action.stage)
    return found
