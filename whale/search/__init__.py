"""The search over plans: the best that fits, and the runners-up. Without torch."""

from whale.search.deciding import decide
from whale.search.searching import Candidate, SearchResult, search

__all__ = ["Candidate", "SearchResult", "decide", "search"]
