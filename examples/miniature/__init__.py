"""A mixed cluster in miniature: processes of this machine, slowed to a share of a core, limited in memory, on slow links."""

from miniature.links import Links, slow_links
from miniature.shares import slowed

__all__ = ["Links", "slow_links", "slowed"]
