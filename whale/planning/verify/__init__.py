"""The check of a plan: all faults together, whoever made it."""

from whale.planning.verify.verify import verify

__all__ = ["verify"]
