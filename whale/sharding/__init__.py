"""Which device holds which elements of a tensor, and the steps from one such sharding to another."""

from whale.sharding.index_sets import IndexSpace
from whale.sharding.moves import Move, moves
from whale.sharding.reshard import Step, reshard
from whale.sharding.sharding import Piece, Region, Sharding

__all__ = ["IndexSpace", "Move", "Piece", "Region", "Sharding", "Step", "moves", "reshard"]
