"""The face that users import: `init`, `parallelize` and the `Engine` it returns."""

from whale.api.engine import Engine
from whale.api.parallelizing import init, parallelize

__all__ = ["Engine", "init", "parallelize"]
