"""The search over plans: the best that fits, and the runners-up. Without torch."""

from whale.search.deciding import decide
from whale.search.result import Candidate, SearchResult
from whale.search.searching import search

__all__ = ["Candidate", "SearchResult", "decide", "search"]
