"""The search over plans: the fastest that fits, and what came next. Without torch."""

from whale.search.deciding import decide
from whale.search.found import Candidate, Found
from whale.search.searching import search

__all__ = ["Candidate", "Found", "decide", "search"]
