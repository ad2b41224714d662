"""How fast links are, from the times of small and large messages."""

from __future__ import annotations

from whale.measure.link_speed import seconds_of_bytes


def test_noise_makes_no_absurd_bandwidth() -> None:
    assert seconds_of_bytes([5e-3, 3e-3], 1e-3) == [4e-3, 2e-3]
    assert seconds_of_bytes([2e-3, 0.5e-3], 1.9e-3) == [1e-3, 0.25e-3]
