"""A pass as its device and its host see it: the host starts kernels and messages ahead, so it takes as long as the longer of the two.

host      | start | start | start | start |
device       [kernel] [message] [kernel]   [kernel]     here the host rules
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whale.estimate.costs.line import Line
from whale.estimate.costs.op_table import Floats


@dataclass(frozen=True, slots=True)
class Started:
    """A pass.

    Attributes:
        device: seconds of its kernels, and of the messages that the device waits for.
        host: seconds of starting them, however many rows they work on.
    """

    device: Line = field(default_factory=Line)
    host: float = 0.0

    def __add__(self, other: Started) -> Started:
        """Both as one pass: the host is ahead from the first into the second."""
        return Started(self.device + other.device, self.host + other.host)

    def __mul__(self, count: float) -> Started:
        """So many of it as one pass."""
        return Started(self.device * count, self.host * count)

    def waiting(self, rows: Floats) -> Floats:
        """Seconds for which the device waits for its host, by rows."""
        found: Floats = np.maximum(self.host - self.device.fixed - self.device.per_row * rows, 0.0)
        return found

    def line(self, num_rows: float) -> Line:
        """Seconds that it takes, as a line about a number of rows."""
        return self.device + Line(max(0.0, self.host - self.device.at(num_rows)))
