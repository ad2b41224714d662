"""Following the speeds of the devices of a run, and finding when its plan no longer fits them.

Every rank has the same numbers and decides the same, without communication, that another plan is to be searched; rank 0 searches.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from whale.api.loader import DataPosition
from whale.api.opening import CheckedMove, Decided, Opening
from whale.comm import on_first_rank
from whale.errors import RuntimeFault, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.health import SLOW, WINDOW, Busy, DeviceHealth, Health
from whale.ir.plan import Plan
from whale.search.rebalancing import LEAST_GAIN, best_move, step_seconds
from whale.units import format_seconds

Check = Callable[[Opening, Decided], CheckedMove]
"""Makes a move of a plan, or raises why it cannot be made."""

EVERY = 4
"""Steps from one look to the next: a look takes some 0.1 ms for two devices, 20 ms for a thousand."""
NUM_FIRST = 2
"""Steps of a plan that are left out: they make programs and memory."""
MOST_GAIN_WANTED = 0.5


@dataclass(eq=False)
class Adapting:
    """What is known of the devices of the plan at work.

    Attributes:
        is_first: whether this is rank 0, which prints.
        tell: prints a message.
        overhead: seconds of the last planning and opening of a plan.
        least_gain: the share of a step that the next move must save by its prediction: doubled after a move that did not keep its
            prediction, halved after one that did.
    """

    is_first: bool
    tell: Callable[[str], None] = lambda text: print(f"whale: {text}", file=sys.stderr, flush=True)
    clock: Callable[[], float] = time.perf_counter
    overhead: float = 0.0
    least_gain: float = LEAST_GAIN
    _devices: tuple[str, ...] = ()
    _predicted: Busy = ()
    _assumed: Mapping[str, float] = field(default_factory=dict)
    _steps: deque[tuple[int, Busy]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _num_heard: int = 0
    _ended: float | None = None
    _looked_at: Mapping[str, float] | None = None
    _num_quiet: int = 0
    _is_said: bool = False
    _is_postponed: bool = False
    _health: Health = field(default_factory=Health)
    _promise: tuple[float, float] | None = None
    _next_promise: tuple[float, float] | None = None

    def take_up(self, plan: Plan, own_seconds: Busy, cluster: Cluster) -> None:
        """Follows the devices of a plan from here on.

        Args:
            own_seconds: predicted computing time of a step per rank of the plan; empty without a prediction.
            cluster: with the speeds that the plan was made for.
        """
        self._health, self._looked_at = self.health, None
        self._devices, self._predicted, self._assumed = plan.devices, own_seconds, cluster.slowdowns
        self._is_said = self._is_postponed = False
        self._steps.clear()
        self._seconds.clear()
        self._num_heard, self._ended = 0, None
        self._promise, self._next_promise = self._next_promise, None

    def hear(self, step_number: int, busy: Busy | None) -> bool:
        """Takes in what was measured.

        Args:
            step_number: steps done.
            busy: computing time of one of the last steps per rank of the plan; None where some rank has reported nothing.

        Returns:
            Whether devices persistently have speeds that the plan was not made for and nobody has looked at: the same on all ranks.
        """
        now, before = self.clock(), self._ended
        self._ended = now
        if busy is None:
            return False
        self._num_heard += 1
        if self._num_heard <= NUM_FIRST or not self._predicted:
            return False
        self._steps.append((step_number, busy))
        if before is not None:
            self._seconds.append(now - before)
        if self._num_heard % EVERY:
            return False
        self._judge()
        self._num_quiet = 0 if self.health.deviates else self._num_quiet + 1
        if self._num_quiet * EVERY >= WINDOW:
            # all is as the plan assumes again: what comes next is news
            self._looked_at, self._is_said, self._is_postponed = None, False, False
        waits = self._is_postponed and self._num_heard % WINDOW
        return not waits and self._health.deviates and self._is_news(self._health.slowdowns)

    def _is_news(self, slowdowns: Mapping[str, float]) -> bool:
        known = self._looked_at
        return known is None or any(not 1 / SLOW < slowdowns[name] / known.get(name, 1.0) < SLOW for name in slowdowns)

    @property
    def health(self) -> Health:
        """By what was measured up to now."""
        if self._steps and self._health.step_number != self._steps[-1][0]:
            before, self._health = self._health, Health.of(self._steps, self._devices, self._predicted, self._assumed, self._health)
            if self.is_first:
                was, now = ({each.device for each in one.slow} for one in (before, self._health))
                for device in sorted((was - now) & {*self._devices}):
                    self.tell(f"{device} is as fast as the others again (step {self._health.step_number})")
        return self._health

    def look(self, opening: Opening, plan: Plan, data: DataPosition, check: Check) -> CheckedMove | None:
        """Reacts to devices that are persistently faster or slower than planned; all ranks call it after the same step.

        Args:
            opening, plan: at work.
            data: of the engine.
            check: makes a move to a plan, or raises why it cannot be made.

        Returns:
            The move to make; None for none.
        """
        mode, slowdowns = opening.settings.runtime.rebalance, self.health.slowdowns
        self._say_slow(opening, plan, slowdowns)
        if mode == "on":
            needed = [each for each in opening.world.gather_objects(data.needed) if each]
            if needed:
                self._postpone(str(needed[0]))
                return None
        self.looked_at()
        return None if mode == "off" else self.better(opening, plan, slowdowns, check, moves=mode == "on", stays=True)

    def better(
        self, opening: Opening, plan: Plan, slowdowns: Mapping[str, float], check: Check, *, moves: bool, stays: bool
    ) -> CheckedMove | None:
        """Searches a plan that pays at other speeds, and prints the result; all ranks call it.

        Args:
            opening, plan, check: as of `look`.
            slowdowns: by device.
            moves: whether training goes on under it.
            stays: whether a move that cannot be made is a message; otherwise it is an error.

        Returns:
            The move to make; None for none.
        """
        found = on_first_rank(opening.world, lambda: self._search(opening, plan, slowdowns, moves=moves))
        if found is None or not moves:
            return None
        cluster, decided, gain = found
        try:
            move = check(opening.on(cluster), decided)
        except WhaleError as fault:
            if not stays or isinstance(fault, RuntimeFault):
                raise
            if self.is_first:
                self.tell(f"the plan stays, because the move failed: {fault.message}")
            return None
        self.moves(gain)
        return move

    def looked_at(self) -> None:
        """States that the speeds of now were looked at."""
        self._looked_at, self._is_said, self._is_postponed = self.health.slowdowns, False, False

    def moves(self, gain: float) -> None:
        """States that the plan to be taken up next is predicted to save this share of a step."""
        self._next_promise = (gain, median(self._seconds)) if self._seconds else None

    def _postpone(self, needed: str) -> None:
        """Says, once, what the plan at work is needed for."""
        if self.is_first and not self._is_postponed:
            self.tell(f"runtime.rebalance: no move: {needed}, whose rows are those of the current plan (whole_batches=True gives all rows)")
        self._is_postponed = True

    def _say_slow(self, opening: Opening, plan: Plan, slowdowns: Mapping[str, float]) -> None:
        """Prints, once and on rank 0, which devices are slower than planned, and the cost."""
        if self._is_said:
            return
        self._is_said = True
        slow = [each for each in self.health.slow if each.deviates and each.slowdown > each.assumed]
        if slow and self.is_first:
            graph, cluster = opening.modes.train.graph, opening.attachment.cluster
            even_seconds, stay_seconds = step_seconds(plan, graph, cluster, opening.settings, slowdowns)
            cost = f"predicted step time {format_seconds(stay_seconds)} instead of {format_seconds(even_seconds)}"
            self.tell(f"{', '.join(map(_said, slow))}: {cost}")

    def _search(
        self, opening: Opening, plan: Plan, slowdowns: Mapping[str, float], *, moves: bool
    ) -> tuple[Cluster, Decided, float] | None:
        """The cluster at these speeds, a plan that pays there, and the share of a step that it saves; None where none pays."""
        begun, graph, cluster = time.perf_counter(), opening.modes.train.graph, opening.attachment.cluster
        try:
            move = best_move(
                plan,
                graph,
                cluster,
                opening.settings,
                slowdowns,
                given=opening.given,
                overhead=self.overhead,
                least_gain=self.least_gain,
            )
        except Exception as fault:  # the step is done: nothing that goes wrong in the search is to end training
            said = fault.message if isinstance(fault, WhaleError) else f"{type(fault).__name__}: {fault}"
            self.tell(f"no plan was found for the measured speeds: {said}")
            return None
        does = ("moving to it" if moves else "runtime.rebalance: on would move to it") if move.pays else f"the plan stays: {move.against}"
        self.tell(f"{move}; {does}")
        return (move.cluster, Decided(move.plan, move.own_seconds, time.perf_counter() - begun), move.gain) if move.pays else None

    def _judge(self) -> None:
        """Compares, once, the last move with its prediction, and demands more of the next one where it fell short."""
        if self._promise is None or len(self._seconds) < WINDOW:
            return
        (promised, before), self._promise = self._promise, None
        found = round(1 - median(self._seconds) / before, 2) + 0.0  # no -0%
        if found < promised / 3:
            self.least_gain = min(MOST_GAIN_WANTED, 2 * self.least_gain)
            if self.is_first:
                self.tell(f"the move saved {found:.0%} of a step ({promised:.0%} was predicted): the next must save {self.least_gain:.0%}")
        else:
            self.least_gain = max(LEAST_GAIN, self.least_gain / 2)


def _said(device: DeviceHealth) -> str:
    return f"{device.device} (rank {device.rank}) takes {device.slowdown:.2g} x as long as the others since step {device.slow_since}"
