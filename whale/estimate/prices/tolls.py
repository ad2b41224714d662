"""What collectives inside the split groups of a stage cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from whale.estimate.costs.communication import all_gather_line, all_reduce_line, all_to_all_line
from whale.estimate.costs.line import Line
from whale.estimate.costs.started import Started
from whale.estimate.prices.prices import Prices
from whale.ir.graph import Op
from whale.sharding.bridge_bytes import GATHERED, sum_share
from whale.sharding.bridges import ON_THE_SPOT, Bridge, Transport


@dataclass(frozen=True)
class Site:
    """Where a stage runs.

    Attributes:
        groups: the devices of each split group; of equal groups one is enough.
        num_rows: rows of a micro-batch that a group takes.
        in_flight: micro-batches whose activations are held.
        num_micro_batch: micro-batches of a step.
    """

    groups: tuple[tuple[str, ...], ...]
    num_rows: float
    in_flight: int
    num_micro_batch: int

    @property
    def width(self) -> int:
        return len(self.groups[0])


def moves(transport: Transport) -> bool:
    """Whether it takes a message."""
    return transport not in ON_THE_SPOT


@dataclass(frozen=True)
class Tolls:
    """Prices of collectives at one site.

    Attributes:
        prices: of the graph on the cluster.
        site: the split groups.
    """

    prices: Prices
    site: Site

    @cached_property
    def _known(self) -> dict[tuple[Transport, Line, int], Line]:
        return {}

    def line(self, transport: Transport, payload: Line, num_messages: int = 1) -> Line:
        """Seconds by rows of one collective over a whole tensor (bytes by rows), in the slowest group; each starts a kernel."""
        if not moves(transport):
            return Line(self.prices.costs.launch_seconds if transport else 0.0)
        key = transport, payload, num_messages
        if key not in self._known:
            price = {"all-reduce": all_reduce_line, "all-to-all": all_to_all_line}.get(transport, all_gather_line)
            rows = self.site.num_rows
            lines = (price(self.prices.cluster, group, payload, num_messages, rows) for group in self.site.groups)
            slowest = max(lines, key=lambda line: line.at(rows))
            self._known[key] = slowest + Line(num_messages * (self.prices.costs.launch_seconds + self.prices.costs.message_seconds))
        return self._known[key]

    def payload(self, op: Op) -> Line:
        """Bytes of an op's results by rows."""
        return self.prices.outputs[op.name]

    def sum_line(self, bridge: Bridge, op: Op) -> Line:
        """Seconds of combining what an op made for its part of an axis."""
        payload = self.payload(op) * sum_share(bridge, self.prices.graph, self.prices.axes)
        if bridge.combine in GATHERED:
            return self.line("all-gather", payload * self.site.width)
        return self.line(bridge.forward, payload)

    def both_ways(self, bridge: Bridge) -> tuple[Line, Line]:
        """Seconds of a bridge, forward and backward."""
        op = self.prices.graph.by_name[bridge.tensor]
        forward = self.sum_line(bridge, op) if bridge.is_sum else self.line(bridge.forward, self.payload(op))
        return forward, self.line(bridge.backward, self.payload(op)) if self.prices.training else Line()

    def synchronized(self, op: Op) -> Line:
        """Seconds per micro-batch of summing the gradient of a whole parameter over its group, once per step."""
        return self.line("all-reduce", self.payload(op)) * (1 / self.site.num_micro_batch)

    def started(self, bridges: Iterable[Bridge]) -> tuple[Started, Started]:
        """All bridges of a stage, forward and backward; to start a message takes as long of the host as of the device."""
        forward, backward = Started(), Started()
        for bridge in bridges:
            there, back = self.both_ways(bridge)
            forward += Started(there, moves(bridge.forward) * self.prices.costs.message_seconds)
            backward += Started(back, moves(bridge.backward) * self.prices.costs.message_seconds * self.prices.training)
        return forward, backward
