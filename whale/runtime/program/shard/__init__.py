"""Cuts lowered: a stage's graph and tensors as one device of a split group computes on its parts of them."""

from whale.runtime.program.shard.group import Gate, Group
from whale.runtime.program.shard.lower import GROUP, ShardProgram, lower_shards
from whale.runtime.program.shard.slots import Slots

__all__ = ["GROUP", "Gate", "Group", "ShardProgram", "Slots", "lower_shards"]
