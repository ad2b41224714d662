"""Where every element of a tensor lies, and the steps that bring it elsewhere: for activations, parameters, gradients and checkpoints."""

from whale.sharding.index_sets import IndexSpace
from whale.sharding.moves import Move, moves
from whale.sharding.reshard import Step, reshard
from whale.sharding.sharding import Piece, Region, Sharding

__all__ = ["IndexSpace", "Move", "Piece", "Region", "Sharding", "Step", "moves", "reshard"]
