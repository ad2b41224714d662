"""The search over plans: the fastest that fits, and what came next. Without torch."""

from whale.search.deciding import decide
from whale.search.result import Candidate, SearchResult
from whale.search.searching import search

__all__ = ["Candidate", "SearchResult", "decide", "search"]
