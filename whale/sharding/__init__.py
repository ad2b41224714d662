"""Which device holds which elements of a tensor, and the steps from one such sharding to another."""

from whale.sharding.index_sets import IndexSpace
from whale.sharding.reshard import Move, Step, moves, reshard
from whale.sharding.sharding import Piece, Region, Sharding

__all__ = ["IndexSpace", "Move", "Piece", "Region", "Sharding", "Step", "moves", "reshard"]
