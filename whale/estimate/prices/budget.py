"""The budget of a plan: the memory that it may fill, and who holds state that is sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from whale.ir.cluster import Device


@dataclass(frozen=True, slots=True)
class Budget:
    """What planning varies while the prices of ops stay the same."""

    reserved: frozenset[tuple[Device, int]] = frozenset()  # per device type, bytes that are left free; negative for more than there is
    num_keepers: int | None = None  # number of devices that state is sharded over, for closed forms; None for all of the cluster
    sums_at_once: bool = False  # whether there is one micro-batch, so that gradients may go to keepers as they are made
    is_alone: bool = False  # whether one replica holds each parameter once, so that gradients come as activations go, in no buckets

    @property
    def keeping(self) -> tuple[int | None, bool, bool]:
        """What the bytes of a part depend on."""
        return self.num_keepers, self.sums_at_once, self.is_alone

    def reserving(self, lacking: Mapping[Device, int]) -> Budget:
        """The same, with more bytes left free on each device type."""
        found = Counter(dict(self.reserved))
        found.update(lacking)
        return replace(self, reserved=frozenset((kind, number) for kind, number in found.items() if number))

    def reserved_on(self, kind: Device) -> int:
        return sum(number for own, number in self.reserved if own == kind)


ALL = Budget()
