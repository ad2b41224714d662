"""Checks any plan and reports all faults together."""

from whale.planning.verify.verify import verify

__all__ = ["verify"]
