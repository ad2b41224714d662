"""What messages take of the devices at their ends, beside what they take on the link: of a CPU rank, whose core moves them too.

    device   |  compute  |handles|  compute  |      so long its computing stands still
    link                 |==== message ====>|

Where that was not measured it is nothing, as of devices that move what they send by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from whale.estimate.costs.line import Line
from whale.ir.cluster import Handling


@dataclass(frozen=True, slots=True)
class Volume:
    """What one device sends and receives.

    Attributes:
        num_messages: either way.
        num_bytes: either way, by rows.
    """

    num_messages: float = 0.0
    num_bytes: Line = field(default_factory=Line)

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.num_messages + other.num_messages, self.num_bytes + other.num_bytes)

    def line(self, handling: Handling) -> Line:
        """Seconds that it takes of a device, by rows."""
        return Line(self.num_messages * handling.seconds) + self.num_bytes * handling.per_byte

    def seconds(self, handling: Handling) -> float:
        """The same, of what has no rows."""
        return self.line(handling).fixed


def all_reduce_volume(num_devices: int, payload: Line) -> Volume:
    """Of each device in an all-reduce of a payload around a ring: twice from each to the next."""
    return ring_volume(num_devices, payload, 2)


def all_gather_volume(num_devices: int, payload: Line) -> Volume:
    """Of each device in an all-gather that gives every device the whole payload, or in a reduce-scatter of it."""
    return ring_volume(num_devices, payload, 1)


def all_to_all_volume(num_devices: int, payload: Line) -> Volume:
    """Of each device in an all-to-all of a payload that lies in parts before and after."""
    return Volume(2.0 * (num_devices - 1), payload * (2 * (num_devices - 1) / num_devices**2))


def ring_volume(num_devices: int, payload: Line, num_passes: int) -> Volume:
    """Of each device in passes of a payload around a ring: a part of it out, and one in, at each step."""
    both = 2.0 * num_passes * (num_devices - 1)
    return Volume(both, payload * (both / num_devices))
