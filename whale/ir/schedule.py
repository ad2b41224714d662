"""The order of actions of each pipeline rank, as a value with a reversible text form.

0F0 0SEND_F0 0F1 0SEND_F1 1POST_B0 0RECV_B0 0B0 1POST_B1 0RECV_B1 0B1 LOSS 0SYNC STEP
|||
||micro-batch
|kind
stage
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does.

    B is the whole backward; I and W are its input and weight parts. POST starts to receive the message of another rank's SEND, RECV waits
    for it; LOSS starts the sum of the loss over all ranks.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    POST_FORWARD = "POST_F"
    POST_BACKWARD = "POST_B"
    LOSS = "LOSS"
    SYNC = "SYNC"
    STEP = "STEP"

    # Members are singletons, so identity will do; Enum's own hash is a Python call, felt by schedules of a million actions.
    __hash__ = object.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
POSTS = frozenset({Kind.POST_FORWARD, Kind.POST_BACKWARD})
# per POST, the SEND that it receives from, and is named after
SEND_OF = {Kind.POST_FORWARD: Kind.SEND_FORWARD, Kind.POST_BACKWARD: Kind.SEND_BACKWARD}
RECV_OF = {Kind.POST_FORWARD: Kind.RECV_FORWARD, Kind.POST_BACKWARD: Kind.RECV_BACKWARD}  # per POST, the RECV that waits for it
COMMUNICATION = SENDS | RECEIVES | POSTS | {Kind.LOSS}
LAUNCHES = SENDS | POSTS | {Kind.LOSS, Kind.SYNC}  # actions that start a message or a collective, in one order on all ranks

_ACTION = re.compile(r"(\d*)((?:SEND|RECV|POST)_[FB]|LOSS|SYNC|STEP|[FBIWR])(\d*)")
_HEAD = re.compile(r"schedule (\S+), (\d+) micro-batches, stages on ranks ([\d ]+)(?:, peak in flight ([\d ]+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank."""

    kind: Kind
    # a SEND or RECV names the stage on this rank, a POST the stage on another rank whose SEND it meets. None for LOSS and STEP.
    stage: int | None = None
    micro_batch: int | None = None  # None for SYNC, LOSS and STEP

    @staticmethod
    def parse(text: str) -> Action:
        """Reads ``2F0``, ``1RECV_B3``, ``0SYNC``, ``STEP``. Raises ValueError: the text is not an action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action")
        kind = Kind(match[2])
        wanted = {Kind.STEP: (False, False), Kind.LOSS: (False, False), Kind.SYNC: (True, False)}.get(kind, (True, True))
        if (bool(match[1]), bool(match[3])) != wanted:
            needs = " and ".join(f"{'a' if has else 'no'} {part}" for has, part in zip(wanted, ("stage", "micro-batch"), strict=True))
            raise ValueError(f"{text!r} is not an action: {kind.value} needs {needs}")
        return Action(kind, int(match[1]) if match[1] else None, int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        stage = "" if self.stage is None else str(self.stage)
        return f"{stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of one pipeline."""

    name: str  # of the builder (``1f1b``)
    num_micro_batch: int  # micro-batches of a step
    stage_rank: tuple[int, ...]  # per stage, the pipeline rank (virtual device) that runs it
    ranks: tuple[tuple[Action, ...], ...]  # per pipeline rank, its actions in order
    # per pipeline rank, the promised most chunk activations alive at once (F to last B or W); empty without a promise
    peak_in_flight: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)

    def __str__(self) -> str:
        placement = " ".join(str(rank) for rank in self.stage_rank)
        promise = f", peak in flight {' '.join(map(str, self.peak_in_flight))}" if self.peak_in_flight else ""
        lines = [f"schedule {self.name}, {self.num_micro_batch} micro-batches, stages on ranks {placement}{promise}"]
        lines += [f"rank {rank}: {format_actions(actions)}" for rank, actions in enumerate(self.ranks)]
        return "\n".join(lines)

    @staticmethod
    def parse(text: str) -> Schedule:
        """The inverse of ``str``. Raises ValueError: names the line that is not of the form."""
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        number, first = lines[0] if lines else (1, "")
        head = _HEAD.fullmatch(first)
        if head is None:
            raise ValueError(f"line {number}: expected 'schedule NAME, M micro-batches, stages on ranks R R ...[, peak in flight N N ...]'")
        ranks = []
        for rank, (number, line) in enumerate(lines[1:]):
            prefix, _, actions = line.partition(":")
            if prefix != f"rank {rank}":
                raise ValueError(f"line {number}: expected 'rank {rank}: ...', got {line[:40]!r}")
            try:
                ranks.append(parse_actions(actions))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        placement, promise = (tuple(int(word) for word in (part or "").split()) for part in (head[3], head[4]))
        return Schedule(head[1], int(head[2]), placement, tuple(ranks), promise)


def format_actions(actions: Iterable[Action]) -> str:
    return " ".join(str(action) for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())
