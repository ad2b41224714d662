"""Where every element of a tensor lies, and the steps that bring it elsewhere: for activations, parameters, gradients and checkpoints."""

from whale.sharding.index_space import IndexSpace
from whale.sharding.moves import Move, moves
from whale.sharding.regions import Region
from whale.sharding.reshard import reshard
from whale.sharding.sharding import Piece, Sharding
from whale.sharding.steps import Step

__all__ = ["IndexSpace", "Move", "Piece", "Region", "Sharding", "Step", "moves", "reshard"]
