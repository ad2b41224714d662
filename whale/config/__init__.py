"""What a user can set: typed sections, where their values come from, and strict YAML for every file a user writes."""

from whale.config.config import RECIPE_VARIABLE, Config, Source, load_config, read_plan
from whale.config.keys import begun_by, did_you_mean, nearest
from whale.config.replicas import ReplicaBlock
from whale.config.sections import SCHEDULES
from whale.config.stages import StageBlock
from whale.config.strict_yaml import Document, parse_yaml, read_yaml

__all__ = [
    "RECIPE_VARIABLE", "SCHEDULES", "Config", "Document", "ReplicaBlock", "Source", "StageBlock",
    "begun_by", "did_you_mean", "load_config", "nearest", "parse_yaml", "read_plan", "read_yaml",
]  # fmt: skip
