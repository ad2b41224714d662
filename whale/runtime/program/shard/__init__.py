"""Lowering of cuts: a stage's graph as one device of a split group computes it on its parts."""

from whale.runtime.program.shard.group import Gate, Group
from whale.runtime.program.shard.lower import GROUP, ShardProgram, lower_shards
from whale.runtime.program.shard.slots import Slots

__all__ = ["GROUP", "Gate", "Group", "ShardProgram", "Slots", "lower_shards"]
