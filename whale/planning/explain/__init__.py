"""The plan in words: every choice with its cost, its bound and its runner-up."""

from whale.planning.explain.text import explain

__all__ = ["explain"]
